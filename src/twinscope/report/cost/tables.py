"""The tables of a cost run: comparisons, the way to wall clock, claims, parts, ledger, memory, windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinscope.report.cost.findings import QUANTITIES, entries, shapes, windows
from twinscope.report.cost.frontier_tables import frontier_points
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, given, integer, measured, sentence
from twinscope.report.train.findings import arm_label
from twinscope.report.wording import compact, cosine, number, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (
        comparisons(run),
        fidelity(run),
        verdicts(run),
        published(run),
        frontier_points(run),
        gap(run),
        shorthand(run),
        parts(run),
        ledger(run),
        memory(run),
        overhead(run),
        agreement(run),
        every_window(run),
    )
    return [table for table in found if table is not None]


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per run and compared arm: time, FLOPs, memory, fidelity, and whether it was controlled."""
    rows = []
    for name, run in runs.items():
        found = [_compared(entry) for entry in entries(run, "comparisons")] or [(Cell("–"),) * 10]
        controlled = _yes(run.summary.get("controlled"))
        rows += [(Cell(name), Cell(run.status), controlled, *cells) for cells in found]
    return Table(
        "cost-comparison",
        "The cost runs side by side: time per training step as a ratio, with 95 % intervals",
        (
            "run", "status", "controlled", "shape", "arm", "against", "time", "low", "high", "FLOPs",
            "peak memory", "median cosine", "windows agree",
        ),
        (False,) * 6 + (True,) * 6 + (False,),
        tuple(rows),
    )  # fmt: skip


def comparisons(run: RunData) -> Table | None:
    """Every arm at every shape against the denominator: times, FLOPs and memory."""
    rows = [
        (
            *_pair(entry),
            *_ratio(entry, "train_step_ratio"),
            integer(entry["train_step_ratio"]["n"]),
            *_ratio(entry, "wall_clock_ratio"),
            *(
                given(entry["flops"], f"{key}_ratio", number, digits=4)
                for key in ("analytic", "counted", "causal", "shorthand")
            ),
            given(entry, "peak_memory_ratio", number, digits=3),
            given(entry, "activation_peak_ratio", number, digits=3),
            _yes(entry["windows_agree"]),
        )
        for entry in entries(run, "comparisons")
    ]
    return _table(
        "comparisons",
        "Comparisons: time per training step and with evaluation, 95 % intervals over pairs of windows; "
        "FLOPs by ledger, count, ledger with masked pairs free, and shorthand; peaks of memory; all ratios",
        (
            "shape", "arm", "against", "step", "low", "high", "pairs", "with evaluation", "low", "high",
            "ledger", "counted", "causal", "shorthand", "peak memory", "activations", "windows agree",
        ),
        (False,) * 3 + (True,) * 13 + (False,),
        rows,
    )  # fmt: skip


def fidelity(run: RunData) -> Table | None:
    """Cosine of every EP arm to backpropagation, with what it was read at."""
    keys = ("median_cosine", "worst_cosine", "control_cosine")
    rows = [
        (
            Cell(entry["shape"]),
            Cell(arm_label(entry["arm"])),
            *(given(entry["fidelity"], key, cosine) for key in keys),
            given(entry["fidelity"], "displacement", small),
            given(entry["fidelity"], "residual", small),
        )
        for entry in entries(run, "comparisons")
        if entry["fidelity"]["median_cosine"] is not None
    ]
    return _table(
        "fidelity",
        "Fidelity: cosine to BP over blocks and batches, that of the control K = 0, displacement, residual",
        ("shape", "arm", "median", "worst", "K = 0", "displacement", "residual"),
        (False,) * 2 + (True,) * 5,
        rows,
    )


def verdicts(run: RunData) -> Table | None:
    """Every claim with its verdicts, one line for each measurement it was judged against."""
    rows = []
    for claim in run.summary.get("claims") or []:
        conditions = ", ".join(f"{key} {value}" for key, value in claim["conditions"].items())
        for place, verdict in enumerate([claim, *claim["others"]]):
            first = place == 0
            rows.append(
                (
                    Cell(claim["name"]),
                    Cell(QUANTITIES.get(claim["quantity"], claim["quantity"])),
                    measured(claim["low"], compact_ratio),
                    measured(claim["high"], compact_ratio),
                    Cell(verdict["verdict"]),
                    *(measured(verdict[key], compact_ratio) for key in _MEASURED),
                    Cell(verdict["measurement"] or "none"),
                    Cell(sentence(verdict["reason"])),
                    Cell(conditions if first else ""),
                    Cell(claim["source"] if first else ""),
                )
            )
    return _table(
        "verdicts",
        "Claims, judged against what was measured under their own conditions",
        (
            "claim", "quantity", "low", "high", "verdict", "measured", "low", "high", "by", "why",
            "conditions", "source",
        ),
        (False, False, True, True, False, True, True, True, False, False, False, False),
        rows,
        "Consistent: the intervals of claim and measurement overlap; understated and overstated: the claim "
        "lies below, or above, what was measured.",
    )  # fmt: skip


