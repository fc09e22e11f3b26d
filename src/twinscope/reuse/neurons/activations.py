"""The neurons of a gated MLP as functions of what enters it, and their matrices read a few rows at a time.

A neuron is ``a_n(x) = act(gate_n · x) · (up_n · x)`` with the output vector ``down[:, n]``; ``x`` is the
residual stream after the layer's pre-norm. Covers families whose MLP has ``gate_proj``, ``up_proj`` and
``down_proj`` (Llama, Mistral, Qwen, Gemma), or gate and up in one matrix (Phi-3); any other is refused. Not
covered: what is made of activations (search.py, confirm.py, null.py) and of weights (analytic.py).

Shapes: N tokens, C channels, n neurons of a layer, b neurons of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM
    from twinscope.models.tensor_files import TensorFiles

#: Neurons that are evaluated at a time.
BLOCK = 256
#: By how much a row may differ from another, relative to its norm, and still be the same one rounded twice in
#: the type of the files; float32 with room for the arithmetic between.
ROUNDING = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-20, "F64": 2.0**-20}

#: An activation function of ``torch``, element by element.
Act = Callable[[Tensor], Tensor]
#: Rows ``start … stop − 1`` of a matrix, ``(stop − start, …)`` float32 on the CPU, in memory of their own.
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class GatedLayer:
    """The neurons of one MLP, their matrices read when asked for.

    ``gate(start, stop)`` and ``up(start, stop)`` give those rows of ``(n, C)``, one a neuron;
    ``down(start, stop)`` rows of ``(C, n)``, one an output channel. ``gain (C,)`` is that of the pre-norm (a
    unit offset included), ``rounding`` the entry of :data:`ROUNDING` for the type that the files have.
    """

    layer: int
    neurons: int
    width: int
    act: Act
    gate: Rows
    up: Rows
    down: Rows
    gain: Tensor
    rounding: float = ROUNDING["F32"]

    @property
    def site(self) -> str:
        """The name of its MLP, as ``lm.sites("mlp")`` has it."""
        return f"layers.{self.layer}.mlp"

    def blocks(self, block: int = BLOCK) -> Iterator[tuple[int, Tensor, Tensor]]:
        """``(start, gate (b, C), up (b, C))`` for all neurons, ``block`` of them at a time.

        Raises:
            DataError: the files changed, or hold NaN or infinite values.
        """
        for start in range(0, self.neurons, block):
            stop = min(start + block, self.neurons)
            yield start, self.gate(start, stop), self.up(start, stop)


def gated_layer(lm: StreamedLM, layer: int) -> GatedLayer:
    """The neurons of ``layers.<layer>.mlp`` of a streamed model; nothing is read but the gain.

    The matrices are the model's own, whatever is remapped at the time of the call.

    Raises:
        ConfigError: no such layer, or an MLP without a gate, with biases, or made of experts.
        DataError: the weights are not readable as floating-point numbers.
    """
    site = f"layers.{layer}.mlp"
    module, tensors = lm.module(site)
    act = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    names = {part.removesuffix(".weight"): found for part, found in tensors.items()}
    separate, fused = {"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"}
    if act is None or set(names) not in (separate, fused) or any(len(found) != 1 for found in names.values()):
        raise ConfigError(
            f"{site} of this '{lm.family}' model has no neurons of the form act(gate · x) · (up · x) "
            f"(its parameters are {', '.join(sorted(tensors)) or 'not its own'}): "
            "neurons are compared in MLPs with a gate and an up matrix, without biases and experts"
        )
    files = lm.files
    down = names["down_proj"][0]
    width, neurons = files.entry(down).shape
    if set(names) == separate:
        gate_rows, up_rows = _rows(files, names["gate_proj"][0]), _rows(files, names["up_proj"][0])
    else:
        both = names["gate_up_proj"][0]
        gate_rows, up_rows = _rows(files, both), _rows(files, both, neurons)
    return GatedLayer(
        layer=layer,
        neurons=neurons,
        width=width,
        act=act,
        gate=gate_rows,
        up=up_rows,
        down=_rows(files, down),
        gain=gain_of(lm, site),
        rounding=ROUNDING.get(files.entry(down).dtype, ROUNDING["F32"]),
    )


def layer_of_matrices(
    layer: int,
    gate: Tensor,
    up: Tensor,
    down: Tensor | None = None,
    act: Act = torch.nn.functional.silu,
    gain: Tensor | None = None,
    rounding: float = ROUNDING["F32"],
) -> GatedLayer:
    """The same over matrices in memory: gate and up ``(n, C)``, down ``(C, n)`` (zeros if left out).

    Raises:
        ValueError: shapes do not fit.
    """
    neurons, width = gate.shape
    down = torch.zeros(width, neurons) if down is None else down
    gain = torch.ones(width) if gain is None else gain
    if up.shape != gate.shape or down.shape != (width, neurons) or gain.shape != (width,):
        raise ValueError(
            f"gate {tuple(gate.shape)}, up {tuple(up.shape)}, down {tuple(down.shape)} and gain "
            f"{tuple(gain.shape)} are not those of one MLP"
        )

    def rows(matrix: Tensor) -> Rows:
        return lambda start, stop: matrix[start:stop].float().clone()

    return GatedLayer(layer, neurons, width, act, rows(gate), rows(up), rows(down), gain.float(), rounding)


def activations(x: Tensor, gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """``act(x gateᵀ) ⊙ (x upᵀ)``: x ``(N, C)``, gate and up ``(b, C)`` to ``(N, b)`` float32.

    Everything on the device of ``x``.
    """
    x = x.float()
    found = act(x @ gate.to(x).t())
    found *= x @ up.to(x).t()
    return found


def energies(values: Tensor) -> Tensor:
    """Σ over tokens of squares, ``(N, b)`` to ``(b,)`` float64 on the CPU."""
    return torch.stack([part.double().square().sum(dim=0) for part in values.split(4096)]).sum(dim=0).cpu()


def evaluate(x: Tensor, layer: GatedLayer, neurons: Sequence[int] | Tensor) -> Tensor:
    """The activations of k neurons of a layer: x ``(N, C)`` to ``(N, k)`` float32, in their order.

    Raises:
        ValueError: a neuron that the layer does not have.
    """
    gate, up = rows_of(layer, neurons)
    return activations(x, gate, up, layer.act)


def rows_of(layer: GatedLayer, neurons: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up rows ``(k, C)`` of ``k`` neurons by number, in their order; each block is read once.

    Raises:
        ValueError: a neuron that the layer does not have.
    """
    wanted = _numbers(layer, neurons)
    gate, up = (torch.empty(len(wanted), layer.width) for _ in range(2))
    for start in (wanted // BLOCK).unique().tolist():
        first, stop = start * BLOCK, min((start + 1) * BLOCK, layer.neurons)
        here = ((wanted >= first) & (wanted < stop)).nonzero().flatten()
        places = wanted[here] - first
        gate[here] = layer.gate(first, stop)[places]
        up[here] = layer.up(first, stop)[places]
    return gate, up


def columns_of(layer: GatedLayer, neurons: Sequence[int] | Tensor) -> Tensor:
    """The output vectors of ``k`` neurons by number, ``(C, k)`` float32 in their order.

    Raises:
        ValueError: a neuron that the layer does not have.
    """
    wanted = _numbers(layer, neurons)
    parts = [layer.down(start, stop)[:, wanted] for start, stop in _spans(layer.width)]
    return torch.cat(parts)


def column_norms(layer: GatedLayer) -> Tensor:
    """‖down[:, n]‖ of every neuron, ``(n,)`` float64."""
    total = torch.zeros(layer.neurons, dtype=torch.float64)
    for start, stop in _spans(layer.width):
        total += layer.down(start, stop).double().square().sum(dim=0)
    return total.sqrt()


def gain_of(lm: StreamedLM, site: str) -> Tensor:
    """The gain ``(C,)`` float32 of a branch's pre-norm, with the unit offset of families that have one.

    Taken from what the norm makes of a constant residual, so that no family's spelling is needed; the
    constant is so large that the norm's ε vanishes beside it.
    """
    return lm.module_input(site, torch.full((1, 1, lm.width), 2.0**20)).flatten().float().cpu()


def _rows(files: TensorFiles, name: str, offset: int = 0) -> Rows:
    return lambda start, stop: files.read(name, rows=(offset + start, offset + stop))


def _spans(rows: int, step: int = 64) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _numbers(layer: GatedLayer, neurons: Sequence[int] | Tensor) -> Tensor:
    found: Any = torch.as_tensor(neurons, dtype=torch.int64).flatten().cpu()
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= layer.neurons):
        raise ValueError(f"layer {layer.layer} has the neurons 0 … {layer.neurons - 1}")
    return found
