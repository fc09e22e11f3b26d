"""Closed forms and independent solvers in float64 that the estimators are held against.

Nothing here calls the phases or the estimators: the equilibria are found by a linear solve or by Newton's
method on the whole energy at once, and gradients by autograd on that energy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class LinearDecoder(nn.Module):
    """``z_0`` looked up, ``f_l(z) = W_l z + b_l``, ``readout = H z`` of width ``out``."""

    def __init__(self, vocab: int, width: int, layers: int, out: int, seed: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.table = nn.Parameter(torch.from_numpy(rng.normal(size=(vocab, width))))
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.Linear(width, width, dtype=torch.float64)
            with torch.no_grad():
                block.weight.copy_(torch.from_numpy(np.eye(width) + 0.3 * rng.normal(size=(width, width))))
                block.bias.copy_(torch.from_numpy(0.1 * rng.normal(size=width)))
            self.blocks.append(block)
        self.head = nn.Linear(width, out, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(rng.normal(size=(out, width))))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def readout(self, z: Tensor) -> Tensor:
        return self.head(z)


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """``½ Σ (outputs - targets)²``, the cost that makes the linear stack's equilibrium a linear solve."""
    return 0.5 * (outputs - targets).square().sum()


@dataclass(frozen=True)
class LinearEquilibrium:
    states: np.ndarray  # (L + 1, N, C)
    grads: dict[str, np.ndarray]


def solve_linear(
    model: LinearDecoder, tokens: np.ndarray, targets: np.ndarray, beta: float, gain: list[float]
) -> LinearEquilibrium:
    """Stationary point of ``Σ |z_l - W_l z_{l-1} - b_l|² / (2 g_l) + β ½ |H z_L - y|²`` as one linear system.

    Unknowns z_1 … z_L, token by token with a shared matrix. tokens (N,), targets (N, out). Gradients are
    those of the mean cost by ``∂F/∂θ / (N β)`` at the equilibrium.
    """
    weights = [block.weight.detach().numpy() for block in model.blocks]
    biases = [block.bias.detach().numpy() for block in model.blocks]
    head = model.head.weight.detach().numpy()
    width, layers, count = head.shape[1], len(weights), len(tokens)
    z0 = model.table.detach().numpy()[tokens]
    matrix = np.zeros((layers * width, layers * width))
    right = np.zeros((layers * width, count))

    def rows(index: int) -> slice:
        return slice(index * width, (index + 1) * width)

    for layer in range(layers):  # ∂F/∂z_l = 0
        matrix[rows(layer), rows(layer)] += np.eye(width) / gain[layer]
        right[rows(layer)] += biases[layer][:, None] / gain[layer]
        if layer == 0:
            right[rows(0)] += weights[0] @ z0.T / gain[0]
        else:
            matrix[rows(layer), rows(layer - 1)] -= weights[layer] / gain[layer]
        if layer + 1 < layers:
            above = weights[layer + 1]
            matrix[rows(layer), rows(layer)] += above.T @ above / gain[layer + 1]
            matrix[rows(layer), rows(layer + 1)] -= above.T / gain[layer + 1]
            right[rows(layer)] -= (above.T @ biases[layer + 1])[:, None] / gain[layer + 1]
        else:
            matrix[rows(layer), rows(layer)] += beta * head.T @ head
            right[rows(layer)] += beta * head.T @ targets.T
    solved = np.linalg.solve(matrix, right)
    states = [z0] + [solved[rows(layer)].T for layer in range(layers)]
    grads: dict[str, np.ndarray] = {}
    for layer in range(layers):
        error = (states[layer + 1] - states[layer] @ weights[layer].T - biases[layer]) / gain[layer]
        grads[f"blocks.{layer}.weight"] = -error.T @ states[layer] / (count * beta)
        grads[f"blocks.{layer}.bias"] = -error.sum(0) / (count * beta)
        if layer == 0:
            table = np.zeros_like(model.table.detach().numpy())
            np.add.at(table, tokens, -error @ weights[0] / (count * beta))
            grads["table"] = table
    output_error = states[-1] @ head.T - targets
    grads["head.weight"] = output_error.T @ states[-1] / count
    return LinearEquilibrium(np.stack(states), grads)


def energy(model, states: list[Tensor], tokens: Tensor, gain: list[float]) -> Tensor:
    """``Σ_l |z_l - f_l(z_{l-1})|² / (2 g_l)`` with ``z_0 = embed(tokens)`` inside the graph."""
    below, total = model.embed(tokens), torch.zeros((), dtype=torch.float64)
    for block, z, g in zip(model.blocks, states, gain, strict=True):
        total = total + (z - block(below)).square().sum() / (2 * g)
        below = z
    return total


def newton_equilibrium(
    model, tokens: Tensor, targets: Tensor, beta: float, gain: list[float], iterations: int = 12
) -> list[Tensor]:
    """States z_1 … z_L where ``∂(E + β C)/∂z = 0``, by Newton's method on all of them at once (float64)."""
    with torch.no_grad():
        z = model.embed(tokens)
        shape, free = z.shape, []
        for block in model.blocks:
            z = block(z)
            free.append(z)
    layers = len(free)

    def total(flat: Tensor) -> Tensor:
        states = list(flat.view(layers, *shape))
        cost = torch.nn.functional.cross_entropy(
            model.readout(states[-1]).flatten(0, -2), targets.flatten(), reduction="sum"
        )
        return energy(model, states, tokens, gain) + beta * cost

    flat = torch.stack(free).flatten()
    # Flash attention has no second derivative; the plain formula does.
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(iterations):
            slope = torch.func.grad(total)(flat)
            flat = flat - torch.linalg.solve(torch.func.hessian(total)(flat), slope)
            if slope.abs().max() < 1e-15:
                break
    return list(flat.view(layers, *shape))


def energy_gradient(
    model, states: list[Tensor], tokens: Tensor, targets: Tensor, beta: float, gain: list[float]
) -> dict[str, Tensor]:
    """``(1 / N) (1/β ∂E/∂θ + ∂C/∂θ)`` at the given states, by autograd on the whole energy."""
    named = dict(model.named_parameters())
    cost = torch.nn.functional.cross_entropy(
        model.readout(states[-1].detach()).flatten(0, -2), targets.flatten(), reduction="sum"
    )
    total = energy(model, [z.detach() for z in states], tokens, gain) / beta + cost
    found = torch.autograd.grad(total / tokens.numel(), list(named.values()))
    return dict(zip(named, found, strict=True))