def published(run: RunData) -> Table | None:
    """Measurements published elsewhere, by quantity."""
    rows = [
        (
            Cell(part["name"]),
            *(measured(part["values"].get(key), compact_ratio) for key in QUANTITIES),
            Cell(part["source"]),
        )
        for part in run.summary.get("published") or []
    ]
    names = tuple(QUANTITIES.values())
    return _table(
        "published",
        "Published measurements, as ratios",
        ("name", *names, "source"),
        (False, *(True,) * len(names), False),
        rows,
    )


def gap(run: RunData) -> Table | None:
    """The way from the ratio of FLOPs to that of times, step by step."""
    rows = [
        (
            *_pair(entry),
            Cell(step["reason"]),
            measured(step["change"], compact),
            measured(step["ratio"], number, digits=3),
        )
        for entry in entries(run, "comparisons")
        for step in [
            {"reason": "FLOPs by ledger", "change": None, "ratio": entry["flops"]["analytic_ratio"]},
            *entry["gap"],
        ]
        if entry["gap"]
    ]
    return _table(
        "gap",
        "From the ratio of FLOPs to the ratio of times, part by part",
        ("shape", "arm", "against", "because", "change", "ratio then"),
        (False,) * 4 + (True,) * 2,
        rows,
    )


def shorthand(run: RunData) -> Table | None:
    """The way from the shorthand to the ledger's ratio, and where ledger and count differ."""
    rows = [
        (*_pair(entry), Cell(line))
        for entry in entries(run, "comparisons")
        for line in [*entry["flops"]["explanation"], *entry["flops"]["differences"]]
    ]
    return _table(
        "shorthand",
        "From the shorthand (1 + 2K + 2)/3 to the ledger's ratio",
        ("shape", "arm", "against", "step"),
        (False,) * 4,
        rows,
    )


def parts(run: RunData) -> Table | None:
    """Every part of a step: seconds, share, FLOPs by ledger and by count, and rate."""
    counts = {row["shape"]: row["flops"] for row in run.rows if row["kind"] == "count"}
    rows = []
    for part in entries(run, "parts"):
        counted = counts.get(part["shape"], {}).get(part["arm"], {}).get(part["part"])
        rows.append(
            (
                Cell(part["shape"]),
                Cell(arm_label(part["arm"])),
                Cell(part["part"]),
                measured(1e3 * part["seconds"], small),
                measured(100 * part["share"], number, digits=1),
                measured(part["flops"] / 1e6, small),
                measured(None if counted is None else counted / 1e6, small),
                measured(part["gflops_per_second"] or None, small),
            )
        )
    return _table(
        "step-parts",
        "Parts of a step: milliseconds, MFLOP by ledger and by count, and the ledger's over the time",
        ("shape", "arm", "part", "ms", "% of step", "MFLOP, ledger", "MFLOP, counted", "GFLOP/s"),
        (False,) * 3 + (True,) * 5,
        rows,
    )


def ledger(run: RunData) -> Table | None:
    """Every line of the ledger of FLOPs."""
    rows = [
        (
            Cell(line["shape"]),
            Cell(arm_label(line["arm"])),
            Cell(line["stage"]),
            Cell(line["term"]),
            integer(line["flops"]),
            integer(line["causal_flops"]),
            Cell(line["formula"]),
        )
        for line in entries(run, "ledger")
    ]
    return _table(
        "ledger",
        "The ledger of FLOPs per step; causal: masked pairs of attention taken as free",
        ("shape", "arm", "stage", "term", "FLOPs", "causal", "formula"),
        (False,) * 4 + (True,) * 2 + (False,),
        rows,
    )


def memory(run: RunData) -> Table | None:
    """Peaks of memory of every arm, in MiB."""
    keys = ("total", "activations", "parameters", "gradients", "optimizer", "resident")
    rows = [
        (
            Cell(part["shape"]),
            Cell(arm_label(part["arm"])),
            *(measured(part[f"{key}_mib"], number, digits=2) for key in keys),
        )
        for part in entries(run, "memory")
    ]
    return _table(
        "memory",
        "Memory in one step, in MiB: peak of tensors, peak of activations, and what is held; last, the "
        "resident memory of the whole process",
        ("shape", "arm", "peak", *keys[1:]),
        (False,) * 2 + (True,) * 6,
        rows,
    )


