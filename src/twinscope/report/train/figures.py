"""The four figures of a training run: losses, paired differences, cosines, and displaced states.

Covers which rows make a panel, how a figure is read, its content in words and its data; train_panels.py puts
it on axes, drawing.py turns it into files. Losses are nats per token on held-out text; a step is an
optimizer step; blocks count from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from twinscope.report.axes import Line
from twinscope.report.drawing import LINES, MARKERS, PALETTE, Panel, Plot, block_colours, short_label
from twinscope.report.reading import Row, RunData
from twinscope.report.train.findings import LARGEST_RESIDUAL, LEAST_DISPLACEMENT, arm_label
from twinscope.report.train.panels import (
    CLOSE,
    SMALLEST_GAP,
    draw_cosines,
    draw_displacements,
    draw_losses,
    draw_paired,
    draw_residuals,
    draw_windows,
)
from twinscope.report.wording import cosine, count, known, listed, number, signed, small


def figures(run: RunData) -> list[Plot]:
    """The figures that the run has data for, in the order of the report."""
    made = (losses(run), differences(run), cosines(run), states(run))
    return [plot for plot in made if plot is not None]


def losses(run: RunData) -> Plot | None:
    """Held-out loss of every arm over training, one panel per seed, with n-gram models as lines."""
    rows = [row for row in run.rows_of("eval") if row["val_loss"] is not None]
    if not rows:
        return None
    baselines = {
        name: value for name, value in (run.summary.get("baselines") or {}).items() if _is_number(value)
    }
    values = [row["val_loss"] for row in rows]
    # The fall from the first loss would take most of the height: the axis begins a little above the
    # weakest n-gram model, or above what is measured after a tenth of the run.
    later = [row["val_loss"] for row in rows if row["step"] >= 0.1 * (run.last_step or 0)]
    low = min([*values, *baselines.values()])
    high = max([*later, *baselines.values()])
    margin = 0.06 * (high - low or 1.0)
    limits = (low - margin, high + margin)
    above = sum(value > limits[1] for value in values)
    panels = []
    for seed in sorted({row["seed"] for row in rows}):
        lines = {
            arm: [(row["step"], row["val_loss"]) for row in rows if (row["arm"], row["seed"]) == (arm, seed)]
            for arm in run.arms
        }
        lines = {arm: points for arm, points in lines.items() if points}
        words = f"Seed {seed}: " + "; ".join(
            f"{arm_label(arm)} goes from {number(points[0][1])} nats per token at step {count(points[0][0])} "
            f"to {number(points[-1][1])} at step {count(points[-1][0])}"
            for arm, points in lines.items()
        )
        panels.append(
            Panel(
                f"Seed {seed}", f"{words}.", partial(draw_losses, lines, baselines, limits, _arm_lines(run))
            )
        )
    reading = "Loss on the same held-out batches; lower is better. Labels give the last value."
    if baselines:
        models = listed([f"{name} {number(value, 2)}" for name, value in baselines.items()])
        reading += f" Horizontal lines: n-gram models on the same tokens ({models})."
    if above:
        reading += (
            f" {count(above)} early {'point lies' if above == 1 else 'points lie'} above the axis "
            f"(up to {number(max(values), 2)})."
        )
    return Plot(
        name="heldout-loss",
        title="Held-out loss",
        reading=reading,
        panels=tuple(panels),
        columns=("seed", "arm", "step", "train_loss", "val_loss"),
        rows=tuple((r["seed"], r["arm"], r["step"], r["train_loss"], r["val_loss"]) for r in rows),
    )


def differences(run: RunData) -> Plot | None:
    """Paired difference of held-out loss to the reference arm: windows with intervals, and each seed.

    Without windows, as in a run that has not ended, the differences of single evaluations.
    """
    windows = {arm: parts for arm in run.arms if (parts := run.windows(arm))}
    twin = arm_label(run.reference or "bp")
    if windows:
        panels = [
            Panel(
                f"{short_label(arm_label(arm), 24)} − {twin}",
                _windows_in_words(arm, parts),
                partial(draw_windows, parts, _arm_lines(run).get(arm, Line(PALETTE["ink"][0], "-", "o"))),
            )
            for arm, parts in windows.items()
        ]
        reading = (
            f"Above zero the arm is worse than {twin}. Boxes: mean over seeds with its 95 % interval over "
            "held-out batches; markers: each seed with its own."
        )
        rows = [row for arm, parts in windows.items() for part in parts for row in _window_rows(arm, part)]
    else:
        paired = _paired(run)
        if not paired:
            return None
        panels = [
            Panel(
                f"{short_label(arm_label(arm), 24)} − {twin}",
                f"{arm_label(arm)} minus {twin} at the last common evaluation: "
                + listed([f"{signed(points[-1][1])} (seed {seed})" for seed, points in by_seed.items()])
                + " nats per token.",
                partial(draw_paired, by_seed, _arm_lines(run)[arm]),
            )
            for arm, by_seed in paired.items()
        ]
        reading = (
            f"Above zero the arm is worse than {twin}. Each point is one evaluation of one seed; the run has "
            "no windows with intervals yet."
        )
        rows = [
            (arm, step, step, seed, value, None, None, None)
            for arm, by_seed in paired.items()
            for seed, points in by_seed.items()
            for step, value in points
        ]
    return Plot(
        name="paired-difference",
        title=f"Paired difference of held-out loss to {twin}",
        reading=f"{reading} Tinted band: within ±{CLOSE} nats per token.",
        panels=tuple(panels),
        columns=("arm", "start", "end", "seed", "mean", "low", "high", "n"),
        rows=tuple(rows),
    )


def cosines(run: RunData) -> Plot | None:
    """Cosine of each block's gradient to backpropagation over training, one panel per arm and seed."""
    rows = [row for row in run.rows_of("gate") if known(row["block_cosine"])]
    if not rows:
        return None
    gaps = [max(1 - value, SMALLEST_GAP) for row in rows for value in known(row["block_cosine"])]
    limits = (max(gaps) * 1.5, min(gaps) / 1.5)
    if limits[0] < 10 * limits[1]:
        # At least one decade, or the axis would magnify what does not matter.
        middle = (limits[0] * limits[1]) ** 0.5
        limits = (middle * 10**0.5, middle / 10**0.5)
    depth = max(len(row["block_cosine"]) for row in rows)
    panels = []
    for arm, seed, part in _groups(run, rows):
        worst = min((value, row["step"]) for row in part for value in known(row["block_cosine"]))
        last = part[-1]
        words = (
            f"{arm_label(arm)}, seed {seed}: the worst block cosine is {cosine(worst[0])}, at step "
            f"{count(worst[1])}; at step {count(last['step'])} blocks 1 to {len(last['block_cosine'])} have "
            f"{_run_of(last['block_cosine'], cosine)}."
        )
        control = known(row["control_cosine"] for row in part)
        if control:
            words += f" The control without rounds (K = 0) is at least {cosine(min(control))}."
        title = f"{short_label(arm_label(arm), 24)}, seed {seed}"
        panels.append(Panel(title, words, partial(draw_cosines, part, depth, limits)))
    return Plot(
        name="block-cosine",
        title="Cosine to backpropagation, per block",
        reading=(
            "Gradient of each block against backpropagation on the same batch and weights, on a logarithmic "
            "scale of 1 − cosine: higher is closer. K = 0 is the control without rounds, which is "
            "backpropagation up to rounding."
        ),
        panels=tuple(panels),
        columns=("arm", "seed", "step", "part", "cosine"),
        rows=tuple(_cosine_rows(rows)),
        variables=_block_variables(depth),
    )


