"""What one training step costs in FLOPs, in closed form from the shapes: a ledger, stage by stage.

Covers the products of the blocks, attention, readout and optimizer of a GPT's step under equilibrium
propagation or backpropagation, and why the ratio of two steps is not the shorthand's. 2 FLOPs are one
multiply-add. Norms, activations, rotary turns, softmax, residual sums, biases, the embedding's lookup and
AdamW are elementwise or memory traffic and are not counted, as torch's own table does not. Counting what
really runs is in counting.py.

Attention is entered twice. ``flops`` takes all T·T pairs of positions, as torch's formula does; ``causal``
takes the T(T + 1)/2 that a causal mask leaves. A kernel that skips masked tiles lies in between.

Legend: L blocks; N = B·T tokens; C channels; H heads of D; G key/value heads; M hidden units; V tokens of
the vocabulary; W = C·(H + 2G)·D + C² + 2CM (3CM for SwiGLU) weights of one block's matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinscope.models.gpt import GPTConfig
from twinscope.propagation.optimizers import newton_schulz_flops
from twinscope.propagation.settings import EPSettings, OptimizerSettings

Term = Literal["matmul", "attention", "readout", "embedding", "optimizer"]

#: Products of (T, D, T) in one attention: scores and values; backwards the scores once more, the gradients of
#: the probabilities and of v, q and k. The kernel gives all three gradients, wanted or not. Where no fused
#: kernel exists, the plain formula keeps the probabilities and takes 4 backwards; no CPU here does.
ATTENTION_FORWARD, ATTENTION_BACKWARD = 2, 5

#: How far the dispatcher's count may be off a ledger (METHOD 1.5).
TOLERANCE = 0.01


@dataclass(frozen=True)
class Line:
    """One term of one stage; ``formula`` says symbols and numbers, ``causal`` counts masked pairs as free."""

    stage: str
    term: Term
    flops: int
    causal: int
    formula: str


@dataclass(frozen=True)
class Correction:
    """What the shorthand leaves out or gets wrong, in FLOPs; negative where the step is cheaper."""

    reason: str
    flops: int


@dataclass(frozen=True)
class Ledger:
    """One step's FLOPs. ``shorthand + sum(corrections) = total``."""

    lines: list[Line]
    passes: int  # of the block stack, as the shorthand counts them: 1 + 2K + 2, or 3
    forward: int  # F: one forward pass of the block stack, attention in full
    corrections: list[Correction]  # in the order of REASONS

    @property
    def total(self) -> int:
        """FLOPs with attention in full, what the dispatcher counts."""
        return sum(line.flops for line in self.lines)

    @property
    def causal_total(self) -> int:
        """FLOPs with attention over unmasked pairs only."""
        return sum(line.causal for line in self.lines)

    @property
    def shorthand(self) -> int:
        """``(1 + 2K + 2) F``, or ``3F`` for backpropagation."""
        return self.passes * self.forward

    def by_stage(self, *, causal: bool = False) -> dict[str, int]:
        """FLOPs of each stage, in the order in which the stages first appear."""
        return _summed(((line.stage, line) for line in self.lines), causal)

    def by_term(self, *, causal: bool = False) -> dict[str, int]:
        """FLOPs of each term."""
        return _summed(((line.term, line) for line in self.lines), causal)

    def rows(self) -> list[dict[str, Any]]:
        """The lines as JSON objects: ``stage, term, flops, causal_flops, formula``."""
        return [
            {
                "stage": line.stage,
                "term": line.term,
                "flops": line.flops,
                "causal_flops": line.causal,
                "formula": line.formula,
            }
            for line in self.lines
        ]


SHARED = "both signs share the first force sweep"
NO_FIRST_FORCE = "block 1 needs no force: its VJP is part of the read"
NO_FIRST_REBUILD = "block 1 is not rebuilt: its input is clamped, so its free pass stands"
RESIDUAL = "one more force sweep measures the residual"
AGAIN = "recompute: graphs that were not kept are made again"
ATTENTION = "attention: a VJP takes 5 products of T × T against the forward's 2, with or without weights"
READOUT = "readout: it costs more or less of a step than the blocks' passes, which the shorthand counts alone"
OPTIMIZER = "optimizer: Newton–Schulz products, the same under either rule"
#: Why a ratio departs from the shorthand's, in the order in which :func:`compare` takes them in.
REASONS = (SHARED, NO_FIRST_FORCE, NO_FIRST_REBUILD, RESIDUAL, AGAIN, ATTENTION, READOUT, OPTIMIZER)


@dataclass(frozen=True)
class Step:
    """One reason, by how much it moves the ratio, and the ratio once it is taken in."""

    reason: str
    change: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """Two ledgers: their ratio, the shorthand's, and the way from one to the other."""

    ratio: float
    causal_ratio: float
    shorthand_ratio: float
    steps: list[Step]  # the last one's ratio is ``ratio``

    def explanation(self) -> list[str]:
        """The way from the shorthand to the ratio, a line each, without reasons that change nothing."""
        moved = [step for step in self.steps if step.change != 0.0]
        return [
            f"shorthand {self.shorthand_ratio:.4f}",
            *(f"{step.change:+.4f} → {step.ratio:.4f}  {step.reason}" for step in moved),
            f"with masked pairs free {self.causal_ratio:.4f}",
        ]


