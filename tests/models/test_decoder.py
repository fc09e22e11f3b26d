"""The decoder protocol: what the check accepts, each thing it refuses, and the forward pass it implies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder, check_decoder, forward
from twinscope.models.gpt import GPTConfig, build_gpt


class Linears(nn.Module):
    """A decoder of linear maps, so that its logits are a product of matrices."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(3)
        self.tok = nn.Parameter(torch.randn(5, 3, generator=draws, dtype=torch.float64).to(dtype))
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=dtype) for _ in range(2))
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, nn.Linear)
                block.weight.copy_(torch.randn(3, 3, generator=draws, dtype=torch.float64))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.tok[tokens]

    def readout(self, z: Tensor) -> Tensor:
        return z @ self.tok.T


def with_dropout(module: nn.Module) -> Linears:
    model = Linears()
    model.blocks[1].add_module("extra", module)
    return model


class FlashWithRate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.25


def test_forward_is_embed_blocks_in_order_readout() -> None:
    model = Linears()
    first, second = (parameter for name, parameter in model.named_parameters() if name != "tok")
    tokens = torch.tensor([[0, 4, 2], [1, 1, 3]])
    expected = model.tok[tokens] @ first.T @ second.T @ model.tok.T
    logits = forward(check_decoder(model), tokens)
    assert logits.shape == (2, 3, 5)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt_is_a_decoder_also_by_name(tied: bool) -> None:
    model = build_gpt(GPTConfig(vocab=7, layers=2, width=8, heads=2, context=4, tied=tied))
    # Naming the protocol as a base is what isinstance needs from Python 3.12 on.
    assert Decoder in type(model).__mro__
    assert isinstance(model, Decoder)
    assert check_decoder(model) is model


def test_tied_parameters_are_accepted() -> None:
    model = Linears()
    assert check_decoder(model) is model


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (nn.Dropout(0.1), r"blocks\.1\.extra\.p = 0\.1"),
        (FlashWithRate(), r"blocks\.1\.extra\.attention_dropout = 0\.25"),
    ],
)
def test_dropout_counts_only_while_training_and_above_zero(module: nn.Module, place: str) -> None:
    model = with_dropout(module)
    with pytest.raises(ConfigError, match=f"dropout is on \\({place} in training mode\\)"):
        check_decoder(model)
    check_decoder(model.eval())
    check_decoder(with_dropout(nn.Dropout(0.0)))


@pytest.mark.parametrize(("dtype", "short"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_half_precision_is_refused_with_the_reason(dtype: torch.dtype, short: str) -> None:
    with pytest.raises(ConfigError, match=f"{short} displaced states round to exactly zero") as caught:
        check_decoder(Linears(dtype))
    assert 'precision = "amp"' in str(caught.value)
    with pytest.raises(ConfigError, match=f"tok.weight is {str(dtype).removeprefix('torch.')}"):
        build_gpt(GPTConfig(vocab=7, layers=1, width=8, heads=2, context=4), dtype=dtype)


def without_blocks(model: Linears) -> None:
    del model.blocks


def empty(model: Linears) -> None:
    model.blocks = nn.ModuleList()


def listed(model: Linears) -> None:
    # Registered nowhere, as in a plain list.
    blocks = list(model.blocks)
    del model.blocks
    model.__dict__["blocks"] = blocks


def called(model: Linears) -> None:
    del model.blocks
    model.__dict__["blocks"] = [lambda z: z]


def shared(model: Linears) -> None:
    first, second = model.blocks
    second.weight = first.weight


def mixed(model: Linears) -> None:
    model.blocks[1].float()


def integers(model: Linears) -> None:
    model.blocks[1].scale = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)


def no_readout(model: Linears) -> None:
    model.__dict__["readout"] = None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_blocks, "no sequence of blocks called 'blocks'"),
        (empty, "it has no blocks"),
        (listed, r"weight of block 0 is missing from named_parameters\(\)"),
        (called, "a block is no torch.nn.Module"),
        (shared, r"blocks 0 and 1 share blocks\.0\.weight"),
        (mixed, r"blocks\.1\.weight is float32 but tok is float64"),
        (integers, r"blocks\.1\.scale is int8: use float32 or float64"),
        (no_readout, r"it has no method readout\(\)"),
    ],
)
def test_every_broken_promise_has_its_sentence(change: Callable[[Linears], None], reason: str) -> None:
    model = Linears()
    change(model)
    with pytest.raises(ConfigError, match=f"Linears cannot be used as a decoder: .*{reason}"):
        check_decoder(model)


def test_all_reasons_stand_in_one_sentence() -> None:
    model = with_dropout(nn.Dropout(0.1))
    shared(model)
    with pytest.raises(ConfigError, match=r"share.*; dropout is on"):
        check_decoder(model)
    with pytest.raises(ConfigError, match=r"it is no torch\.nn\.Module"):
        check_decoder(object())