def overhead(run: RunData) -> Table | None:
    """What the trainer's loop adds to the bare gradient and optimizer."""
    rows = [
        (
            Cell(part["shape"]),
            Cell(arm_label(part["arm"])),
            *(measured(100 * part[key], number, digits=2) for key in ("overhead", "low", "high")),
            integer(part["n"]),
            measured(1e3 * part["bare_step_seconds"], small),
            measured(1e3 * part["journal_seconds_per_step"], small),
        )
        for part in entries(run, "overhead")
    ]
    return _table(
        "overhead",
        "The trainer's loop over the bare gradient and optimizer, in per cent with 95 % intervals",
        ("shape", "arm", "adds %", "low", "high", "pairs", "bare ms", "journal ms per step"),
        (False,) * 2 + (True,) * 6,
        rows,
    )


def agreement(run: RunData) -> Table | None:
    """The rate of every arm, and whether its windows agree."""
    rows = [
        (
            Cell(part["shape"]),
            Cell(arm_label(part["arm"])),
            measured(1e3 * part["step_seconds"], small),
            measured(part["steps_per_second"], small),
            integer(part["windows"]),
            measured(100 * part["spread"], number, digits=1),
            _yes(part["agree"]),
        )
        for part in entries(run, "agreement")
    ]
    band = run.summary.get("band")
    within = f"; they agree within {number(100 * band, 0)} %" if band is not None else ""
    return _table(
        "agreement",
        f"Arms: median over windows, and the slowest over the fastest{within}",
        ("shape", "arm", "ms per step", "steps/s", "windows", "spread %", "agree"),
        (False,) * 2 + (True,) * 4 + (False,),
        rows,
    )


def every_window(run: RunData) -> Table | None:
    """Every window in order of time, with what disturbed it."""
    rows = [
        (
            Cell(row["shape"]),
            integer(row["position"] + 1),
            Cell(arm_label(row["arm"])),
            integer(row["steps"]),
            measured(1e3 * row["step_seconds"], small),
            measured(1e3 * row["evaluation_seconds"], small),
            *(given(row, key, number, digits=2) for key in ("other_cpus", "stolen_cpus", "load")),
            Cell(sentence("; ".join(row["disturbances"])) if row["disturbances"] else ""),
        )
        for shape in shapes(run)
        for row in windows(run, shape)
    ]
    bounds = run.summary.get("bounds")
    note = ""
    if bounds:
        note = (
            f"Disturbed: other work keeps more than {bounds['other_cpus']:g} CPUs busy, the load average is "
            f"more than {bounds['excess_load']:g} above this run's threads, or it cannot be told."
        )
    return _table(
        "every-window",
        "Every window, in the order in which they ran",
        (
            "shape", "window", "arm", "steps", "ms per step", "evaluation ms", "other CPUs", "stolen", "load",
            "disturbed by",
        ),
        (False, True, False, True, True, True, True, True, True, False),
        rows,
        note,
    )  # fmt: skip


def compact_ratio(value: float | None) -> str:
    """A ratio as a claim gives it: at most four digits, no zeros at the end."""
    return "–" if value is None else f"{value:.4g}"


_MEASURED = ("measured", "measured_low", "measured_high")


def _pair(entry: Mapping[str, Any]) -> tuple[Cell, Cell, Cell]:
    return Cell(entry["shape"]), Cell(arm_label(entry["arm"])), Cell(arm_label(entry["against"]))


def _compared(entry: Mapping[str, Any]) -> tuple[Cell, ...]:
    return (
        *_pair(entry),
        *_ratio(entry, "train_step_ratio"),
        measured(entry["flops"]["analytic_ratio"], number, digits=3),
        given(entry, "peak_memory_ratio", number, digits=2),
        measured(entry["fidelity"]["median_cosine"], cosine),
        _yes(entry["windows_agree"]),
    )


def _ratio(entry: Mapping[str, Any], key: str) -> list[Cell]:
    return [measured(entry[key][end], number, digits=3) for end in ("median", "low", "high")]


def _yes(value: bool | None) -> Cell:
    return Cell("–" if value is None else "yes" if value else "no")


def _table(
    name: str,
    caption: str,
    columns: tuple[str, ...],
    numeric: tuple[bool, ...],
    rows: Sequence[tuple[Cell, ...]],
    note: str = "",
) -> Table | None:
    return Table(name, caption, columns, numeric, tuple(rows), note) if rows else None
