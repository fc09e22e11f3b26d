"""Two estimators of one gradient, with one signature: equilibrium propagation and backpropagation.

Covers which phases run in which order and how the nudge is chosen. The phases are in phases.py; what is
done with a gradient is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinscope.lab.draws import generator
from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder, check_decoder
from twinscope.propagation.gain import gains
from twinscope.propagation.phases import (
    Cost,
    Displace,
    Free,
    Local,
    Problem,
    Top,
    arithmetic,
    displaced,
    force_sweep,
    free_phase,
    read_block,
    rebuild,
    state_dtype,
    summed_cross_entropy,
    top,
)
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.stages import stage


@dataclass(frozen=True)
class Diagnostics:
    """What an estimate says about itself; empty lists and ``None`` where nothing was measured."""

    rule: str  # "ep" | "bp"
    rounds: int
    beta: float | None  # strength of the nudge, without its sign
    signs: tuple[int, ...]  # signs of the nudged phases
    gain: list[float]  # g_l, blocks 1 … L
    displacement_ratio: list[float]  # RMS(z_l - o_l) / RMS(z_l) at the states that were read
    residual: float | None  # max_l |z_l - o_l - g_l d_l| / |g_l d_l|, d recomputed at those states


@dataclass(frozen=True)
class Gradient:
    """Loss (nats per token, of the free phase) and the gradient of the mean loss per parameter name."""

    loss: float
    grads: dict[str, Tensor]
    diagnostics: Diagnostics


@dataclass(frozen=True)
class ParameterNames:
    """The trainable parameters by where they act: in one block, or outside (embedding and readout)."""

    outer: list[tuple[str, nn.Parameter]]
    blocks: list[list[tuple[str, nn.Parameter]]]


def parameter_names(model: Decoder) -> ParameterNames:
    """Group the trainable parameters of ``model``; a parameter shared by two blocks stands in both.

    Raises:
        ConfigError: a block has a parameter that ``model.named_parameters()`` does not list.
    """
    named = {id(p): name for name, p in model.named_parameters()}
    blocks: list[list[tuple[str, nn.Parameter]]] = []
    inner: set[int] = set()
    for index, block in enumerate(model.blocks):
        trainable = [p for p in block.parameters() if p.requires_grad]
        if any(id(p) not in named for p in trainable):
            raise ConfigError(
                f"block {index + 1} has parameters that the model does not register: "
                "keep the blocks in an nn.ModuleList of the model"
            )
        inner.update(id(p) for p in trainable)
        blocks.append([(named[id(p)], p) for p in trainable])
    outer = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in inner]
    return ParameterNames(outer, blocks)


def bp_gradient(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    *,
    precision: str = "fp32",
    cost: Cost = summed_cross_entropy,
) -> Gradient:
    """Gradient of the mean cost (cross-entropy) by backpropagation through the whole decoder.

    ``tokens`` and ``targets`` are (B, T) int64. ``precision`` is that of :class:`EPSettings`.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``).
    """
    _check(model, tokens, targets, precision)
    cast = arithmetic(precision, tokens.device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    dtype = state_dtype(model)
    with torch.enable_grad():
        with stage("embedding"), cast():
            z = model.embed(tokens).to(dtype)
        with stage("forward"), cast():
            for block in model.blocks:
                z = block(z).to(dtype)
        with stage("readout"):
            with cast():
                logits = model.readout(z)
            loss = cost(logits.to(dtype), targets) / tokens.numel()
    with stage("backward"):  # of readout and embedding too: one graph spans all
        found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    grads = GradientSum(model)
    grads.add(named, found)
    return Gradient(loss.item(), grads.result(), Diagnostics("bp", 0, None, (), [], [], None))


def ep_gradient(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    settings: EPSettings,
    seed: int = 0,
    step: int = 0,
    *,
    diagnose: bool = True,
    cost: Cost = summed_cross_entropy,
) -> Gradient:
    """Gradient of the mean cost (cross-entropy) by equilibrium propagation (METHOD 1.1 to 1.3).

    ``tokens`` and ``targets`` are (B, T) int64. ``(seed, step)`` determine the sign of a random nudge and
    the value of a random gain, nothing else is drawn. ``diagnose`` measures displacement ratio and
    residual; an unfused read pays one more force sweep for it. With ``rounds = 0`` the states stay free
    and the result is backpropagation's gradient: the control.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``).
    """
    names = parameter_names(model)
    grads = GradientSum(model)
    if settings.rounds == 0:
        return _undisplaced(_problem(model, tokens, targets, settings.precision, cost), names, grads)

    start = begin(model, tokens, targets, settings.precision, cost)
    gain = gains(settings.gain, len(model.blocks), seed, step)
    beta = settings.beta
    if beta is None:
        beta = _beta_for_displacement(settings, unit_ratios(start), gain)
    signs = _signs(settings.nudge, seed, step)
    outcomes = []
    for sign in signs:
        factors = displacement_factors(start, gain, sign, beta)
        keep = sign != signs[-1]
        outcomes.append(nudged_phase(start, settings, factors, grads, diagnose=diagnose, keep_first=keep))
    _embedding_read(start.free, torch.stack([o.below for o in outcomes]).sum(0), names, grads)
    return Gradient(
        start.loss,
        grads.result(1.0 / len(signs)),
        Diagnostics(
            "ep",
            settings.rounds,
            beta,
            signs,
            gain,
            [min(ratios) for ratios in zip(*(o.displacement_ratio for o in outcomes), strict=True)],
            max(o.residual for o in outcomes) if diagnose else None,
        ),
    )


@dataclass(frozen=True)
class Start:
    """What every nudged phase on one batch shares: it depends neither on the gain nor on the nudge."""

    problem: Problem
    names: ParameterNames
    free: Free
    loss: float  # nats per token, at the free states
    adjoints: list[Tensor]  # a_1 … a_L of the first force sweep, each (B, T, C)


def begin(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    precision: str = "fp32",
    cost: Cost = summed_cross_entropy,
) -> Start:
    """Free phase and first forces of one batch, ``tokens`` and ``targets`` (B, T) int64.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``).
    """
    problem = _problem(model, tokens, targets, precision, cost)
    free = free_phase(problem)
    at_top = top(problem, free.states[-1])
    adjoints = force_sweep(free.locals, at_top.adjoint)
    return Start(problem, parameter_names(model), free, at_top.cost.item() / problem.count, adjoints)


def unit_ratios(start: Start) -> list[float]:
    """``RMS(d_l) / RMS(z_l)`` of blocks 1 … L at beta 1: the displacement ratio that a nudge multiplies."""
    return [start.problem.count * ratio for ratio in _ratios(start.adjoints, start.free.states[1:])]


def displacement_factors(start: Start, gain: Sequence[float], sign: int, beta: float) -> list[float]:
    """``-g_l * sign * beta * N`` of blocks 1 … L: what turns ``a_l`` into the displacement ``g_l d_l``."""
    return [-g * sign * beta * start.problem.count for g in gain]


@dataclass(frozen=True)
class Outcome:
    """What a nudged phase says besides gradients; ratios and residual only where it was to diagnose."""

    below: Tensor  # a_0 = J_1ᵀ a_1, (B, T, C)
    displacement_ratio: list[float]
    residual: float


def nudged_phase(
    start: Start,
    settings: EPSettings,
    factors: Sequence[float],
    grads: GradientSum,
    *,
    diagnose: bool = True,
    keep_first: bool = False,
    outer: bool = True,
    displace: Displace = displaced,
) -> Outcome:
    """Rounds from ``start``, then the read into ``grads``; ``factors`` are :func:`displacement_factors`.

    Takes rounds, damping, top refresh and read from ``settings``; its nudge and gain are in ``factors``.
    ``keep_first`` leaves block 1's graph for another phase from the same start. Without ``outer`` the
    readout's gradient is left out. The embedding's is never part of a phase: it is linear in ``below``.
    """
    problem, names = start.problem, start.names
    states, chain, adjoints = start.free.states, start.free.locals, start.adjoints
    for index in range(settings.rounds):
        if index > 0:
            refreshed = index % settings.top_refresh == 0
            above = top(problem, states[-1]).adjoint if refreshed else adjoints[-1]
            adjoints = force_sweep(chain, above)
        first = start.free.locals[0]
        states, chain = rebuild(problem, states, first, factors, adjoints, settings.damping, displace)
    responses = [z - local.output.detach() for z, local in zip(states[1:], chain, strict=True)]
    fresh: list[Tensor] = []
    at_top: Top | None = None
    if outer or diagnose or settings.fused:
        # The readout's gradient is taken at the displaced z_L, so its adjoint there comes at no cost.
        at_top = top(problem, states[-1], [p for _, p in names.outer] if outer else [])
        if outer:
            grads.add(names.outer, at_top.grads)
    if settings.fused:
        assert at_top is not None
        below, fresh = _fused_read(chain, at_top.adjoint, names, grads, keep_first)
    else:
        if diagnose:
            assert at_top is not None
            fresh = force_sweep(chain, at_top.adjoint, keep=True)
        if settings.read == "energy":
            adjoints = [response / factor for response, factor in zip(responses, factors, strict=True)]
        below = _unfused_read(chain, adjoints, names, grads, keep_first)
    if not diagnose:
        return Outcome(below, [], 0.0)
    return Outcome(below, _ratios(responses, states[1:]), _residual(responses, fresh, factors))


def _undisplaced(problem: Problem, names: ParameterNames, grads: GradientSum) -> Gradient:
    """The read at free states: backpropagation, by the phases' own code."""
    free = free_phase(problem)
    at_top = top(problem, free.states[-1], [p for _, p in names.outer])
    grads.add(names.outer, at_top.grads)
    below, _ = _fused_read(free.locals, at_top.adjoint, names, grads)
    _embedding_read(free, below, names, grads)
    diagnostics = Diagnostics("ep", 0, None, (), [], [], None)
    return Gradient(at_top.cost.item() / problem.count, grads.result(), diagnostics)


