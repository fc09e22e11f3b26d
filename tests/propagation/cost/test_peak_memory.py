"""Peaks of memory against sizes that are known exactly."""

from __future__ import annotations

import io
import json

import pytest
import torch

from twinscope.lab.errors import TwinscopeError
from twinscope.models.gpt import GPTConfig
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.cost import peak_memory
from twinscope.propagation.cost.peak_memory import Event, Peak, Subject, observe, peak, peak_apart, peak_here

MIB = 2**20


def test_the_peak_is_the_largest_sum_and_leaves_out_what_stands_apart_at_the_end():
    events = [Event(1, 100), Event(2, 50), Event(1, -100), Event(3, 30), Event(1, 70), Event(2, -50)]
    assert peak(events) == 150
    # The last thing at address 1 is left out; what stood there before was something else.
    assert peak(events, {1}) == 150
    assert peak([Event(1, 100), Event(2, 50), Event(2, -50)], {1}) == 50
    assert peak([Event(1, 100), Event(1, -100), Event(1, 100)], {1}) == 100
    assert peak([]) == 0


def test_every_allocation_of_a_call_is_seen_in_order_autograds_own_too():
    weight = torch.randn(512, 512, requires_grad=True)  # 1 MiB
    x = torch.randn(512, 512)

    def call():
        hidden = x @ weight  # 1 MiB
        out = hidden * hidden  # 1 MiB, keeps hidden
        grad = torch.ones_like(out)  # 1 MiB
        return torch.autograd.grad(out, [weight], grad)

    call()
    events, (found,) = observe(call, torch.device("cpu"))
    held = sum(event.size for event in events)
    assert held == pytest.approx(found.untyped_storage().nbytes(), abs=4096)
    # hidden, out, the cotangent, two products of the backward with it and their sum; or one less, where the
    # engine frees or adds in place.
    assert 5 * MIB <= peak(events) <= 6.1 * MIB
    assert peak(events, {found.untyped_storage().data_ptr()}) <= peak(events)


def subject(arm: str, **train) -> Subject:
    training = TrainConfig.model_validate(
        {"data": {"batch": 4}, "train": {"threads": 1, **train}, "optimizer": {"kind": "adamw"}}
    )
    return Subject(
        training=training, shape=GPTConfig(vocab=64, layers=6, width=64, heads=4, context=64), arm=arm
    )


def test_parameters_gradients_and_state_are_what_the_shapes_say_and_activations_hold_the_graph():
    found = {arm: peak_here(subject(arm)) for arm in ("ep", "bp")}
    shape = subject("bp").shape
    weights = sum(p.numel() for p in peak_memory.build_gpt(shape).parameters())
    tokens, width, layers = 4 * 64, 64, 6
    for one in found.values():
        assert one.parameters == pytest.approx(4 * weights / MIB)
        assert one.gradients == pytest.approx(4 * weights / MIB)
        # Two moments and a counter per parameter.
        assert one.optimizer == pytest.approx(8 * weights / MIB, rel=1e-3)
        # Not every gradient stands at the moment of most activations.
        without = one.parameters + one.optimizer + one.activations
        assert without <= one.total <= without + one.gradients + 0.01
    # At least what a block's products keep for the backward: the inputs of qkv, q, k, v, attention's output,
    # the MLP's input, its hidden layer before and after GELU, and the residual stream, once.
    kept = layers * tokens * width * (1 + 3 + 1 + 1 + 4 + 4) * 4 / MIB
    assert kept < found["bp"].activations < 2 * kept
    assert found["bp"].activations < found["ep"].activations < 2 * found["bp"].activations
    # Twice the width of every number.
    double = peak_here(subject("bp", precision="fp64"))
    assert double.parameters == 2 * found["bp"].parameters
    assert double.activations == pytest.approx(2 * found["bp"].activations, rel=0.02)


def test_the_process_of_its_own_takes_a_subject_and_prints_a_peak(monkeypatch, capsys):
    asked = subject("ep", precision="fp64")
    text = asked.model_dump_json(exclude_unset=True)
    assert Subject.model_validate_json(text) == asked
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    peak_memory.main()
    printed = Peak(**json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert printed.activations == peak_here(asked).activations


def test_a_process_that_fails_or_hangs_says_so_in_a_sentence(monkeypatch, tmp_path):
    script = tmp_path / "python"
    for body, words in (
        ("echo 'no room' >&2; exit 3", r"memory of arm 'bp' failed in its own process \(exit 3\): no room"),
        ("exec sleep 20", "memory of arm 'bp' was not seen within 0.5 s"),
    ):
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(script))
        with pytest.raises(TwinscopeError, match=words):
            peak_apart(subject("bp"), timeout=0.5)
