"""The tables of the report as plain cells: arms with baselines, windows, gate points, provenance.

Covers what stands in a cell and how a column sorts; no markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from twinscope.report.findings import arm_label, cosine, count, known, number, signed, small
from twinscope.report.reading import Row, RunData


@dataclass(frozen=True)
class Cell:
    """A text, the number that it sorts by (None: by its text), and why there is no number, if so."""

    text: str
    value: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Table:
    """A table with a caption; ``numeric[i]`` says whether column i holds numbers."""

    name: str
    caption: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per run and arm: where it ended, how far from its twin, how faithful, from how many seeds."""
    rows = []
    for name, run in runs.items():
        for arm in run.arms:
            loss, gate = run.final(arm, "val_loss"), run.fidelity(arm)
            rows.append(
                (
                    Cell(name),
                    Cell(run.status),
                    Cell(arm_label(arm)),
                    _measured(loss, number, digits=4),
                    _to_twin(run, arm, loss),
                    _field(gate, "median_cosine", cosine),
                    _field(gate, "worst_cosine", cosine),
                    _field(gate, "displacement", small),
                    _field(gate, "residual", small),
                    _integer(run.last_step),
                    _integer(run.skipped(arm)),
                    _integer(len(run.seeds)),
                )
            )
    names = (
        "run",
        "status",
        "arm",
        "held-out loss",
        "minus BP",
        "median cosine",
        "worst cosine",
        "displacement",
        "residual",
        "steps",
        "skipped",
        "seeds",
    )
    return Table(
        "comparison",
        "The runs side by side; losses in nats per token",
        names,
        (False,) * 3 + (True,) * 9,
        tuple(rows),
    )


def arms(run: RunData) -> Table:
    """Every arm over seeds and seed by seed, and the n-gram baselines, in one table."""
    summary = run.summary.get("arms", {})
    baselines = run.summary.get("baselines") or {}
    rows = []
    for arm in run.arms:
        found = summary.get(arm, {})
        seeds = run.seeds
        rule = found.get("rule") or str(_rule_of(run, arm))
        for seed in [None, *seeds] if len(seeds) > 1 else seeds:
            loss = run.final(arm, "val_loss", seed)
            part = found
            if seed is not None:
                part = next((each for each in found.get("per_seed", ()) if each.get("seed") == seed), {})
            rows.append(
                (
                    Cell(arm_label(arm)),
                    Cell(rule),
                    Cell("mean") if seed is None else _integer(seed),
                    _measured(loss, number, digits=4, reason=part.get("val_loss_reason")),
                    _field(part, "val_bits_per_byte", number, digits=4),
                    _to_twin(run, arm, loss, seed),
                    _below(loss, baselines.get("trigram")),
                    _integer(found.get("steps", run.last_step)),
                    _integer(run.skipped(arm, seed)),
                )
            )
    per_nat = _bits_per_byte_of_a_nat(run)
    nothing = Cell("")
    for name, loss in baselines.items():
        if name.endswith("_reason"):
            continue
        bits = loss * per_nat if loss is not None and per_nat is not None else None
        rows.append(
            (
                Cell(name),
                Cell("n-gram baseline"),
                nothing,
                _measured(loss, number, digits=4, reason=baselines.get(f"{name}_reason")),
                _measured(bits, number, digits=4),
                nothing,
                _below(loss, baselines.get("trigram")),
                nothing,
                nothing,
            )
        )
    names = (
        "arm",
        "rule",
        "seed",
        "held-out loss",
        "bits per byte",
        "minus BP",
        "below trigram",
        "steps",
        "skipped",
    )
    scatter = run.summary.get("seed_scatter", {})
    note = ""
    if scatter.get("bp_final_sd") is not None:
        note = (
            f"Standard deviation of BP's final loss over {scatter.get('n')} seeds: "
            f"{small(scatter['bp_final_sd'])} nats per token. {_sentence(scatter.get('note', ''))}"
        )
    elif scatter:
        note = " ".join(_sentence(scatter.get(key, "")) for key in ("note", "bp_final_sd_reason"))
    return Table(
        "arms",
        "Arms and baselines; loss in nats per token on held-out text, after the last step",
        names,
        (False, False) + (True,) * 7,
        tuple(rows),
        note.strip(),
    )


def windows(run: RunData) -> Table | None:
    """The paired difference in every window, over seeds and seed by seed."""
    rows = []
    for arm in run.arms:
        for part in run.windows(arm):
            for seed, each in [(None, part), *((each.get("seed"), each) for each in part["per_seed"])]:
                rows.append(
                    (
                        Cell(arm_label(arm)),
                        _integer(part["start"]),
                        _integer(part["end"]),
                        Cell("all") if seed is None else _integer(seed),
                        *(_field(each, key, signed, digits=5) for key in ("mean", "low", "high")),
                        _integer(part["n"]) if seed is None else Cell(""),
                    )
                )
    if not rows:
        return None
    return Table(
        "windows",
        "Held-out loss minus that of BP, nats per token, with 95 % intervals over held-out batches",
        ("arm", "from step", "to step", "seed", "mean", "low", "high", "n"),
        (False,) + (True,) * 7,
        tuple(rows),
    )


