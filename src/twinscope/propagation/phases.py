"""The phases of equilibrium propagation as pure functions on a Decoder (METHOD 1.1).

Covers the free phase, forces, rebuild and read. No module is mutated, no hook is left, nothing global is
set. What to run in which order, and the choice of the nudge, is in estimators.py.

Forces are kept as *adjoints* ``a_l``, the force in units of the mean loss: ``d_l = -beta * N * a_l``. The
force sweep is linear, so this is the same algorithm; the linear read then takes ``a_l`` as it stands, and
at free states ``a_l`` is backpropagation's own adjoint.

Legend: L blocks; states ``z_0 … z_L`` and adjoints ``a_1 … a_L`` are (B, T, C); N = B * T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder, check_decoder
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.stages import stage

#: Makes the arithmetic of one forward: autocast for amp, nothing otherwise.
Arithmetic = Callable[[], AbstractContextManager[object]]


def arithmetic(precision: str, device: torch.device) -> Arithmetic:
    """The context in which block, embedding and readout forwards run.

    ``amp`` is bf16 autocast with its weight cache off: a cached cast made by a forward without gradient
    would silently cut the parameters out of a later graph. States stay in the parameters' dtype.
    """
    if precision == "amp":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)
    return nullcontext


#: Cost of logits (B, T, V) against targets, summed over the N tokens: a scalar.
Cost = Callable[[Tensor, Tensor], Tensor]


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed; logits (B, T, V), targets (B, T) int64."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


@dataclass(frozen=True)
class Problem:
    """What is differentiated: a decoder, one batch, the cost, and the arithmetic of the forwards.

    Over several ranks, ``tokens`` and ``targets`` are the texts of this one, and N counts those of all.
    """

    model: Decoder
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, or whatever the cost takes
    cost: Cost
    cast: Arithmetic
    count: int  # N, the number of predicted tokens
    ranks: Ranks | None = None

    def mean(self, cost: Tensor) -> float:
        """Nats per token, from the cost summed over the texts that are here; waits for the device."""
        return (cost if self.ranks is None else self.ranks.sum(cost.double())).item() / self.count


def problem_of(
    model: Decoder, tokens: Tensor, targets: Tensor, precision: str, cost: Cost, ranks: Ranks | None = None
) -> Problem:
    """The problem of one batch, ``tokens`` and ``targets`` (B, T) int64; each of ``ranks`` takes its texts.

    Raises:
        ConfigError: see :func:`check_request`; or there are more ranks than texts.
    """
    check_request(model, tokens, targets, precision)
    count = tokens.numel()
    if ranks is not None:
        rows = ranks.rows(len(tokens))
        tokens, targets = tokens[rows], targets[rows]
    return Problem(model, tokens, targets, cost, arithmetic(precision, tokens.device), count, ranks)


def check_request(model: Decoder, tokens: Tensor, targets: Tensor, precision: str) -> None:
    """Raise ConfigError unless an estimator can work on this decoder, batch and precision."""
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


@dataclass(frozen=True)
class Local:
    """One block's own graph, from a leaf to where its output stood; no graph ever spans two blocks.

    The output's value is not held, so it lives no longer than somebody needs it.
    """

    input: Tensor  # (B, T, C), a leaf
    output: GradientEdge  # of the block's output (B, T, C)


@dataclass(frozen=True)
class Free:
    """The free phase: ``states[l] = o_l`` for l = 0 … L, and the graph each was made by.

    A graph that is None is made again from its block's input when its turn comes.
    """

    embedded: Tensor  # z_0 with its graph to the embedding's parameters
    states: list[Tensor]
    locals: list[Local | None]  # of blocks 1 … L


@dataclass(frozen=True)
class Top:
    """What the readout says about ``z_L``: summed cost, adjoint, and gradients of the outer parameters."""

    cost: Tensor  # summed over N tokens
    adjoint: Tensor  # d(mean cost) / d z_L, (B, T, C)
    grads: Sequence[Tensor | None]


def run_block(problem: Problem, index: int, z: Tensor) -> Tensor:
    """The output (B, T, C) of block ``index`` (from 0) at ``z`` (B, T, C), without a graph."""
    with torch.no_grad(), problem.cast():
        return problem.model.blocks[index](z).to(z.dtype)


def trace_block(problem: Problem, index: int, z: Tensor, *, weights: bool) -> tuple[Tensor, Local]:
    """As :func:`run_block`, with the block's graph: to its input, with ``weights`` to its parameters too.

    A graph that serves forces alone needs no parameter in it. It then keeps fewer activations, and a compiled
    block computes no parameter's gradient only to drop it.
    """
    block = problem.model.blocks[index]
    leaf = z.detach().requires_grad_()
    with torch.enable_grad(), problem.cast():
        if weights:
            output = block(leaf)
        else:
            frozen = {name: parameter.detach() for name, parameter in block.named_parameters()}
            output = functional_call(block, frozen, (leaf,), tie_weights=False)
        output = output.to(leaf.dtype)
    return output.detach(), Local(leaf, get_gradient_edge(output))


def free_phase(problem: Problem, *, recompute: bool = False, weights: bool = False) -> Free:
    """Forward pass block by block: ``z_l = o_l = f_l(z_{l-1})``.

    Graphs reach the parameters of block 1, whose free pass the read uses, and with ``weights`` of all blocks.
    With ``recompute`` only block L keeps its graph, which is the first to be used.
    """
    with stage("embedding"), torch.enable_grad(), problem.cast():
        embedded = problem.model.embed(problem.tokens)
    states = [embedded.detach().to(state_dtype(problem.model))]
    chain: list[Local | None] = []
    last = len(problem.model.blocks) - 1
    with stage("free"):
        for index in range(last + 1):
            if recompute and index < last:
                output, local = run_block(problem, index, states[-1]), None
            else:
                output, local = trace_block(problem, index, states[-1], weights=weights or index == 0)
            states.append(output)
            chain.append(local)
    return Free(embedded, states, chain)


def top(problem: Problem, z: Tensor, parameters: Sequence[Tensor] = ()) -> Top:
    """Cost of the readout at ``z`` = z_L, its adjoint, and the gradients of ``parameters`` (mean cost)."""
    leaf = z.detach().requires_grad_()
    with stage("readout"):
        with torch.enable_grad():
            with problem.cast():
                logits = problem.model.readout(leaf)
            cost = problem.cost(logits.to(z.dtype), problem.targets)
        per_token = cost.new_tensor(1.0 / problem.count)
        adjoint, *grads = torch.autograd.grad(cost, [leaf, *parameters], per_token, allow_unused=True)
    return Top(cost.detach(), adjoint, grads)


def force_sweep(
    problem: Problem,
    states: Sequence[Tensor],
    chain: list[Local | None],
    top_adjoint: Tensor,
    *,
    keep: bool = False,
) -> list[Tensor]:
    """Adjoints ``a_1 … a_L`` from the top down, ``a_{l-1} = J_lᵀ a_l``, one VJP per block L … 2.

    Graphs that ``chain`` lacks are made again at ``states`` (z_0 … z_L). Unless ``keep``, those of blocks
    L … 2 are taken out of ``chain``, each dropped as soon as its VJP is taken. Block 1's stays in any case:
    its input is clamped, so its VJP belongs to the read, where the embedding asks for it.
    """
    adjoints = [top_adjoint]
    with stage("forces"):
        for index in reversed(range(1, len(chain))):
            local = chain[index] if keep else chain.pop()
            if local is None:
                _, local = trace_block(problem, index, states[index], weights=False)
            adjoints.extend(torch.autograd.grad([local.output], local.input, adjoints[-1], retain_graph=keep))
    adjoints.reverse()
    return adjoints


#: For a block's index (from 0), moves ``o_l`` by ``factor * a_l``, both (B, T, C).
Displace = Callable[[int, Tensor, Tensor, float], Tensor]


def displaced(index: int, output: Tensor, adjoint: Tensor, factor: float) -> Tensor:
    """``o_l + factor * a_l``, rounded to the states' dtype: the step in which absorption happens."""
    return torch.add(output, adjoint, alpha=factor)


