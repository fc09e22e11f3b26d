"""Two estimators of one gradient, with one signature: equilibrium propagation and backpropagation.

Covers how the nudge is chosen and what an estimate is put together from. The order of the phases is in
nudged.py, the phases are in phases.py; what is done with a gradient is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twinscope.lab.draws import generator
from twinscope.models.decoder import Decoder
from twinscope.propagation.gain import gains
from twinscope.propagation.gradients import (
    Diagnostics,
    Gradient,
    GradientSum,
    ParameterNames,
    parameter_names,
)
from twinscope.propagation.nudged import begin, displacement_factors, fused_read, nudged_phase, unit_ratios
from twinscope.propagation.phases import (
    Cost,
    Problem,
    arithmetic,
    check_request,
    free_phase,
    problem_of,
    state_dtype,
    summed_cross_entropy,
    top,
)
from twinscope.propagation.ranks.buckets import reduction
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.stages import stage


def bp_gradient(
    model: Decoder,
    tokens: Tensor,
    targets: Tensor,
    *,
    precision: str = "fp32",
    recompute: bool = False,
    cost: Cost = summed_cross_entropy,
    ranks: Ranks | None = None,
) -> Gradient:
    """Gradient of the mean cost (cross-entropy) by backpropagation through the whole decoder.

    ``tokens`` and ``targets`` are (B, T) int64. ``precision`` is that of :class:`EPSettings`. With
    ``recompute`` each block keeps its input alone and runs again in the backward pass (gradient
    checkpointing, Chen et al., arXiv:1604.06174): one more forward pass, the same gradient. With ``ranks``
    each computes its texts of the same batch, and all get the gradient of the whole.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``); or
            there are more ranks than texts.
    """
    if ranks is not None:
        return _bp_over_ranks(problem_of(model, tokens, targets, precision, cost, ranks), recompute)
    check_request(model, tokens, targets, precision)
    cast = arithmetic(precision, tokens.device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    dtype = state_dtype(model)
    with torch.enable_grad():
        with stage("embedding"), cast():
            z = model.embed(tokens).to(dtype)
        with stage("forward"), cast():
            for block in model.blocks:
                z = _forward_of(block, recompute)(z).to(dtype)
        with stage("readout"):
            with cast():
                logits = model.readout(z)
            loss = cost(logits.to(dtype), targets) / tokens.numel()
    with stage("backward"):  # of readout and embedding too: one graph spans all
        found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    grads = GradientSum(model)
    grads.add(named, found)
    return Gradient(loss.item(), grads.result(), Diagnostics("bp", 0, None, (), [], [], None))


def _forward_of(block: nn.Module, recompute: bool) -> Callable[[Tensor], Tensor]:
    """The block, or the block that runs again in the backward pass."""
    if not recompute:
        return block
    # Decoders draw nothing, so a second run has no random state to bring back.
    return partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)


def _bp_over_ranks(problem: Problem, recompute: bool) -> Gradient:
    """Backpropagation whose backward pass stops at every block, so that sums over ranks begin on the way.

    Embedding and readout are cut off, as they may share a parameter, which is then complete at the end.
    """
    model, cast = problem.model, problem.cast
    names = parameter_names(model)
    outer = [p for _, p in names.outer]
    grads = GradientSum(model, reduction(problem.ranks))
    dtype = state_dtype(model)
    with torch.enable_grad():
        with stage("embedding"), cast():
            embedded = model.embed(problem.tokens)
        states = [embedded.detach().to(dtype).requires_grad_()]  # z_0 … z_L, each (B, T, C)
        with stage("forward"), cast():
            for block in model.blocks:
                states.append(_forward_of(block, recompute)(states[-1]).to(dtype))
        at_top = states[-1].detach().requires_grad_()
        with stage("readout"):
            with cast():
                logits = model.readout(at_top)
            summed = problem.cost(logits.to(dtype), problem.targets)
    with stage("backward"):
        above, *found = torch.autograd.grad(summed / problem.count, [at_top, *outer], allow_unused=True)
        grads.add(names.outer, found)
        for group in reversed(names.blocks):
            output = states.pop()
            inputs = [states[-1], *(p for _, p in group)]
            above, *found = torch.autograd.grad(output, inputs, above, allow_unused=True)
            grads.add_block(group, found)
    _embedding_read(embedded, above, names, grads)
    loss = problem.mean(summed.detach())
    return Gradient(loss, grads.result(), Diagnostics("bp", 0, None, (), [], [], None))


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
    ranks: Ranks | None = None,
) -> Gradient:
    """Gradient of the mean cost (cross-entropy) by equilibrium propagation (METHOD 1.1 to 1.3).

    ``tokens`` and ``targets`` are (B, T) int64. ``(seed, step)`` determine the sign of a random nudge and
    the value of a random gain, nothing else is drawn. ``diagnose`` measures displacement ratio and
    residual; an unfused read pays one more force sweep for it. With ``rounds = 0`` the states stay free
    and the result is backpropagation's gradient: the control. With ``ranks`` each computes its texts of the
    same batch, and all get gradient, beta and diagnostics of the whole.

    Raises:
        ConfigError: the model is no decoder that an estimator can work on (see ``check_decoder``); or
            there are more ranks than texts.
    """
    names = parameter_names(model)
    signs = _signs(settings.nudge, seed, step)
    if settings.rounds == 0:
        problem = problem_of(model, tokens, targets, settings.precision, cost, ranks)
        return _undisplaced(problem, names, GradientSum(model, reduction(ranks)), settings.recompute)

    grads = GradientSum(model, reduction(ranks), phases=len(signs))
    start = begin(model, tokens, targets, settings.precision, cost, recompute=settings.recompute, ranks=ranks)
    gain = gains(settings.gain, len(model.blocks), seed, step)
    beta = settings.beta
    if beta is None:
        beta = _beta_for_displacement(settings, unit_ratios(start), gain)
    outcomes = []
    for sign in signs:
        factors = displacement_factors(start, gain, sign, beta)
        keep = sign != signs[-1]
        outcomes.append(nudged_phase(start, settings, factors, grads, diagnose=diagnose, keep_start=keep))
    _embedding_read(start.free.embedded, _sum([o.below for o in outcomes]), names, grads)
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


def _undisplaced(problem: Problem, names: ParameterNames, grads: GradientSum, recompute: bool) -> Gradient:
    """The read at free states: backpropagation, by the phases' own code."""
    free = free_phase(problem, recompute=recompute, weights=True)
    at_top = top(problem, free.states[-1], [p for _, p in names.outer])
    grads.add(names.outer, at_top.grads)
    below, _ = fused_read(problem, free.states, free.locals, at_top.adjoint, names, grads)
    _embedding_read(free.embedded, below, names, grads)
    diagnostics = Diagnostics("ep", 0, None, (), [], [], None)
    return Gradient(problem.mean(at_top.cost), grads.result(), diagnostics)


def _embedding_read(embedded: Tensor, adjoint: Tensor, names: ParameterNames, grads: GradientSum) -> None:
    """Gradients of the embedding's parameters against ``a_0``, by the graph of ``embedded`` = z_0."""
    outer = [p for _, p in names.outer]
    if outer and embedded.requires_grad:
        cotangent = adjoint.to(embedded.dtype)
        with stage("embedding"):
            found = torch.autograd.grad(embedded, outer, cotangent, allow_unused=True)
        grads.add(names.outer, found)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


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
