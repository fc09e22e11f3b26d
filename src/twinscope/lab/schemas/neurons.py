"""The record of the verb ``neurons``: losses in nats per token, correlations uncentred, memory in MiB.

A neuron is named by the site of its layer and its number, ``layers.3.mlp.17``. In a direction
``"layers.3.mlp.17 <- layers.11.mlp.4"`` the neuron on the left is replaced by the one on the right times a
scale, both on what enters the left one's layer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinscope.lab.evidence import Level, Weights
from twinscope.lab.schemas.parts import Measured, Strict, Text
from twinscope.lab.schemas.scan import ScanMemory, ScanParity

#: What stands in a neuron's place: its match, a neuron drawn at random with a scale of its own, or nothing.
Stand = Literal["best", "random", "zeroed"]
#: ``forward`` replaces the neuron for which the search found the other one, ``backward`` the other one.
Way = Literal["forward", "backward"]
#: As ``lab/statistics.py`` gives them; named here because a record is read without its libraries.
Verdict = Literal["different", "underpowered", "equivalent", "inconclusive"]


class NeuronDirection(Strict):
    """One neuron as ``scale`` times another; scale and ``correlation`` (signed) are those of calibration.

    R² is uncentred, 1 − Σ(a − scale·b)²/Σa². ``branch_error`` is what replacing this one neuron changes of
    its MLP's output on held-out text, relative to that output.
    """

    direction: Text
    correlation: float
    scale: float
    r2_calibration: float
    r2_heldout: Measured
    branch_error: Measured


class NeuronMatch(Strict):
    """Two neurons and both directions, the one that the search found first.

    ``beyond_null``: on calibration both correlations exceed the null's threshold and both R² the floor.
    ``confirmed``: both R² exceed it on held-out text as well. ``rank`` is the place among the best pairs,
    from 1, of which no two share a neuron; null for a match that shares one with a better pair.
    ``identical_weights``: gate and up rows of the two are equal up to a scale, though their layers differ.
    """

    id: Text
    left: Text
    right: Text
    rank: int | None
    beyond_null: bool
    confirmed: bool
    identical_weights: bool
    level: Level
    reason: Text
    directions: list[NeuronDirection]


class NeuronMatchRow(NeuronMatch):
    """One match, as the summary has the duplicates."""

    kind: Literal["match"]
    key: Text


class NeuronSearchRow(Strict):
    """The best match of every neuron of one layer, in order: lists over its neurons.

    ``best_layer`` and ``best_neuron`` are −1, ``correlation`` and ``scale`` 0, where a neuron has none (it is
    zero on all calibration tokens). ``correlation`` is signed. ``silent`` are the neurons that add next to
    nothing on calibration text, or dead by their weights: their matches do not count.
    """

    kind: Literal["search"]
    key: Text
    layer: int
    tokens: int
    best_layer: list[int]
    best_neuron: list[int]
    correlation: list[float]
    scale: list[float]
    silent: list[int]
    timing: dict[str, Measured] = Field(default_factory=dict)


class NeuronNullRow(Strict):
    """The same search with redrawn donors: the largest absolute correlation in each layer, and over them."""

    kind: Literal["null"]
    key: Text
    draw: int
    layers: list[int]
    maxima: list[float]
    maximum: float


class NeuronReplacementRow(Strict):
    """The loss with ``pairs`` neurons replaced, text by text, and how it differs from the model's own.

    ``branch_error`` is pooled over the MLPs in which something is replaced, on the running residual.
    """

    kind: Literal["replacement"]
    key: Text
    split: Literal["calibration", "heldout"]
    way: Way
    stand: Stand
    pairs: int
    texts: list[Text]
    nll: list[float]
    delta_nll: list[float]
    branch_error: list[float]
    timing: dict[str, Measured] = Field(default_factory=dict)


#: One row of a ``neurons`` record.
NeuronRow = Annotated[
    NeuronMatchRow | NeuronSearchRow | NeuronNullRow | NeuronReplacementRow, Field(discriminator="kind")
]


class NeuronAnalytic(Strict):
    """Neurons that are related by their weights alone, whatever the text: no learned duplication.

    ``neurons`` counts them, ``examples`` names some.
    """

    kind: Text
    layers: list[int]
    neurons: int
    examples: list[Text]
    detail: Text


class NeuronLayer(Strict):
    """One layer in the search: its neurons, and how many found a match beyond the null, and confirmed."""

    layer: int
    neurons: int
    dead: int
    beyond_null: int
    confirmed: int
    largest_correlation: float
    median_correlation: float


class NeuronNull(Strict):
    """How the null was drawn. A match must exceed ``threshold``, family-wise over every layer and donor."""

    method: Text
    draws: int
    family_wise: float
    threshold: float
    r2_floor: float


class NeuronReplaced(Strict):
    """The change of held-out loss with ``pairs`` neurons replaced at once, over texts.

    ``low`` and ``high`` bound 95 %, ``low_90`` and ``high_90`` 90 %. ``needed`` texts would have a power of
    0.8 by the calibration spread. Verdicts of controls (``random``, ``zeroed``) are given as those of pairs.
    """

    pairs: int
    way: Way
    stand: Stand
    texts: int
    delta_nll: float
    low: Measured
    high: Measured
    low_90: Measured
    high_90: Measured
    delta_nll_calibration: Measured
    needed: int | None
    verdict: Verdict
    branch_error: float


class NeuronSet(Strict):
    """The ``pairs`` best pairs together: how many are confirmed, the level they reach, what they would save.

    ``zeroed_alike``: setting the same neurons to zero keeps the loss as well, so keeping it says little.
    ``parameters`` and ``bytes`` are stated, never a condition.
    """

    pairs: int
    confirmed: int
    zeroed_alike: bool
    level: Level
    reason: Text
    parameters: int
    bytes: int


class NeuronInstrument(Strict):
    """The neurons replaced by themselves, which must change nothing: the largest change of a text's loss."""

    passed: bool
    largest_change: float


class NeuronsSummary(Strict):
    """Summary of the verb ``neurons``; ``sealed`` is the hash of the plan, ``heldout_opened_at`` UTC.

    ``null_max_correlation`` is the largest correlation of all null draws. ``tokens`` are compared, without
    the ``skipped`` first of each text; ``nll`` and ``perplexity`` are the model's own on held-out text, all
    of it. ``level`` is the highest of any duplicate. ``warnings`` say what weakens the result, for example
    too few tokens.
    """

    sealed: Text
    heldout_opened_at: Text
    model: Text
    weights: Weights
    planted: bool
    parity: ScanParity
    instrument: NeuronInstrument
    notes: list[Text]
    warnings: list[Text]
    texts: dict[Literal["calibration", "heldout"], int]
    tokens: dict[Literal["calibration", "heldout"], int]
    skipped: int = 0
    layers: list[NeuronLayer]
    null: NeuronNull
    null_max_correlation: float
    duplicates: list[NeuronMatch]
    analytic: list[NeuronAnalytic]
    margin: float
    nll: float
    perplexity: Measured
    replaced: list[NeuronReplaced]
    sets: list[NeuronSet]
    level: Level
    peak_rss_mib: float
    planned_peak_mib: float
    memory: ScanMemory
