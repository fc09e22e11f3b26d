"""Compiled blocks: the same gradient to rounding, forces without parameters, and who cannot compile."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from oracles import LinearDecoder, half_squared_error
from twinscope.lab.errors import ConfigError
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation import twin
from twinscope.propagation.compiling import compile_blocks
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.train import create_run, prepare, train

pytestmark = [
    # What torch's compiler imports uses parts of torch that torch calls deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # torch's compiler looks at the .grad of whatever a block is given.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _forget():
    yield
    torch._dynamo.reset()


def pair(backend, layers=3, **options):
    shape = GPTConfig(vocab=31, layers=layers, width=32, heads=2, context=16, **options)
    plain, compiled = build_gpt(shape), build_gpt(shape)
    compile_blocks(compiled, backend)
    tokens, targets = torch.randint(31, (2, 3, 16), generator=torch.Generator().manual_seed(1))
    return plain, compiled, tokens, targets


def assert_close(found, expected, tolerance=1e-5):
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    for name, grad in expected.grads.items():
        assert float((found.grads[name] - grad).norm() / grad.norm()) < tolerance, name


class Products:
    """A backend that runs graphs as they stand and counts the matrix products in each."""

    def __init__(self) -> None:
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, _: self._noted(graph, self.forward),
            bw_compiler=lambda graph, _: self._noted(graph, self.backward),
        )

    def _noted(self, graph, counts):
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        counts.append(sum(node.target in products for node in graph.graph.nodes))
        return make_boxed_func(graph)


def test_forces_compute_no_gradient_of_a_parameter_and_blocks_share_their_code():
    products = Products()
    plain, compiled, tokens, targets = pair(products.backend)
    products.forward.clear()  # the probe's
    settings = EPSettings(nudge="positive")
    assert_close(
        ep_gradient(compiled, tokens, targets, settings), ep_gradient(plain, tokens, targets, settings)
    )
    # Four matrices: forces take one product of each, the read two. Three blocks share one graph of a kind.
    assert sorted(products.backward) == [4, 8]
    assert products.forward == [4, 4]
    assert_close(bp_gradient(compiled, tokens, targets), bp_gradient(plain, tokens, targets))
    assert len(products.backward) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_every_kind_of_step_runs_on_compiled_blocks(recompute):
    plain, compiled, tokens, targets = pair(
        "aot_eager", positions="rotary", norm="rmsnorm", mlp="swiglu", kv_heads=1
    )
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for rounds, fused in ((0, True), (1, True), (2, False)):
        settings = EPSettings(rounds=rounds, fused=fused, nudge="symmetric", recompute=recompute)
        expected = ep_gradient(plain, tokens, targets, settings)
        assert_close(ep_gradient(compiled, tokens, targets, settings), expected)
    expected = bp_gradient(plain, tokens, targets)
    assert_close(bp_gradient(compiled, tokens, targets, recompute=recompute), expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_torchs_own_backend_agrees():
    # Linear blocks are library calls in compiled code: the probe is all that g++ has to translate.
    plain, compiled = (LinearDecoder(vocab=7, width=4, layers=3, out=3, seed=0) for _ in range(2))
    compile_blocks(compiled)
    rng = np.random.default_rng(1)
    tokens = torch.from_numpy(rng.integers(0, 7, size=(1, 6)))
    targets = torch.from_numpy(rng.normal(size=(1, 6, 3)))
    settings = EPSettings(beta=0.01, nudge="symmetric", precision="fp64")
    expected, found = (
        ep_gradient(model, tokens, targets, settings, cost=half_squared_error) for model in (plain, compiled)
    )
    assert all(block._compiled_call_impl for block in compiled.blocks)
    assert_close(found, expected, 1e-12)


def test_a_machine_that_cannot_compile_is_told_so():
    model = build_gpt(GPTConfig(vocab=7, layers=1, width=8, heads=2, context=4))
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (None, "/nonexistent/g++")}),
        pytest.raises(ConfigError) as caught,
    ):
        compile_blocks(model)
    sentence = str(caught.value)
    assert sentence.startswith("compile = true, but torch cannot compile for cpu here (")
    assert "No working C++ compiler found" in sentence
    assert sentence.endswith("install a C++ compiler such as g++, or set compile = false")
    assert not any(block._compiled_call_impl for block in model.blocks)


def test_the_twin_compiles_the_blocks_of_every_arm(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(twin, "compile_blocks", compiled.append)
    text = tmp_path / "text.txt"
    text.write_text("the state of the union is strong and the people know it well " * 60)
    config = {
        "model": {"layers": 1, "width": 8, "heads": 2, "context": 8},
        "data": {"corpus": str(text), "batch": 2},
        "train": {"steps": 1, "eval_batches": 1, "threads": 1, "compile": True},
    }
    for wanted in (True, False):
        compiled.clear()
        config["train"]["compile"] = wanted
        prepared = prepare(TrainConfig.model_validate(config))
        with create_run(prepared, tmp_path / f"runs-{wanted}") as run:
            train(prepared, run, quiet=True)
        assert len(compiled) == (2 if wanted else 0)
