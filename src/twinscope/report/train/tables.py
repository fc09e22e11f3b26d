"""The tables of training runs: arms with baselines, windows, gate points; several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from twinscope.report.reading import Row, RunData
from twinscope.report.tables import Cell, Table, given, integer, measured, sentence
from twinscope.report.train.findings import arm_label
from twinscope.report.wording import cosine, known, number, signed, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (arms(run), windows(run), gates(run), amp_gates(run))
    return [table for table in found if table is not None]


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
                    measured(loss, number, digits=4),
                    _to_twin(run, arm, loss),
                    given(gate, "median_cosine", cosine),
                    given(gate, "worst_cosine", cosine),
                    given(gate, "displacement", small),
                    given(gate, "residual", small),
                    integer(run.last_step),
                    integer(run.skipped(arm)),
                    integer(len(run.seeds)),
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
        rule = run.rules.get(arm, "")
        for seed in [None, *seeds] if len(seeds) > 1 else seeds:
            loss = run.final(arm, "val_loss", seed)
            part = found
            if seed is not None:
                part = next((each for each in found.get("per_seed", ()) if each.get("seed") == seed), {})
            rows.append(
                (
                    Cell(arm_label(arm)),
                    Cell(rule),
                    Cell("mean") if seed is None else integer(seed),
                    measured(loss, number, digits=4, reason=part.get("val_loss_reason")),
                    given(part, "val_bits_per_byte", number, digits=4),
                    _to_twin(run, arm, loss, seed),
                    _below(loss, baselines.get("trigram")),
                    integer(found.get("steps", run.last_step)),
                    integer(run.skipped(arm, seed)),
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
                measured(loss, number, digits=4, reason=baselines.get(f"{name}_reason")),
                measured(bits, number, digits=4),
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
            f"{small(scatter['bp_final_sd'])} nats per token. {sentence(scatter.get('note', ''))}"
        )
    elif scatter:
        note = " ".join(sentence(scatter.get(key, "")) for key in ("note", "bp_final_sd_reason"))
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
                        integer(part["start"]),
                        integer(part["end"]),
                        Cell("all") if seed is None else integer(seed),
                        *(given(each, key, signed, digits=5) for key in ("mean", "low", "high")),
                        integer(part["n"]) if seed is None else Cell(""),
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
                integer(row["seed"]),
                given(row, "amp_cosine", number, digits=4),
                given(row, "full_cosine", number, digits=4),
                Cell("yes" if row["passed"] else "no"),
            )
            for row in rows
        ),
    )


def _gate_row(row: Row) -> tuple[Cell, ...]:
    values = known(row["block_cosine"])
    worst = min(values, default=None)
    ratios = known(row["displacement_ratio"])
    return (
        Cell(arm_label(row["arm"])),
        integer(row["seed"]),
        integer(row["step"]),
        measured(median(values) if values else None, cosine, reason=row.get("block_cosine_reason")),
        measured(worst, cosine, reason=row.get("block_cosine_reason")),
        integer(row["block_cosine"].index(worst) + 1 if worst is not None else None),
        given(row, "outer_cosine", cosine),
        given(row, "control_cosine", cosine),
        measured(max(ratios, default=None), small, reason=row.get("displacement_ratio_reason")),
        given(row, "residual", small),
        given(row, "beta", small),
    )


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
