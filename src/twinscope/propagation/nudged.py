"""A nudged phase: rounds of forces and rebuild from a free start, then the read.

Covers the order of the phases, and what is kept for how long: a state, an adjoint or a graph is let go after
its last use, so that a step holds little more than backpropagation does. The phases themselves are in
phases.py, the choice of the nudge in estimators.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twinscope.models.decoder import Decoder
from twinscope.propagation.gradients import GradientSum, ParameterNames, parameter_names
from twinscope.propagation.phases import (
    Cost,
    Displace,
    Free,
    Local,
    Problem,
    displaced,
    force_sweep,
    free_phase,
    problem_of,
    read_block,
    rebuild,
    summed_cross_entropy,
    top,
    trace_block,
)
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.stages import stage


@dataclass(frozen=True)
class Start:
    """What every nudged phase on one batch shares: it depends neither on the gain nor on the nudge."""

    problem: Problem
    names: ParameterNames
    free: Free
    cost: Tensor  # summed over N tokens, at the free states
    adjoints: list[Tensor]  # a_1 … a_L of the first force sweep, each (B, T, C)

    @property
    def loss(self) -> float:
        """Nats per token at the free states; reading it waits for the device."""
        return self.problem.mean(self.cost)


def begin(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    precision: str = "fp32",
    cost: Cost = summed_cross_entropy,
    *,
    recompute: bool = False,
    ranks: Ranks | None = None,
) -> Start:
    """Free phase and first forces of one batch, ``tokens`` and ``targets`` (B, T) int64.

    With ``recompute`` the free phase keeps states without graphs. Each of ``ranks`` starts its own texts.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``).
    """
    problem = problem_of(model, tokens, targets, precision, cost, ranks)
    free = free_phase(problem, recompute=recompute)
    at_top = top(problem, free.states[-1])
    adjoints = force_sweep(problem, free.states, free.locals, at_top.adjoint)
    return Start(problem, parameter_names(model), free, at_top.cost, adjoints)


def unit_ratios(start: Start) -> list[float]:
    """``RMS(d_l) / RMS(z_l)`` of blocks 1 … L at beta 1: the displacement ratio that a nudge multiplies.

    Over several ranks it is that of the whole batch.
    """
    ratios = _ratios(start.adjoints, start.free.states[1:], start.problem.ranks)
    return [start.problem.count * ratio for ratio in ratios]


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
    keep_start: bool = False,
    outer: bool = True,
    displace: Displace = displaced,
) -> Outcome:
    """Rounds from ``start``, then the read into ``grads``; ``factors`` are :func:`displacement_factors`.

    Takes rounds, damping, top refresh, read and recompute from ``settings``; its nudge and gain are in
    ``factors``. States, adjoints and graphs of ``start`` are used up, so that each is let go after its last
    use; ``keep_start`` leaves them for another phase. Without ``outer`` the readout's gradient is left out.
    The embedding's is never part of a phase: it is linear in ``below``.
    """
    problem, names = start.problem, start.names
    states, adjoints, chain = start.free.states, start.adjoints, start.free.locals
    first = states[1], chain[0]
    if keep_start:
        states, adjoints = list(states), list(adjoints)
    top_block = len(problem.model.blocks) - 1
    responses: list[Tensor] = []
    below: Tensor | None = None
    highest = adjoints[-1]
    for number in range(1, settings.rounds + 1):
        if number > 1:
            if (number - 1) % settings.top_refresh == 0:
                highest = top(problem, states[-1]).adjoint
            adjoints = force_sweep(problem, states, chain, highest)
        last = number == settings.rounds
        # An unfused read takes forces that are known, so each block is read as soon as it stands.
        read_now = last and not settings.fused
        traced = [read_now or not settings.recompute or index == top_block for index in range(top_block + 1)]
        z0 = states[0]
        rebuilt = rebuild(
            problem, states, first, factors, adjoints, settings.damping, displace, traced=traced, weights=last
        )
        states, chain = [z0], []
        for part in rebuilt:
            local, bottom = part.local, part.index == 0
            if last and diagnose:
                responses.append(part.state - part.output)
            if read_now:
                cotangent = part.adjoint
                if settings.read == "energy":
                    cotangent = (part.state - part.output) / factors[part.index]
                keep = keep_start if bottom else diagnose and not settings.recompute
                found = _read(
                    problem, part.index, states[-1], local, cotangent, names, grads, through=bottom, keep=keep
                )
                below = found if bottom else below
                local = local if keep else None
            states.append(part.state)
            chain.append(local)
    fresh: list[Tensor] = []
    if outer or diagnose or settings.fused:
        # The readout's gradient is taken at the displaced z_L, so its adjoint there comes at no cost.
        at_top = top(problem, states[-1], [p for _, p in names.outer] if outer else [])
        if outer:
            grads.add(names.outer, at_top.grads)
        if settings.fused:
            below, fresh = fused_read(
                problem, states, chain, at_top.adjoint, names, grads, keep_first=keep_start, collect=diagnose
            )
        elif diagnose:
            fresh = force_sweep(problem, states, chain, at_top.adjoint)
    assert below is not None
    if not diagnose:
        return Outcome(below, [], 0.0)
    ratios = _ratios(responses, states[1:], problem.ranks)
    return Outcome(below, ratios, _residual(responses, fresh, factors, problem.ranks))


def _read(
    problem: Problem,
    index: int,
    z: Tensor,
    local: Local | None,
    cotangent: Tensor,
    names: ParameterNames,
    grads: GradientSum,
    *,
    through: bool,
    keep: bool = False,
) -> Tensor | None:
    """Read block ``index`` (from 0) at its input ``z``, by its graph or by one made there."""
    if local is None:
        with stage("read"):
            _, local = trace_block(problem, index, z, weights=True)
    group = names.blocks[index]
    below, found = read_block(local, cotangent, [p for _, p in group], through=through, keep=keep)
    grads.add_block(group, found)
    return below


def fused_read(
    problem: Problem,
    states: Sequence[Tensor],
    chain: list[Local | None],
    above: Tensor,
    names: ParameterNames,
    grads: GradientSum,
    *,
    keep_first: bool = False,
    collect: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Refresh the forces and read against them in one sweep, which empties ``chain``.

    Returns ``a_0`` and, where they are to be collected, ``a_1 … a_L``.
    """
    fresh = [above] if collect else []
    for index in reversed(range(len(chain))):
        below = _read(
            problem,
            index,
            states[index],
            chain.pop(),
            above,
            names,
            grads,
            through=True,
            keep=keep_first and index == 0,
        )
        assert below is not None
        above = below
        if collect:
            fresh.append(below)
    return above, fresh[-2::-1]


def _ratios(parts: Sequence[Tensor], wholes: Sequence[Tensor], ranks: Ranks | None) -> list[float]:
    return _ratio(parts, wholes, ranks).tolist()


def _ratio(parts: Sequence[Tensor], wholes: Sequence[Tensor], ranks: Ranks | None) -> Tensor:
    """Norms of ``parts`` over those of ``wholes``, of the whole batch: one sum over ranks for all."""
    norms = torch.stack([torch.linalg.vector_norm(t) for t in (*parts, *wholes)]).double()
    if ranks is not None:
        norms = ranks.sum(norms.square()).sqrt()
    return norms[: len(parts)] / norms[len(parts) :]


def _residual(
    responses: Sequence[Tensor], fresh: Sequence[Tensor], factors: Sequence[float], ranks: Ranks | None
) -> float:
    """``max_l |z_l - o_l - g_l d_l| / |g_l d_l|``: how far the states are from the nudged fixed point."""
    off = [torch.sub(response, a, alpha=f) for response, a, f in zip(responses, fresh, factors, strict=True)]
    ratios = _ratio(off, fresh, ranks)
    return (ratios / ratios.new_tensor(factors).abs()).max().item()
