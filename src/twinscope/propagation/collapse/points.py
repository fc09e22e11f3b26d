"""Points of the threshold law, read from records of ``leak``.

Covers the refusal of runs that measure different things, which runs are fitted and which are controls, and
which blocks belong to one model. The law itself is in collapse.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinscope.lab.errors import ConfigError
from twinscope.lab.record import Record

_ESTIMATOR = ("read", "rounds", "fused", "damping", "top_refresh")
_FORMAT = ("instrument", "study", "band", "unit_roundoff")


@dataclass(frozen=True)
class Source:
    """One leak run; ``label`` names its model, ``cluster`` is the same for every checkpoint of one model.

    ``conditions`` are what all runs of a collapse share.
    """

    run: str
    label: str
    cluster: str
    width: int | None
    beta: float
    conditions: dict[str, Any]
    summary: dict[str, Any]


def read_sources(records: Sequence[tuple[str, Record]]) -> list[Source]:
    """What each record, given with the name of its run, says.

    Raises:
        ConfigError: no record, one that is no complete ``leak``, or runs under different estimators,
            formats or bands.
    """
    if not records:
        raise ConfigError("collapse needs at least one leak run")
    found = []
    for name, record in records:
        if record.verb != "leak":
            raise ConfigError(f"{name} is a '{record.verb}' run: collapse puts leak runs together")
        if record.status != "complete":
            raise ConfigError(f"{name} is {record.status} ({record.reason}): finish it with twinscope resume")
        summary, width = record.summary, record.config["model"].get("width")
        conditions = {key: record.config["ep"].get(key) for key in _ESTIMATOR}
        conditions |= {key: summary[key] for key in _FORMAT}
        label = summary["model"] if width is None else f"width {width}, {summary['blocks']} layers"
        found.append(Source(name, label, _cluster(record), width, summary["beta"], conditions, summary))
    for key in (*_ESTIMATOR, *_FORMAT):
        values: dict[Any, list[str]] = {}
        for source in found:
            values.setdefault(source.conditions[key], []).append(source.run)
        if len(values) > 1:
            shown = "; ".join(f"{value}: {', '.join(names)}" for value, names in values.items())
            raise ConfigError(
                f"the runs differ in '{key}' ({shown}): a threshold belongs to one estimator, format and "
                "band, so collapse them apart"
            )
    return _told_apart(found)


def common_beta(sources: Sequence[Source]) -> float:
    """The beta of most runs, at which the law is tested.

    Raises:
        ConfigError: two betas have equally many runs.
    """
    counts = Counter(source.beta for source in sources).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        shown = ", ".join(f"{beta:g} ({count})" for beta, count in counts)
        raise ConfigError(
            f"no beta is that of most runs (beta and number of runs: {shown}): the law is tested at one "
            "beta, so measure with ep.beta instead of a displacement, or leave runs out"
        )
    return counts[0][0]


def points(source: Source, beta: float) -> list[dict[str, Any]]:
    """One row per block of one run, a control where its beta is not ``beta``; nothing is fitted yet."""
    found, summary = [], source.summary
    for index, ratio in enumerate(summary["displacement_ratio"]):
        row: dict[str, Any] = {
            "key": f"{source.run} block={index + 1}",
            "run": source.run,
            "model": source.label,
            **given("width", source.width, "the model comes from a source, whose record names no width"),
            "layers": summary["blocks"],
            "block": index + 1,
            "beta": source.beta,
            "role": "point" if source.beta == beta else "control",
            "displacement_ratio": ratio,
        }
        for name in ("gain_low", "gain_low_low", "gain_low_high"):
            row |= given(name, summary[name][index], _reason_of(summary.get(f"{name}_reason", ""), index + 1))
        found.append(row)
    return found


def given(name: str, value: Any, reason: str) -> dict[str, Any]:
    """The field of a record, with its reason beside it where it is null."""
    return {name: None, f"{name}_reason": reason} if value is None else {name: value}


def _cluster(record: Record) -> str:
    """A source without the step, or the shape, start and training: steps aside, what a model grew from."""
    config = record.config
    source = config["model"].get("source")
    if source is not None:
        return str(source).partition("@")[0]
    base = config.get("base")
    if base is None:
        return json.dumps([config["model"], config["leak"].get("seed", 0)], sort_keys=True)
    training = {key: value for key, value in base.items() if key != "steps"}
    return json.dumps([config["model"], training, config["data"]], sort_keys=True)


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Labels that different models or checkpoints share get the model's description, then a number, added."""
    identities = [(source.cluster, source.summary["model"]) for source in sources]
    labels = [source.label for source in sources]
    described = [f"{source.label}, {source.summary['model']}" for source in sources]
    order = {identity: number for number, identity in enumerate(dict.fromkeys(identities), 1)}
    numbered = [f"{source.label}, model {order[i]}" for source, i in zip(sources, identities, strict=True)]
    for finer in (described, numbered):
        owners: dict[str, set[tuple[str, str]]] = {}
        for label, identity in zip(labels, identities, strict=True):
            owners.setdefault(label, set()).add(identity)
        labels = [
            label if len(owners[label]) == 1 else other for label, other in zip(labels, finer, strict=True)
        ]
    return [replace(source, label=label) for source, label in zip(sources, labels, strict=True)]


def _reason_of(reasons: str, block: int) -> str:
    """The part about one block of ``"block 1, 2: this; block 3: that"``, or all of it."""
    for part in reasons.split("; block "):
        numbers, _, reason = part.removeprefix("block ").partition(": ")
        if str(block) in numbers.split(", "):
            return reason
    return reasons or "the leak run gives no reason"