def compare(numerator: Ledger, denominator: Ledger) -> Comparison:
    """The ratio of two steps and, reason by reason, why it is not the shorthand's.

    Reasons are taken in one after the other in the order of :data:`REASONS`, in both steps at once: each
    one's share depends on that order, their sum does not.
    """
    above, below = numerator.shorthand, denominator.shorthand
    ratio = shorthand = above / below
    steps = []
    for one, other in zip(numerator.corrections, denominator.corrections, strict=True):
        above, below = above + one.flops, below + other.flops
        steps.append(Step(one.reason, above / below - ratio, above / below))
        ratio = above / below
    return Comparison(ratio, numerator.causal_total / denominator.causal_total, shorthand, steps)


def disagreements(found: Ledger, counted: Mapping[str, int], tolerance: float = TOLERANCE) -> list[str]:
    """Sentences about the stages whose count is off the ledger by more than ``tolerance``; empty if none is.

    ``counted`` maps stages to FLOPs, as ``Counted.by_stage`` does.
    """
    expected = found.by_stage()
    sentences = []
    for stage in [*expected, *(name for name in counted if name not in expected)]:
        ledger, count = expected.get(stage, 0), counted.get(stage, 0)
        if abs(count - ledger) > tolerance * ledger:
            share = f" ({count / ledger - 1:+.2%})" if ledger else ""
            sentences.append(
                f"stage '{stage}': counted {count:,} FLOPs where the ledger has {ledger:,}{share}"
            )
    return sentences


def ledger(
    shape: GPTConfig,
    batch: int,
    settings: EPSettings | None,
    optimizer: OptimizerSettings | None,
    *,
    diagnose: bool = False,
    recompute: bool = False,
) -> Ledger:
    """The FLOPs of one step on ``batch`` windows of ``shape.context`` tokens (METHOD 1.1, 1.5).

    ``settings`` None is backpropagation; ``optimizer`` None is the bare gradient. ``diagnose`` is that of
    ``ep_gradient``, which the trainer leaves off; ``recompute`` is that of ``bp_gradient``, where settings do
    not say it.
    """
    book = _Book(shape, batch)
    if settings is None:
        _backpropagation(book, recompute)
    else:
        _equilibrium(book, settings, diagnose)
    if optimizer is not None:
        _optimizer(book, optimizer)
    return book.close()


def block_weights(shape: GPTConfig) -> int:
    """W, the weights in one block's matrices."""
    return sum(rows * columns for _, rows, columns in _matrices(shape))


def forward_flops(shape: GPTConfig, batch: int) -> int:
    """F, one forward pass of the block stack with attention in full."""
    tokens = batch * shape.context
    attention = ATTENTION_FORWARD * 2 * tokens * shape.context * shape.width
    return shape.layers * (2 * tokens * block_weights(shape) + attention)


class _Book:
    """Lines of one step while they are written, and what the shorthand makes of the same step."""

    def __init__(self, shape: GPTConfig, batch: int) -> None:
        self.shape = shape
        self.batch = batch
        self.tokens = batch * shape.context
        self.weights = block_weights(shape)
        self.lines: list[Line] = []
        self.passes = 0
        self.corrected: dict[str, int] = dict.fromkeys(REASONS, 0)
        self.one_forward = forward_flops(shape, batch) // shape.layers

    def blocks(
        self, stage: str, runs: int, *, forward: int = 0, vjp: int = 0, weights: int = 0, spared: int = 0
    ) -> None:
        """``runs`` passes through one block, each with so many products forward, backward, for weights.

        ``spared`` weights, CM of W, take no part.
        """
        # A backward pass goes through attention once, whether it is for the input, the weights or both.
        n, t, c, w = self.tokens, self.shape.context, self.shape.width, self.weights - spared
        products = forward + vjp + weights
        symbol = "(W − CM)" if spared else "W"
        text = f"{runs} × {2 * products}N{symbol} = {runs} × {2 * products} · {n} · {w}"
        self._line(stage, "matmul", runs * products * 2 * n * w, text)
        tiles = forward * ATTENTION_FORWARD + max(vjp, weights) * ATTENTION_BACKWARD
        text = f"{runs} × {2 * tiles}BT²C = {runs} × {2 * tiles} · {self.batch} · {t}² · {c}"
        causal = f"causal: {t}({t} + 1)/2 in place of {t}²"
        self._line(stage, "attention", runs * tiles * 2 * n * t * c, f"{text}; {causal}")
        extra = tiles - ATTENTION_FORWARD * products
        self.corrected[ATTENTION] += runs * extra * 2 * n * t * c

    def readout(self, stage: str, runs: int, *, products: int) -> None:
        """``runs`` evaluations of the head, each with so many products: forward, adjoint, weights."""
        n, c, v = self.tokens, self.shape.width, self.shape.vocab
        flops = runs * products * 2 * n * c * v
        self._line(
            stage, "readout", flops, f"{runs} × {2 * products}NCV = {runs} × {2 * products} · {n} · {c} · {v}"
        )
        self.corrected[READOUT] += flops

    def embedding(self) -> None:
        self._line("embedding", "embedding", 0, "0: a lookup forward, an indexed sum backward")

    def optimizer(self, flops: int, text: str) -> None:
        self._line("optimizer", "optimizer", flops, text)
        self.corrected[OPTIMIZER] += flops

    def again(self, stage: str, runs: int, *, without: int = 0) -> None:
        """``runs`` passes through one block to make its graph again, ``without`` that many weights."""
        if runs:
            before = sum(line.flops for line in self.lines)
            self.blocks(stage, runs, forward=1, spared=without)
            self.corrected[AGAIN] += sum(line.flops for line in self.lines) - before

    def correct(self, reason: str, block_forwards: int) -> None:
        """Enter what a reason changes, in forward passes of one block."""
        self.corrected[reason] += block_forwards * self.one_forward

    def close(self) -> Ledger:
        forward = self.shape.layers * self.one_forward
        corrections = [Correction(reason, flops) for reason, flops in self.corrected.items()]
        return Ledger(self.lines, self.passes, forward, corrections)

    def _line(self, stage: str, term: Term, flops: int, formula: str) -> None:
        t = self.shape.context
        # T² divides the attention's FLOPs, and T(T + 1) is even.
        causal = flops // t**2 * (t * (t + 1) // 2) if term == "attention" else flops
        self.lines.append(Line(stage, term, flops, causal, formula))