def states(run: RunData) -> Plot | None:
    """Displacement ratio per block over training, per arm and seed, then every fixed-point residual."""
    rows = [row for row in run.rows_of("gate") if known(row["displacement_ratio"])]
    panels = []
    depth = max((len(row["displacement_ratio"]) for row in rows), default=1)
    ratios = [value for row in rows for value in known(row["displacement_ratio"]) if value > 0]
    limits = (min([*ratios, LEAST_DISPLACEMENT]) / 1.6, max([*ratios, LEAST_DISPLACEMENT]) * 1.6)
    for arm, seed, part in _groups(run, rows):
        largest = [max(known(row["displacement_ratio"])) for row in part]
        last = part[-1]
        words = (
            f"{arm_label(arm)}, seed {seed}: the most displaced block moves by {small(min(largest))} to "
            f"{small(max(largest))} of its state; at step {count(last['step'])} blocks 1 to "
            f"{len(last['displacement_ratio'])} have {_run_of(last['displacement_ratio'], small)}."
        )
        title = f"Displacement: {short_label(arm_label(arm), 20)}, seed {seed}"
        panels.append(Panel(title, words, partial(draw_displacements, part, depth, limits)))
    residuals = [row for row in run.rows_of("gate") if row["residual"] is not None]
    if residuals:
        worst = max(residuals, key=lambda row: row["residual"])
        words = (
            f"The largest fixed-point residual is {small(worst['residual'])} ({arm_label(worst['arm'])}, "
            f"seed {worst['seed']}, step {count(worst['step'])}); the limit is {LARGEST_RESIDUAL}."
        )
        groups = list(_groups(run, residuals))
        panels.append(Panel("Fixed-point residual", words, partial(draw_residuals, groups, _arm_lines(run))))
    if not panels:
        return None
    return Plot(
        name="displaced-states",
        title="Displacement of the states, and how near they are to equilibrium",
        reading=(
            f"A cosine counts where the most displaced block is above {LEAST_DISPLACEMENT:g} and the "
            f"residual below {LARGEST_RESIDUAL}. Logarithmic scales."
        ),
        panels=tuple(panels),
        columns=("arm", "seed", "step", "quantity", "block", "value"),
        rows=tuple(_state_rows(run.rows_of("gate"))),
        variables=_block_variables(depth),
    )