@dataclass(frozen=True)
class Rebuilt:
    """One block of a round: its adjoint, its output, the state that was made of them, and its graph."""

    index: int  # of the block, from 0
    adjoint: Tensor  # a_l
    output: Tensor  # o_l = f_l(z_{l-1})
    state: Tensor  # z_l
    local: Local | None


def rebuild(
    problem: Problem,
    states: list[Tensor],
    first: tuple[Tensor, Local | None],
    factors: Sequence[float],
    adjoints: list[Tensor],
    damping: float,
    displace: Displace = displaced,
    *,
    traced: Sequence[bool],
    weights: bool,
) -> Iterator[Rebuilt]:
    """One round, bottom up, block by block: ``z_l <- (1 - eta) z_l + eta (f_l(z_{l-1}) + g_l d_l)``.

    ``factors[l-1] = -g_l beta N`` turns ``a_l`` into ``g_l d_l``. Block 1 is not run again: its input is
    clamped, so ``first`` holds ``f_1(z_0)`` and perhaps its graph. ``displace`` can be replaced by one with a
    known defect, to see whether an instrument finds it. ``traced`` says which blocks get a graph, and
    ``weights`` whether it reaches their parameters.

    ``states`` (z_0 … z_L) and ``adjoints`` (a_1 … a_L) are emptied on the way: none outlives its use.
    """
    below = states.pop(0)
    for index, (factor, trace) in enumerate(zip(factors, traced, strict=True)):
        adjoint, old = adjoints.pop(0), states.pop(0)
        with stage("rebuild"):
            if index == 0:
                output, local = first
            elif trace:
                output, local = trace_block(problem, index, below, weights=weights)
            else:
                output, local = run_block(problem, index, below), None
            target = displace(index, output, adjoint, factor)
            below = target if damping == 1 else torch.lerp(old, target, damping)
        yield Rebuilt(index, adjoint, output, below, local)


def read_block(
    local: Local, cotangent: Tensor, parameters: Sequence[Tensor], *, through: bool, keep: bool = False
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradients of one block's parameters against ``cotangent``, and its input's VJP where ``through``.

    With ``cotangent = a_l`` this is ``-(1 / (N beta)) (df_l / dtheta)ᵀ d_l``, the linear read; ``through``
    makes it the fused read, whose VJP is ``a_{l-1}``. ``keep`` leaves the graph for another read.
    """
    inputs = [local.input, *parameters] if through else list(parameters)
    if not inputs:
        return None, []
    with stage("read"):
        found = torch.autograd.grad([local.output], inputs, cotangent, retain_graph=keep, allow_unused=True)
    return (found[0], list(found[1:])) if through else (None, list(found))


def state_dtype(model: Decoder) -> torch.dtype:
    """The dtype in which states are stored: that of the parameters."""
    return next(p.dtype for _, p in model.named_parameters() if p.is_floating_point())
