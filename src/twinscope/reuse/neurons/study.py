"""One comparison of neurons under way: its model, plan and journal, and what of each text is kept.

Covers the journal's rows by key, the residual that enters each MLP, and the inputs that neurons are compared
on. In which order things are done is in stages.py.

Shapes: B texts, T positions, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinscope.lab.errors import DataError
from twinscope.models.weights import load_tensors, save_tensors
from twinscope.reuse.neurons.activations import GatedLayer
from twinscope.reuse.neurons.analytic import identities
from twinscope.reuse.neurons.filed import described
from twinscope.reuse.neurons.replaced import Inputs, losses
from twinscope.reuse.neurons.search import Groups
from twinscope.reuse.neurons.settings import NeuronSettings
from twinscope.reuse.neurons.sizes import texts_together

if TYPE_CHECKING:
    from twinscope.lab.run import Run
    from twinscope.models.streamed.model import StreamedLM
    from twinscope.reuse.plan import Plan
    from twinscope.reuse.scan import Before
    from twinscope.reuse.texts import Passage, Split


@dataclass(frozen=True)
class Study:
    """One comparison: the model, its plan, the layers in order, and where its rows are kept."""

    lm: StreamedLM
    plan: Plan
    settings: NeuronSettings
    layers: Mapping[int, GatedLayer]
    run: Run
    timing: Callable[[], dict[str, float]]

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return torch.device(self.plan.content["compute"]["device"])

    def find(self, key: str) -> dict[str, Any] | None:
        """The journal's row of that key."""
        return next((row for row in self.run.rows if row["key"] == key), None)

    def row(self, key: str) -> dict[str, Any]:
        """The journal's row of that key, which has to be there."""
        found = self.find(key)
        if found is None:
            raise ValueError(f"the part '{key}' comes before this one")
        return found

    def keep(self, row: dict[str, Any]) -> None:
        """Append a row with what it took."""
        self.run.append({**row, "timing": self.timing()})

    @cached_property
    def groups(self) -> Groups:
        """What weights alone explain, so that the search leaves it out; its summary becomes a row."""
        found = identities(list(self.layers.values()))
        self.keep({"key": "analytic", "entries": described(found)})
        return found.groups


@dataclass(frozen=True)
class Residuals:
    """Texts of one split: ids ``(B, T)``, the residual ``(B, T, C)`` that enters each MLP, the model's loss.

    ``z`` is on the CPU; ``nll`` holds nats per predicted token, text by text.
    """

    passages: tuple[Passage, ...]
    ids: Tensor
    z: dict[str, Tensor]
    nll: list[float]


def residuals(study: Study, split: Split, before: Before) -> Residuals:
    """One streamed pass over the texts of a split, kept in the run's checkpoints under its hash."""
    passages = tuple(passage for passage in study.plan.texts if passage.split == split)
    ids = study.plan.ids(split)
    path = study.run.checkpoints / f"residuals-{split}.safetensors"
    key = f"residuals/{split}"
    known = study.find(key)
    if known is not None:
        try:
            return Residuals(passages, ids, load_tensors(path, known["sha256"]), known["nll"])
        except DataError:
            path.unlink(missing_ok=True)  # damaged or gone: the pass gives the same again
    sites = [layer.site for layer in study.layers.values()]
    shape = (*ids.shape, study.lm.width)
    z = {site: torch.empty(shape) for site in sites}
    nll: list[float] = []
    groups = list(text_groups(study, len(ids)))
    for done, part in enumerate(groups):
        for point in study.lm.walk(ids[part], [*sites, "head"]):
            before(split, done, len(groups))
            if point.site == "head":
                nll.extend(losses(study.lm, point.z, ids[part]).tolist())
            else:
                z[point.site][part] = point.z.cpu()
    sha256 = save_tensors(path, z)
    study.keep({"key": key, "sha256": sha256, "nll": nll})
    return Residuals(passages, ids, z, nll)


def inputs_of(study: Study, found: Residuals) -> Inputs:
    """The normalised input ``(N, C)`` of a layer's MLP at every token that is compared."""

    def of(number: int) -> Tensor:
        site = study.layers[number].site
        x = study.lm.module_input(site, found.z[site][:, study.settings.skip :].to(study.device))
        return x.reshape(-1, x.shape[-1])

    return of


def text_groups(study: Study, texts: int) -> Iterator[slice]:
    """The texts in the groups in which they always go through the model, as equal as can be."""
    widest = max(layer.neurons for layer in study.layers.values())
    most = texts_together(study.lm.width, widest, len(study.plan.texts[0].ids))
    start = 0
    for part in torch.arange(texts).tensor_split(-(-texts // most)):
        yield slice(start, start + len(part))
        start += len(part)