class GradientSum:
    """Gradients by parameter name; contributions to one parameter (tied weights, two phases) add."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._grads: dict[str, Tensor] = {}

    def add(self, named: Sequence[tuple[str, nn.Parameter]], found: Sequence[Tensor | None]) -> None:
        for (name, _), grad in zip(named, found, strict=True):
            if grad is not None:
                held = self._grads.get(name)
                self._grads[name] = grad if held is None else held + grad

    def found(self, name: str) -> Tensor | None:
        """The gradient of one parameter, None where nothing reached it."""
        return self._grads.get(name)

    def result(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Every trainable parameter's gradient, in the model's order; zero where nothing reached it."""
        if scale != 1.0:
            for grad in self._grads.values():
                grad.mul_(scale)
        return {
            name: self._grads[name] if name in self._grads else torch.zeros_like(p)
            for name, p in self._model.named_parameters()
            if p.requires_grad
        }


def _fused_read(
    chain: Sequence[Local],
    above: Tensor,
    names: ParameterNames,
    grads: GradientSum,
    keep_first: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Refresh the forces and read against them in one sweep; returns ``a_0`` and ``a_1 … a_L``."""
    fresh = [above]
    for index in reversed(range(len(chain))):
        group = names.blocks[index]
        below, found = read_block(
            chain[index], fresh[-1], [p for _, p in group], through=True, keep=keep_first and index == 0
        )
        assert below is not None
        grads.add(group, found)
        fresh.append(below)
    return fresh[-1], fresh[-2::-1]


def _unfused_read(
    chain: Sequence[Local],
    adjoints: Sequence[Tensor],
    names: ParameterNames,
    grads: GradientSum,
    keep_first: bool,
) -> Tensor:
    """Read every block against the given adjoints; returns ``a_0``, which only block 1 has to give."""
    below: Tensor | None = None
    for index in reversed(range(len(chain))):
        group = names.blocks[index]
        bottom = index == 0
        below, found = read_block(
            chain[index], adjoints[index], [p for _, p in group], through=bottom, keep=keep_first and bottom
        )
        grads.add(group, found)
    assert below is not None
    return below


def _embedding_read(free: Free, adjoint: Tensor, names: ParameterNames, grads: GradientSum) -> None:
    """Gradients of the embedding's parameters against ``a_0``."""
    outer = [p for _, p in names.outer]
    if outer and free.embedded.requires_grad:
        cotangent = adjoint.to(free.embedded.dtype)
        with stage("embedding"):
            found = torch.autograd.grad(free.embedded, outer, cotangent, allow_unused=True)
        grads.add(names.outer, found)


def _beta_for_displacement(settings: EPSettings, unit: Sequence[float], gain: Sequence[float]) -> float:
    """The beta at which the largest ``g_l RMS(d_l) / RMS(z_l)`` equals the displacement asked for."""
    assert settings.displacement is not None
    largest = max(g * ratio for g, ratio in zip(gain, unit, strict=True))
    return settings.displacement / largest if largest else 0.0


def _signs(nudge: str, seed: int, step: int) -> tuple[int, ...]:
    if nudge == "symmetric":
        return (1, -1)
    if nudge == "random":
        return (1 if generator(seed, "nudge", step).integers(2) else -1,)
    return (1 if nudge == "positive" else -1,)


def _ratios(parts: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[float]:
    return (_norms(parts) / _norms(wholes)).tolist()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(t) for t in tensors]).double()


