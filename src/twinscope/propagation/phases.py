"""The phases of equilibrium propagation as pure functions on a Decoder (METHOD 1.1).

Covers the free phase, forces, rebuild and read. No module is mutated, no hook is left, nothing global is
set. What to run in which order, and the choice of the nudge, is in estimators.py.

Forces are kept as *adjoints* ``a_l``, the force in units of the mean loss: ``d_l = -beta * N * a_l``. The
force sweep is linear, so this is the same algorithm; the linear read then takes ``a_l`` as it stands, and
at free states ``a_l`` is backpropagation's own adjoint.

Legend: L blocks; states ``z_0 … z_L`` and adjoints ``a_1 … a_L`` are (B, T, C); N = B * T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinscope.models.decoder import Decoder
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
    """What is differentiated: a decoder, one batch, the cost, and the arithmetic of the forwards."""

    model: Decoder
    tokens: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, or whatever the cost takes
    cost: Cost
    cast: Arithmetic

    @property
    def count(self) -> int:
        """N, the number of predicted tokens."""
        return self.tokens.numel()


@dataclass(frozen=True)
class Local:
    """One block's own graph, ``output = block(input)``; no graph ever spans two blocks."""

    input: Tensor  # (B, T, C), a leaf
    output: Tensor  # (B, T, C), a function of the leaf and of the block's parameters


@dataclass(frozen=True)
class Free:
    """The free phase: ``states[l] = o_l`` for l = 0 … L, and the graph each was made by."""

    embedded: Tensor  # z_0 with its graph to the embedding's parameters
    states: list[Tensor]
    locals: list[Local]  # of blocks 1 … L


@dataclass(frozen=True)
class Top:
    """What the readout says about ``z_L``: summed cost, adjoint, and gradients of the outer parameters."""

    cost: Tensor  # summed over N tokens
    adjoint: Tensor  # d(mean cost) / d z_L, (B, T, C)
    grads: Sequence[Tensor | None]


def run_block(problem: Problem, index: int, z: Tensor) -> Local:
    """Run block ``index`` (from 0) on a detached ``z`` (B, T, C), keeping its graph."""
    leaf = z.detach().requires_grad_()
    with torch.enable_grad(), problem.cast():
        output = problem.model.blocks[index](leaf)
    return Local(leaf, output.to(leaf.dtype))


def free_phase(problem: Problem) -> Free:
    """Forward pass block by block: ``z_l = o_l = f_l(z_{l-1})``."""
    with stage("embedding"), torch.enable_grad(), problem.cast():
        embedded = problem.model.embed(problem.tokens)
    states = [embedded.detach().to(state_dtype(problem.model))]
    chain: list[Local] = []
    with stage("free"):
        for index in range(len(problem.model.blocks)):
            chain.append(run_block(problem, index, states[-1]))
            states.append(chain[-1].output.detach())
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


def force_sweep(chain: Sequence[Local], top_adjoint: Tensor, *, keep: bool = False) -> list[Tensor]:
    """Adjoints ``a_1 … a_L`` from the top down, ``a_{l-1} = J_lᵀ a_l``, one VJP per block L … 2.

    Uses up the graphs of blocks 2 … L unless ``keep``. Block 1's stays in any case: its input is clamped,
    so its VJP belongs to the read, where the embedding asks for it.
    """
    adjoints = [top_adjoint]
    with stage("forces"):
        for local in reversed(chain[1:]):
            found = torch.autograd.grad(local.output, local.input, adjoints[-1], retain_graph=keep)
            adjoints.append(found[0])
    adjoints.reverse()
    return adjoints


#: For a block's index (from 0), moves ``o_l`` by ``factor * a_l``, both (B, T, C).
Displace = Callable[[int, Tensor, Tensor, float], Tensor]


def displaced(index: int, output: Tensor, adjoint: Tensor, factor: float) -> Tensor:
    """``o_l + factor * a_l``, rounded to the states' dtype: the step in which absorption happens."""
    return torch.add(output, adjoint, alpha=factor)


def rebuild(
    problem: Problem,
    states: Sequence[Tensor],
    first: Local,
    factors: Sequence[float],
    adjoints: Sequence[Tensor],
    damping: float,
    displace: Displace = displaced,
) -> tuple[list[Tensor], list[Local]]:
    """One round, bottom up: ``z_l <- (1 - eta) z_l + eta (f_l(z_{l-1}) + g_l d_l)``.

    ``factors[l-1] = -g_l beta N`` turns ``a_l`` into ``g_l d_l``. Block 1 is not run again: its input is
    clamped, so ``first`` already holds ``f_1(z_0)``. ``displace`` can be replaced by one with a known
    defect, to see whether an instrument finds it. Returns the states z_0 … z_L and the graphs of
    blocks 1 … L at them.
    """
    fresh = [states[0]]
    chain: list[Local] = []
    with stage("rebuild"):
        for index, (factor, adjoint) in enumerate(zip(factors, adjoints, strict=True)):
            local = first if index == 0 else run_block(problem, index, fresh[-1])
            target = displace(index, local.output.detach(), adjoint, factor)
            fresh.append(target if damping == 1 else torch.lerp(states[index + 1], target, damping))
            chain.append(local)
    return fresh, chain


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
        found = torch.autograd.grad(local.output, inputs, cotangent, retain_graph=keep, allow_unused=True)
    return (found[0], list(found[1:])) if through else (None, list(found))


def state_dtype(model: Decoder) -> torch.dtype:
    """The dtype in which states are stored: that of the parameters."""
    return next(p.dtype for _, p in model.named_parameters() if p.is_floating_point())