def _arm_lines(run: RunData) -> dict[str, Line]:
    """A line for each arm; the reference is thin, dashed and in the colour of the text, as a yardstick is."""
    others = [arm for arm in run.arms if arm != run.reference]
    colours = [light for name, (light, _) in PALETTE.items() if name.startswith("arm-")]
    lines = {
        arm: Line(
            colours[index % len(colours)],
            LINES[index % len(LINES)],
            MARKERS[index % len(MARKERS)],
            width=2.2,
        )
        for index, arm in enumerate(others)
    }
    return lines | {run.reference or "": Line(PALETTE["reference"][0], (0, (4, 2.2)), "", width=1.2)}


def _groups(run: RunData, rows: Sequence[Row]) -> Iterable[tuple[str, int, list[Row]]]:
    for arm in run.arms:
        for seed in run.seeds:
            part = [row for row in rows if (row["arm"], row["seed"]) == (arm, seed)]
            if part:
                yield arm, seed, part


def _paired(run: RunData) -> dict[str, dict[int, list[tuple[int, float]]]]:
    losses = {
        (row["arm"], row["seed"], row["step"]): row["val_loss"]
        for row in run.rows_of("eval")
        if row["val_loss"] is not None
    }
    paired: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for (arm, seed, step), loss in losses.items():
        twin = losses.get((run.reference or "", seed, step))
        if arm != run.reference and twin is not None:
            paired.setdefault(arm, {}).setdefault(seed, []).append((step, loss - twin))
    return paired


def _windows_in_words(arm: str, windows: Sequence[Row]) -> str:
    shown = windows if len(windows) <= 4 else [windows[0], windows[-1]]
    parts = []
    for part in shown:
        seeds = ", ".join(f"seed {seed['seed']} {signed(seed['mean'], 4)}" for seed in part["per_seed"])
        parts.append(
            f"steps {count(part['start'])} to {count(part['end'])}: {signed(part['mean'], 4)} "
            f"(95 % interval {signed(part['low'], 4)} to {signed(part['high'], 4)}; {seeds})"
        )
    which = "" if len(shown) == len(windows) else f", first and last of {len(windows)} windows"
    return f"{arm_label(arm)}, nats per token{which}: {'; '.join(parts)}."


def _run_of(values: Sequence[float | None], form: Callable[[float | None], str]) -> str:
    if len(values) <= 6:
        return listed([form(value) for value in values])
    return f"{form(min(known(values)))} at least and {form(max(known(values)))} at most"


def _block_variables(depth: int) -> dict[str, str]:
    return {light: name for name, light, _ in block_colours(depth)}


def _window_rows(arm: str, part: Row) -> Iterable[tuple[object, ...]]:
    yield (arm, part["start"], part["end"], "all", part["mean"], part["low"], part["high"], part["n"])
    for seed in part["per_seed"]:
        yield (arm, part["start"], part["end"], seed["seed"], seed["mean"], seed["low"], seed["high"], None)


def _cosine_rows(rows: Sequence[Row]) -> Iterable[tuple[object, ...]]:
    for row in rows:
        start = (row["arm"], row["seed"], row["step"])
        for index, value in enumerate(row["block_cosine"], start=1):
            yield (*start, f"block {index}", value)
        for part in ("outer", "control"):
            yield (*start, part, row[f"{part}_cosine"])


def _state_rows(rows: Sequence[Row]) -> Iterable[tuple[object, ...]]:
    for row in rows:
        start = (row["arm"], row["seed"], row["step"])
        for index, value in enumerate(row["displacement_ratio"], start=1):
            yield (*start, "displacement_ratio", index, value)
        yield (*start, "residual", None, row["residual"])
        yield (*start, "beta", None, row["beta"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