def _residual(responses: Sequence[Tensor], fresh: Sequence[Tensor], factors: Sequence[float]) -> float:
    """``max_l |z_l - o_l - g_l d_l| / |g_l d_l|``: how far the states are from the nudged fixed point."""
    off = [torch.sub(response, a, alpha=f) for response, a, f in zip(responses, fresh, factors, strict=True)]
    ratios = _norms(off) / _norms(fresh)
    return (ratios / ratios.new_tensor(factors).abs()).max().item()


def _problem(model: Decoder, tokens: Tensor, targets: Tensor, precision: str, cost: Cost) -> Problem:
    _check(model, tokens, targets, precision)
    return Problem(model, tokens, targets, cost, arithmetic(precision, tokens.device))


def _check(model: Decoder, tokens: Tensor, targets: Tensor, precision: str) -> None:
    check_decoder(model)
    if tokens.dim() != 2 or not tokens.numel() or targets.shape[:2] != tokens.shape:
        raise ConfigError(
            f"tokens are {tuple(tokens.shape)} and targets {tuple(targets.shape)}: "
            "give one batch of token ids (B, T), not empty, and a target for each"
        )
    if not any(p.requires_grad for _, p in model.named_parameters()):
        raise ConfigError("every parameter is frozen: there is no gradient to compute")
    if precision == "fp64" and any(p.dtype != torch.float64 for _, p in model.named_parameters()):
        raise ConfigError(
            "precision fp64 needs a model whose parameters are float64: call model.double() first, "
            "or set precision = 'fp32'"
        )
