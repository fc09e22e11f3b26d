"""Counting the FLOPs that a step really runs, operator by operator and stage by stage.

A dispatch mode over torch's own table of formulas, with formulas for what the table lacks: attention on the
CPU, which it counts as 0, and products with a vector. Attention counts all T·T pairs, masked or not, as
torch's formula does. Not covered: norms and other elementwise work, which have no formula; compiled graphs
and captured CUDA graphs, whose operators no mode sees, so what is counted runs eagerly.

torch's ``FlopCounterMode`` is not used: its module tracker raises where a block's graph starts at a leaf
that is differentiated by itself, as every block's does here. Counting slows a step down, so it never shares
a process with timing: :func:`count_apart`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from twinscope.lab.config import Section
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.config import ArmSettings
from twinscope.propagation.cost.apart import run_apart
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.optimizers import build_optimizer
from twinscope.propagation.settings import EPSettings, OptimizerSettings
from twinscope.propagation.stages import observed
from twinscope.propagation.twin import Arm

#: The stage of operators that run outside every mark.
UNMARKED = "unmarked"


@dataclass(frozen=True)
class Counted:
    """FLOPs of one call, 2 to a multiply-add; ``without_formula`` holds calls, not FLOPs."""

    stages: dict[str, dict[str, int]]  # stage -> operator -> FLOPs, where there are any
    without_formula: dict[str, int]  # operators on floating-point tensors that no formula covers

    @property
    def total(self) -> int:
        """FLOPs of the whole call."""
        return sum(self.by_stage().values())

    def by_stage(self) -> dict[str, int]:
        """FLOPs of each stage, in order of first appearance."""
        return {stage: sum(found.values()) for stage, found in self.stages.items()}

    def by_operator(self) -> dict[str, int]:
        """FLOPs of each operator."""
        sums: dict[str, int] = {}
        for found in self.stages.values():
            for operator, flops in found.items():
                sums[operator] = sums.get(operator, 0) + flops
        return sums


def count(step: Callable[[], object]) -> Counted:
    """Run ``step`` once and count it; whatever it does to its model it does.

    Stages are those that stages.py marks. A backward pass counts in the stage that asks for it.
    """
    counter = _Counter()
    with counter, observed(counter.observe):
        step()
    stages = {name: found for name, found in counter.stages.items() if found}
    return Counted(stages, dict(sorted(counter.without.items())))


class Counting(Section):
    """What to count in another process: one step of every arm, on random tokens.

    An arm without settings backpropagates, through graphs made again where it is ``checkpointed``.
    """

    shape: GPTConfig
    batch: int
    arms: dict[str, EPSettings | None]
    optimizer: OptimizerSettings
    checkpointed: list[str] = Field(default_factory=list)
    precision: Literal["fp32", "fp64", "amp"] = "fp32"
    device: str = "cpu"
    threads: int = 1


def count_apart(counting: Counting, timeout: float | None = None) -> dict[str, Counted]:
    """Count one training step of every arm in a process of its own, as the trainer runs it.

    A step is the gradient without diagnostics, the check that it is finite, and the optimizer's update.
    FLOPs depend on shapes alone, so tokens and weights are random. ``timeout`` is in seconds.

    Raises:
        TwinscopeError: the process failed or took longer than ``timeout``.
    """

    def late(seconds: float) -> str:
        return f"counting took longer than {seconds:g} s in its own process: count a smaller batch"

    found = run_apart("twinscope.propagation.cost.counting", counting, timeout, late, "counting")
    return {name: Counted(arm["stages"], arm["without_formula"]) for name, arm in found.items()}


def count_arms(counting: Counting) -> dict[str, Counted]:
    """As :func:`count_apart`, in this process."""
    torch.set_num_threads(counting.threads)
    device = torch.device(counting.device)
    draws = torch.Generator().manual_seed(0)
    size = (2, counting.batch, counting.shape.context)
    tokens, targets = torch.randint(counting.shape.vocab, size, generator=draws).to(device)
    dtype = torch.float64 if counting.precision == "fp64" else torch.float32
    found = {}
    for name, settings in counting.arms.items():
        model = build_gpt(counting.shape, 0, dtype, device)
        optimizer = build_optimizer(model, counting.optimizer, 1)
        rule = "bp" if settings is None else "ep"
        arm = Arm(ArmSettings(name=name, rule=rule), _gradient(name, counting), model, optimizer)
        found[name] = count(lambda arm=arm: arm.advance(tokens, targets, 0, 0))
    return found


def _gradient(name: str, counting: Counting) -> Any:
    settings = counting.arms[name]
    if settings is None:
        again = name in counting.checkpointed
        return lambda model, tokens, targets, seed, step: bp_gradient(
            model, tokens, targets, precision=counting.precision, recompute=again
        )
    chosen = settings.model_copy(update={"precision": counting.precision})
    return lambda model, tokens, targets, seed, step: ep_gradient(
        model, tokens, targets, chosen, seed, step, diagnose=False
    )


def _attention_forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _matrix_vector(matrix: Any, vector: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(matrix.shape)


def _added_matrix_vector(added: Any, matrix: Any, vector: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(matrix.shape)


def _inner(left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(left.shape)


def _added_batches(added: Any, left: Any, right: Any, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(left.shape) * right.shape[-1]


def _formulas() -> dict[Any, Callable[..., int]]:
    """torch's table with what it lacks; an entry of torch's own is never replaced."""
    aten = torch.ops.aten
    missing = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten._addmm_activation: _added_batches,
        aten.addbmm: _added_batches,
        aten.mv: _matrix_vector,
        aten.addmv: _added_matrix_vector,
        aten.dot: _inner,
        aten.vdot: _inner,
    }
    return missing | flop_registry


class _Counter(TorchDispatchMode):
    """Adds up what every operator costs, under the stage that is on."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, dict[str, int]] = {}
        self.without: dict[str, int] = {}
        self._formulas = _formulas()
        # Kept here and not in the context: backward passes on CUDA run in threads of their own.
        self._stage = UNMARKED

    @contextmanager
    def observe(self, name: str) -> Iterator[None]:
        before, self._stage = self._stage, name
        try:
            yield
        finally:
            self._stage = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            found = self.stages.setdefault(self._stage, {})
            # The table's formulas read shapes; an ``out=`` argument is none of theirs.
            given = {key: value for key, value in kwargs.items() if key != "out"}
            found[name] = found.get(name, 0) + formula(*args, **given, out_val=out)
        elif not func.is_view and _computes(args):
            self.without[name] = self.without.get(name, 0) + 1
        return out


def _computes(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_floating_point() for arg in args)


def main() -> None:
    """Read a :class:`Counting` as JSON from standard input, print the counts as one line of JSON."""
    found = count_arms(Counting.model_validate_json(sys.stdin.read()))
    counts = {
        name: {"stages": arm.stages, "without_formula": arm.without_formula} for name, arm in found.items()
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
