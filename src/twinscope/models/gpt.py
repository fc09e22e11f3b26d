"""A pre-norm GPT: the decoder that is trained here.

Covers learned or rotary positions, LayerNorm or RMSNorm, GELU or SwiGLU, grouped key/value heads and
a tied or untied head. With learned positions, LayerNorm, GELU and a tied head it computes what GPT-2
computes; with rotary positions, RMSNorm and SwiGLU, what Llama computes. It has no dropout, no
key/value cache and no padding mask.

Shapes: B texts, T ≤ context positions, C = width channels, H heads of D = C / H channels, G ≤ H
key/value heads, M hidden units of the MLP, V tokens in the vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils import skip_init

from twinscope.lab.config import Section
from twinscope.lab.errors import DataError
from twinscope.models.decoder import Decoder, check_decoder, forward


class GPTShape(Section):
    """A GPT but for its vocabulary; an optional key left out follows from the others.

    ``bias`` (of the projections and of LayerNorm) is on exactly with LayerNorm; ``mlp_hidden`` is
    4 · width for GELU and 8/3 · width, rounded up to a multiple of 8, for SwiGLU, which gives both the
    same number of weights; ``kv_heads`` equals ``heads``.
    """

    layers: int = Field(default=4, gt=0)
    width: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    context: int = Field(default=64, gt=0)
    positions: Literal["learned", "rotary"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    tied: bool = False
    bias: bool | None = None
    mlp_hidden: int | None = Field(default=None, gt=0)
    kv_heads: int | None = Field(default=None, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.width % self.heads:
            raise ValueError(
                f"width {self.width} does not split evenly over {self.heads} heads: "
                "make width a multiple of heads"
            )
        if self.heads % self.key_heads:
            raise ValueError(
                f"{self.heads} heads do not split evenly over {self.key_heads} key/value heads: "
                "make heads a multiple of kv_heads"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels, but a head has {self.head_width} "
                f"(width {self.width} / heads {self.heads}): make width / heads even"
            )
        return self

    @property
    def head_width(self) -> int:
        """D, the channels of one head."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """G, the key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden(self) -> int:
        """M, the hidden units of the MLP."""
        if self.mlp_hidden is not None:
            return self.mlp_hidden
        return 4 * self.width if self.mlp == "gelu" else 8 * -(-self.width // 3)

    @property
    def biased(self) -> bool:
        """Whether projections and LayerNorm add a bias."""
        return self.norm == "layernorm" if self.bias is None else self.bias


class GPTConfig(GPTShape):
    """A whole GPT: its shape and the number of tokens in its vocabulary."""

    vocab: int = Field(gt=0)


def build_gpt(
    config: GPTConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GPT:
    """A GPT with fresh weights: a pure function of ``config`` and ``seed``.

    Weights are drawn in float32 on the CPU from a generator of their own and cast, so a float64 model
    holds the same numbers as a float32 one and no global random state moves. Matrices are N(0, 0.02²),
    with the two projections that write to the residual stream scaled by 1/√(2 · layers) as in GPT-2;
    biases are 0 and norm gains 1.

    Raises:
        ConfigError: ``dtype`` is neither float32 nor float64.
    """
    model = GPT(config, dtype, device)
    check_decoder(model)
    draws = torch.Generator().manual_seed(seed)
    residual_scale = (2 * config.layers) ** -0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            drawn = torch.randn(parameter.shape, generator=draws, dtype=torch.float32) * 0.02
            if name.endswith(("attn.out.weight", "mlp.down.weight")):
                drawn *= residual_scale
            parameter.copy_(drawn)
    return model


class GPT(nn.Module, Decoder):
    """The model :func:`build_gpt` returns; constructed directly, its weights are uninitialised memory.

    Parameters, in order: ``tok.weight`` (V, C); ``pos.weight`` (context, C) if learned;
    ``blocks.N.{attn_norm, attn.qkv, attn.out, mlp_norm, mlp.up | mlp.gate_up, mlp.down}``; ``norm``;
    ``head.weight`` (V, C) unless tied. ``attn.qkv`` stacks the rows of H query, G key and G value
    heads; ``mlp.gate_up`` stacks gate over up.
    """

    pos: nn.Embedding | None
    head: nn.Linear | None

    def __init__(self, config: GPTConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        place = {"dtype": dtype, "device": device}
        rotary = Rotary(config, device) if config.positions == "rotary" else None
        self.tok = _embedding(config.vocab, config.width, place)
        self.pos = None
        if config.positions == "learned":
            self.pos = _embedding(config.context, config.width, place)
        self.blocks = nn.ModuleList(Block(config, rotary, place) for _ in range(config.layers))
        self.norm = _norm(config, place)
        self.head = None
        if not config.tied:
            self.head = _linear(config.width, config.vocab, False, place)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``(B, T)`` int64 to ``(B, T, C)``: token vectors, plus position vectors if learned.

        Raises:
            DataError: the text is empty or longer than the context, or (on the CPU) a token is
                outside the vocabulary.
        """
        length = tokens.shape[-1]
        if not 1 <= length <= self.config.context:
            raise DataError(
                f"a text of {length} tokens does not fit this model, which reads 1 to "
                f"{self.config.context}: change the length, or the model's context"
            )
        try:
            z = self.tok(tokens)
        except IndexError:
            raise DataError(
                f"a token id lies outside 0 … {self.config.vocab - 1}, the vocabulary of this model: "
                "use the tokenizer it was trained with"
            ) from None
        return z if self.pos is None else z + self.pos.weight[:length]

    def readout(self, z: Tensor) -> Tensor:
        """``(B, T, C)`` to logits ``(B, T, V)``: final norm, then the head or the token vectors."""
        weight = self.tok.weight if self.head is None else self.head.weight
        return F.linear(self.norm(z), weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits ``(B, T, V)`` of token ids ``(B, T)`` int64."""
        return forward(self, tokens)


class Block(nn.Module):
    """``(B, T, C)`` to ``(B, T, C)``: ``h = z + attn(norm(z))``, then ``h + mlp(norm(h))``."""

    def __init__(self, config: GPTConfig, rotary: Rotary | None, place: dict[str, Any]) -> None:
        super().__init__()
        self.attn_norm = _norm(config, place)
        self.attn = Attention(config, rotary, place)
        self.mlp_norm = _norm(config, place)
        self.mlp = Gelu(config, place) if config.mlp == "gelu" else SwiGLU(config, place)

    def forward(self, z: Tensor) -> Tensor:
        h = z + self.attn(self.attn_norm(z))
        return h + self.mlp(self.mlp_norm(h))


class Attention(nn.Module):
    """Causal softmax attention with H query heads on G key/value heads, scaled by 1/√D."""

    def __init__(self, config: GPTConfig, rotary: Rotary | None, place: dict[str, Any]) -> None:
        super().__init__()
        self.heads = config.heads
        self.key_heads = config.key_heads
        self.head_width = config.head_width
        # One Rotary serves all blocks: it is a constant table, and sharing keeps one copy of it.
        self.rotary = rotary
        rows = (self.heads + 2 * self.key_heads) * self.head_width
        self.qkv = _linear(config.width, rows, config.biased, place)
        self.out = _linear(config.width, config.width, config.biased, place)

    def forward(self, x: Tensor) -> Tensor:
        # Splitting (B, T, H + 2G, D) along heads makes the backward pass one concatenation; the layouts
        # with q, k and v in front cost a second copy there.
        heads = self.qkv(x).view(*x.shape[:2], -1, self.head_width)
        if self.rotary is None:
            q, k, v = heads.split((self.heads, self.key_heads, self.key_heads), dim=2)
        else:
            turned, v = heads.split((self.heads + self.key_heads, self.key_heads), dim=2)
            q, k = self.rotary(turned).split((self.heads, self.key_heads), dim=2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),  # (B, H, T, D)
            k.transpose(1, 2),  # (B, G, T, D)
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.key_heads != self.heads,
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Rotary(nn.Module):
    """Rotary positions: channel pair (i, i + D/2) at position t turns by ``t · theta^(−2i/D)``.

    Su et al., arXiv:2104.09864, with the pairing of Llama (halves, not neighbours). The tables are
    computed and kept in float64, so a model cast up to float64 turns by exact angles.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, device: torch.device | str) -> None:
        super().__init__()
        half = config.head_width // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        positions = torch.arange(config.context, dtype=torch.float64)
        angles = torch.outer(positions, config.rope_theta**-exponents)[:, None]  # (context, 1, D/2)
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat((cos, cos), -1).to(device), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1).to(device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turn ``(B, T, heads, D)`` by the angles of positions 0 … T − 1; the dtype stays."""
        # Under autocast x is half precision; the angles are worth more than its 8 or 11 bits.
        working = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table[: x.shape[1]].to(working) for table in (self.cos, self.sin))
        # Rolling by D/2 swaps the halves, and the first half of sin is stored negated.
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Gelu(nn.Module):
    """``down(gelu(up(x)))`` with the tanh form of GELU, as GPT-2 has it."""

    def __init__(self, config: GPTConfig, place: dict[str, Any]) -> None:
        super().__init__()
        self.up = _linear(config.width, config.hidden, config.biased, place)
        self.down = _linear(config.hidden, config.width, config.biased, place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) · up(x))``, Shazeer, arXiv:2002.05202, with gate and up in one product."""

    def __init__(self, config: GPTConfig, place: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up = _linear(config.width, 2 * config.hidden, config.biased, place)
        self.down = _linear(config.hidden, config.width, config.biased, place)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def _norm(config: GPTConfig, place: dict[str, Any]) -> nn.Module:
    if config.norm == "rmsnorm":
        return skip_init(nn.RMSNorm, config.width, eps=config.norm_eps, **place)
    return skip_init(nn.LayerNorm, config.width, eps=config.norm_eps, bias=config.biased, **place)


def _linear(columns: int, rows: int, bias: bool, place: dict[str, Any]) -> nn.Linear:
    # skip_init leaves the memory unwritten, and with it the global random state that nn.Linear would use.
    return cast(nn.Linear, skip_init(nn.Linear, columns, rows, bias=bias, **place))


def _embedding(rows: int, columns: int, place: dict[str, Any]) -> nn.Embedding:
    return cast(nn.Embedding, skip_init(nn.Embedding, rows, columns, **place))