def _backpropagation(book: _Book, recompute: bool) -> None:
    layers = book.shape.layers
    book.passes = 3
    book.embedding()
    book.blocks("forward", layers, forward=1)
    book.readout("readout", 1, products=1)
    book.blocks("backward", layers, vjp=1, weights=1)
    book.readout("backward", 1, products=2)
    if recompute:
        # A block that runs again stops where nothing more is needed: before its last product, mlp.down.
        book.again("backward", layers, without=book.shape.hidden * book.shape.width)


def _equilibrium(book: _Book, settings: EPSettings, diagnose: bool) -> None:
    layers, rounds = book.shape.layers, settings.rounds
    book.embedding()
    book.blocks("free", layers, forward=1)
    if rounds == 0:
        book.passes = 3
        book.readout("readout", 1, products=3)
        book.blocks("read", layers, vjp=1, weights=1)
        book.again("read", layers - 1 if settings.recompute else 0)
        return
    phases = 2 if settings.nudge == "symmetric" else 1
    measured = phases if diagnose and not settings.fused else 0
    forces = 1 + phases * (rounds - 1) + measured
    refreshes = phases * sum(index % settings.top_refresh == 0 for index in range(1, rounds))
    book.passes = 1 + phases * (2 * rounds + 2)
    book.correct(SHARED, -(phases - 1) * layers)
    book.correct(NO_FIRST_FORCE, -forces)
    book.correct(NO_FIRST_REBUILD, -phases * rounds)
    book.correct(RESIDUAL, measured * layers)
    book.readout("readout", 1 + refreshes, products=2)
    book.blocks("forces", forces * (layers - 1), vjp=1)
    book.blocks("rebuild", phases * rounds * (layers - 1), forward=1)
    book.readout("readout", phases, products=3)
    # A fused read and an unfused one take the same products: below block 1's first matrix lies a norm with a
    # gain of its own, so the read goes back through that matrix whether or not the input's VJP is wanted.
    book.blocks("read", phases * layers, vjp=1, weights=1)
    if settings.recompute and layers > 1:
        # The block that ran last still has its graph, except where the residual is measured after the read.
        # An unfused read follows each block's rebuild at once, so it lacks the graph of block 1 alone.
        book.again("forces", forces * (layers - 2) + measured)
        book.again("read", phases * (layers - 1 if settings.fused else 1))


def _optimizer(book: _Book, settings: OptimizerSettings) -> None:
    if settings.kind == "adamw":
        book.optimizer(0, "0: AdamW is elementwise")
        return
    for name, rows, columns in _matrices(book.shape):
        flops = book.shape.layers * newton_schulz_flops(rows, columns)
        m, n = sorted((rows, columns))
        sizes = f"n = {n}, m = {m}"
        book.optimizer(flops, f"{book.shape.layers} × 5(4nm² + 2m³), {name}: {sizes}; AdamW is elementwise")


def _matrices(shape: GPTConfig) -> list[tuple[str, int, int]]:
    """Name, rows and columns of the matrices of one block."""
    c, m = shape.width, shape.hidden
    up = ("mlp.up", m, c) if shape.mlp == "gelu" else ("mlp.gate_up", 2 * m, c)
    rows = (shape.heads + 2 * shape.key_heads) * shape.head_width
    return [("attn.qkv", rows, c), ("attn.out", c, c), up, ("mlp.down", c, m)]


def _summed(lines: Iterable[tuple[str, Line]], causal: bool) -> dict[str, int]:
    sums: dict[str, int] = {}
    for key, line in lines:
        sums[key] = sums.get(key, 0) + (line.causal if causal else line.flops)
    return sums