def gates(run: RunData) -> Table | None:
    """Every gate point: cosines, control, displacement, residual and nudge."""
    rows = run.rows_of("gate")
    if not rows:
        return None
    names = (
        "arm",
        "seed",
        "step",
        "median",
        "worst",
        "block",
        "outside",
        "K = 0",
        "displacement",
        "residual",
        "β",
    )
    return Table(
        "gates",
        "Gate points: cosine to BP (median and worst block, outside the blocks, the control K = 0); "
        "displacement of the most displaced block; residual; nudge",
        names,
        (False,) + (True,) * 10,
        tuple(_gate_row(row) for row in rows),
    )


def amp_gates(run: RunData) -> Table | None:
    """What training in amp was let through on, arm by arm; None for a run that is not in amp."""
    rows = run.rows_of("amp_gate")
    if not rows:
        return None
    return Table(
        "amp",
        "Amp gate before training: median cosine to BP in fp32, of EP in amp and of EP in fp32",
        ("arm", "seed", "in amp", "in fp32", "passed"),
        (False, True, True, True, False),
        tuple(
            (
                Cell(arm_label(row["arm"])),
                _integer(row["seed"]),
                _field(row, "amp_cosine", number, digits=4),
                _field(row, "full_cosine", number, digits=4),
                Cell("yes" if row["passed"] else "no"),
            )
            for row in rows
        ),
    )


def provenance(run: RunData) -> Table:
    """What the run depends on, flattened to dotted names."""
    rows = [(Cell("folder"), Cell(run.path.name)), (Cell("status"), Cell(run.status))]
    rows += [(Cell(key), Cell(text)) for key, text in _flattened(run.provenance)]
    return Table("provenance", "What the run depends on", ("what", "value"), (False, False), tuple(rows))


def _gate_row(row: Row) -> tuple[Cell, ...]:
    values = known(row["block_cosine"])
    worst = min(values, default=None)
    ratios = known(row["displacement_ratio"])
    return (
        Cell(arm_label(row["arm"])),
        _integer(row["seed"]),
        _integer(row["step"]),
        _measured(median(values) if values else None, cosine, reason=row.get("block_cosine_reason")),
        _measured(worst, cosine, reason=row.get("block_cosine_reason")),
        _integer(row["block_cosine"].index(worst) + 1 if worst is not None else None),
        _field(row, "outer_cosine", cosine),
        _field(row, "control_cosine", cosine),
        _measured(max(ratios, default=None), small, reason=row.get("displacement_ratio_reason")),
        _field(row, "residual", small),
        _field(row, "beta", small),
    )


def _measured(value: float | None, form: Any, reason: str | None = None, **options: Any) -> Cell:
    if value is None:
        return Cell("–", None, reason)
    return Cell(form(value, **options), value)


def _field(part: Mapping[str, Any], key: str, form: Any, **options: Any) -> Cell:
    return _measured(part.get(key), form, part.get(f"{key}_reason"), **options)


def _integer(value: int | None) -> Cell:
    return Cell("–") if value is None else Cell(count(value), value)


def _to_twin(run: RunData, arm: str, loss: float | None, seed: int | None = None) -> Cell:
    twin = run.final(run.reference, "val_loss", seed) if run.reference else None
    if arm == run.reference or loss is None or twin is None:
        return Cell("")
    return Cell(signed(loss - twin, 4), loss - twin)


def _below(loss: float | None, trigram: float | None) -> Cell:
    if loss is None or trigram is None:
        return Cell("")
    return Cell(signed(trigram - loss), trigram - loss)


def _bits_per_byte_of_a_nat(run: RunData) -> float | None:
    """Bits per byte for one nat per token on this held-out text: the same for every model on it."""
    for arm in run.arms:
        loss, bits = run.final(arm, "val_loss"), run.final(arm, "val_bits_per_byte")
        if loss and bits is not None:
            return bits / loss
    return None


def _rule_of(run: RunData, arm: str) -> str:
    chosen = run.settings.get("arms")
    for table in chosen if isinstance(chosen, list) else []:
        if isinstance(table, Mapping) and table.get("name") == arm:
            return str(table.get("rule", ""))
    return arm if arm in ("ep", "bp") else ""


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _flattened(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = f"{prefix}.{key}" if prefix else str(key)
            reason = value.get(f"{key}_reason")
            if item is None and reason is not None:
                yield name, f"– ({reason})"
            elif not (key.endswith("_reason") and value.get(key.removesuffix("_reason"), "") is None):
                yield from _flattened(item, name)
    elif isinstance(value, list | tuple) and all(not isinstance(item, Mapping | list) for item in value):
        yield prefix, ", ".join(_plain(item) for item in value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flattened(item, f"{prefix}.{index}")
    else:
        yield prefix, _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
