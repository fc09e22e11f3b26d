"""Copies of a model folder with neurons planted in it on purpose, to see what a search finds and files apart.

Covers gated MLPs with separate gate, up and down matrices (the families of planted.py, and Gemma 2 and 3):
rows of one layer's gate and up written over rows of the same or another layer, scaled, with noise, with or
without the output vectors; parts set to zero. Whole modules with their norms, permuted or folded, are planted
by planted.py. The source folder is only read; of the copy, one matrix is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from twinscope.lab.draws import generator
from twinscope.lab.errors import ConfigError
from twinscope.models.tensor_files import TensorFiles
from twinscope.reuse.planted import prefix_of, write_planted

Part = Literal["gate", "up", "down"]
_PARTS: tuple[Part, ...] = ("gate", "up", "down")


@dataclass(frozen=True)
class NeuronPlanting:
    """Neurons of layer ``source`` written over neurons of layer ``target``: ``neurons`` are (from, to).

    Gate and up rows are copied times ``gate_scale`` and ``up_scale`` (the sign of ``up_scale`` is that of the
    new activation). ``down_scale`` copies the output vector times itself; None leaves the target's own, so
    that two neurons compute the same and write it to different places. ``noise`` adds normal noise of that
    share of each copied vector's RMS. ``zero`` sets that part of the targets to zero in the end, which makes
    them dead.
    """

    source: int
    target: int
    neurons: tuple[tuple[int, int], ...]
    gate_scale: float = 1.0
    up_scale: float = 1.0
    down_scale: float | None = None
    noise: float = 0.0
    zero: Part | None = None


def plant_neurons(source: Path, out: Path, plantings: Sequence[NeuronPlanting], seed: int = 0) -> Path:
    """Write a copy of the model folder ``source`` to ``out`` with ``plantings`` in it; returns ``out``.

    Every planting reads the source as it was; where targets coincide the later wins. Weights that are random
    stay ``random`` in ``twinscope.json``; any other become ``planted``.

    Raises:
        ConfigError: a layer or neuron that the model does not have, MLPs without these matrices, layers of
            different widths, or ``out`` cannot be written.
        DataError: the source is damaged.
        Stopped: no space is left.
    """
    if not plantings:
        raise ConfigError("no neuron is to be planted: give at least one planting")

    def changes(tensors: TensorFiles, _: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        for planting in plantings:
            _check(tensors, planting)
        targets = sorted({planting.target for planting in plantings})
        return (
            (_matrix(tensors, layer, part), _changed(tensors, plantings, layer, part, seed))
            for layer in targets
            for part in _PARTS
        )

    described = "; ".join(_described(planting) for planting in plantings)
    details = {"planted": [asdict(planting) for planting in plantings], "seed": seed}
    return write_planted(Path(source), Path(out), changes, described, details)


def _changed(
    tensors: TensorFiles, plantings: Sequence[NeuronPlanting], layer: int, part: Part, seed: int
) -> Tensor:
    """One matrix of a target layer with every planting of that layer in it, as the file has it."""
    value = tensors.read(_matrix(tensors, layer, part))
    # Neurons are rows of gate and up, columns of down.
    rows = value.t() if part == "down" else value
    for number, planting in enumerate(plantings):
        if planting.target != layer:
            continue
        scale = {"gate": planting.gate_scale, "up": planting.up_scale, "down": planting.down_scale}[part]
        target = torch.tensor([to for _, to in planting.neurons])
        if scale is not None:
            copied = scale * _vectors(tensors, planting, part)
            if planting.noise:
                draws = generator(seed, f"planted neurons {part}", number).standard_normal(copied.shape)
                rms = copied.double().square().mean(dim=1, keepdim=True).sqrt()
                copied = (copied.double() + planting.noise * rms * torch.from_numpy(draws)).float()
            rows[target] = copied
        if planting.zero == part:
            rows[target] = 0.0
    return value


def _vectors(tensors: TensorFiles, planting: NeuronPlanting, part: Part) -> Tensor:
    """That part of the source neurons, one row each, as the source folder has it."""
    numbers = [of for of, _ in planting.neurons]
    name = _matrix(tensors, planting.source, part)
    return tensors.read(name).t()[numbers] if part == "down" else tensors.gather(name, numbers)


def _check(tensors: TensorFiles, planting: NeuronPlanting) -> None:
    if not planting.neurons:
        raise ConfigError(f"layers.{planting.target}.mlp: no neuron is named to be planted")
    shapes = {
        layer: tensors.entry(_matrix(tensors, layer, "gate")).shape
        for layer in (planting.source, planting.target)
    }
    width, target_width = (shapes[layer][1] for layer in (planting.source, planting.target))
    if width != target_width:
        raise ConfigError(
            f"layers.{planting.source}.mlp reads {width} channels and layers.{planting.target}.mlp "
            f"{target_width}: plant between layers of one width"
        )
    for layer, numbers in zip(
        (planting.source, planting.target), zip(*planting.neurons, strict=True), strict=True
    ):
        count = shapes[layer][0]
        if not all(0 <= number < count for number in numbers):
            raise ConfigError(
                f"layers.{layer}.mlp has the neurons 0 … {count - 1}, not all of {list(numbers)}"
            )
    if len({to for _, to in planting.neurons}) < len(planting.neurons):
        raise ConfigError(f"layers.{planting.target}.mlp: a neuron is the target of two, name each once")


def _matrix(tensors: TensorFiles, layer: int, part: Part) -> str:
    """The full name of a matrix of a layer's MLP.

    Raises:
        ConfigError: the model has no such layer, or its MLP is none of a gate, an up and a down matrix.
    """
    prefix = prefix_of(tensors, f"layers.{layer}.mlp")
    names = {known: f"{prefix}.{known}_proj.weight" for known in _PARTS}
    if any(name not in tensors for name in names.values()):
        raise ConfigError(
            f"layers.{layer}.mlp has not the matrices gate_proj, up_proj and down_proj: "
            "plant neurons in a family that has"
        )
    return names[part]


def _described(planting: NeuronPlanting) -> str:
    count = len(planting.neurons)
    changes = [
        f"gate times {planting.gate_scale:g}" if planting.gate_scale != 1 else "",
        f"up times {planting.up_scale:g}" if planting.up_scale != 1 else "",
        f"down times {planting.down_scale:g}" if planting.down_scale is not None else "",
        f"noise of {planting.noise:g}" if planting.noise else "",
        f"{planting.zero} zeroed" if planting.zero is not None else "",
    ]
    what = f"{count} neuron{'s' if count > 1 else ''} of layers.{planting.target}.mlp"
    return ", ".join([f"{what} from layers.{planting.source}.mlp", *filter(None, changes)])
