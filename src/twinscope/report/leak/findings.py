"""What a leak spectrum says in sentences: its outcome, its self-test, and what limits it.

Covers the sentences, and reading lists over blocks with their reasons; no drawing, no markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from twinscope.report.reading import Row, RunData
from twinscope.report.wording import (
    blocks_named,
    contended,
    count,
    known,
    listed,
    signed,
    small,
    span,
    study,
    unfinished,
)


def blocks(run: RunData) -> int:
    """How many blocks were measured; 0 for a run that came to no spectrum."""
    return run.summary.get("blocks") or max((row["block"] for row in run.rows), default=0)


def per_block(run: RunData, key: str, part: Mapping[str, Any] | None = None) -> list[Any]:
    """A list of the summary, or of ``part`` of it, with None for blocks that it does not reach."""
    found = list((run.summary if part is None else part).get(key) or [])
    return (found + [None] * blocks(run))[: blocks(run)]


def reasons(part: Mapping[str, Any], key: str) -> dict[int, str]:
    """Block -> why the list under ``key`` has no number there; one sentence without blocks holds for all."""
    text = part.get(f"{key}_reason") or ""
    pieces = re.split(r"(?:^|; )block ([\d, ]+): ", text)
    found = {
        int(block): reason
        for numbers, reason in zip(pieces[1::2], pieces[2::2], strict=True)
        for block in numbers.split(",")
        if block.strip()
    }
    values = part.get(key)
    missing = [i for i, value in enumerate(values, 1) if value is None] if isinstance(values, list) else []
    return {block: found.get(block, text) for block in missing}


def spectrum(run: RunData, block: int, sign: int = 1) -> list[Row]:
    """The rows of one block at one sign of the nudge, by gain."""
    chosen = (row for row in run.rows if row["block"] == block and row["beta_sign"] == sign)
    return sorted(chosen, key=lambda row: row["gain"])


def gains(run: RunData) -> tuple[float, float]:
    """The smallest and the largest gain at +β."""
    found = [row["gain"] for row in run.rows if row["beta_sign"] == 1]
    return min(found, default=1.0), max(found, default=1.0)


def window(run: RunData, block: int) -> tuple[float, float] | None:
    """Lower and upper end of a block's operating window within the gains that were measured, if it has one.

    An end without an edge is the end of the measured gains: the window may reach further.
    """
    band = run.summary.get("band") or 0.0
    inside = [row["projection"] for row in spectrum(run, block) if row["projection"] is not None]
    if not any(abs(value) <= band for value in inside):
        return None
    low, high = (per_block(run, key)[block - 1] for key in ("gain_low", "gain_high"))
    first, last = gains(run)
    return (first if low is None else low, last if high is None else high)


def outcome(run: RunData) -> str:
    """The leak at gain 1 beside what the control reads, and the gains at which every block is usable."""
    at_one = known(row["projection"] for row in run.rows if row["gain"] == row["beta_sign"] == 1)
    if not at_one:
        return "No leak has been measured."
    text = f"At gain 1 the projection of the leak on the gradient is {span(at_one)}"
    text += f" over {blocks(run)} {'block' if blocks(run) == 1 else 'blocks'}"
    control = known((run.summary.get("control") or {}).get("projection") or [])
    if control:
        text += f", where the control reads {span(control)}"
    return f"{text}. {_common_window(run)}".strip()


def _common_window(run: RunData) -> str:
    band = run.summary.get("band")
    if band is None:
        return ""
    windows = [window(run, block) for block in range(1, blocks(run) + 1)]
    without = [block for block, part in enumerate(windows, 1) if part is None]
    if without:
        return f"No measured gain brings {blocks_named(without)} inside ±{band:g}."
    ends = [part for part in windows if part is not None]
    low, high = max(part[0] for part in ends), min(part[1] for part in ends)
    if low > high:
        return f"No gain keeps all blocks inside ±{band:g}."
    first, last = gains(run)
    lower = f"from {gain(low)}" if low > first else f"from {gain(low)}, the smallest measured,"
    upper = f"to {gain(high)}" if high < last else f"to {gain(high)}, the largest measured"
    return f"Gains {lower} {upper} keep every block inside ±{band:g}."


def gain(value: float | None) -> str:
    """A gain: three significant digits without zeros at the end."""
    text = small(value)
    return text if "×" in text or "." not in text else text.rstrip("0").rstrip(".")


def label(run: RunData) -> str:
    """What is under study, where that is not the instrument's own precision."""
    return study(run.summary)


def remarks(run: RunData) -> list[str]:
    """How the instrument did on what it must read right, what the control is, and what to train with."""
    found = []
    test = run.summary.get("self_test") or {}
    parts = {name: test[name] for name in ("null", "planted") if name in test}
    if parts:
        passed = all(part["passed"] for part in parts.values())
        details = " ".join(f"{name.capitalize()}: {part['detail']}." for name, part in parts.items())
        found.append(f"Self-test {'passed' if passed else 'failed'}. {details}")
    control = run.summary.get("control") or {}
    if control:
        found.append(f"Control: {control.get('description', '').rstrip('.')}.")
    recommended = run.summary.get("recommended")
    if recommended:
        profile = f"gain {span(recommended['gain'], gain)}" if recommended.get("gain") else "no gain"
        found.append(
            f"Recommended for training: displacement {small(recommended.get('displacement'))}, which is "
            f"{profile} at the β measured with."
        )
    elif run.summary.get("recommended_reason"):
        found.append(f"No displacement is recommended: {run.summary['recommended_reason'].rstrip('.')}.")
    return found


def snippet(run: RunData) -> str:
    """The recommendation as TOML for ``train``."""
    return (run.summary.get("recommended") or {}).get("config_fragment", "")


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the spectrum shows, the gravest first."""
    reached = "before there is a spectrum"
    if run.journaled:
        reached += f", after {count(run.journaled)} units of work"
    return [
        *unfinished(run, reached),
        *_self_test(run),
        *_studied(run),
        *_control(run),
        *_edges(run),
        *_extended(run),
        *contended(run, "Projections"),
    ]


def _self_test(run: RunData) -> list[str]:
    test = run.summary.get("self_test") or {}
    failed = [name for name in ("null", "planted") if name in test and not test[name]["passed"]]
    return (
        [f"The self-test failed ({listed(failed)}): no number of this run can be relied on."]
        if failed
        else []
    )


def _studied(run: RunData) -> list[str]:
    if not label(run):
        return []
    return [
        f"EP ran in {run.summary['study']} and the reference in {run.summary.get('instrument')}: the leak "
        "holds the rounding of the forward and backward passes besides that of the displaced states."
    ]


def _control(run: RunData) -> list[str]:
    control, band = run.summary.get("control") or {}, run.summary.get("band")
    values = per_block(run, "projection", control) if control else []
    outside = [
        (abs(value), block)
        for block, value in enumerate(values, 1)
        if value is not None and abs(value) > band
    ]
    if not outside:
        return []
    worst = max(outside)[1]
    return [
        f"The control reads {signed(values[worst - 1], 4)} in block {worst}, outside ±{band:g}: a leak of "
        "that size is not absorption or curvature of the states."
    ]


def _edges(run: RunData) -> list[str]:
    open_ended = []
    for key, end in (("gain_low", "smallest"), ("gain_high", "largest")):
        missing = [
            block
            for block, value in enumerate(per_block(run, key), 1)
            if value is None and window(run, block) is not None
        ]
        if missing:
            open_ended.append(f"{blocks_named(missing)} at the {end} ({gain(gains(run)[end == 'largest'])})")
    if not open_ended:
        return []
    return [
        f"Still inside the band at an end of the measured gains: {listed(open_ended)}. There the window has "
        "no edge, and may reach further."
    ]


def _extended(run: RunData) -> list[str]:
    before = run.summary.get("extended_from") or []
    if not before:
        return []
    recomputed = listed(run.summary.get("recomputed") or [])
    return [
        f"Batches were added to this run ({listed([count(each) for each in before])} before, "
        f"{count(run.summary.get('batches') or 0)} now); recomputed from all of them: {recomputed}."
    ]


def facts(run: RunData) -> list[str]:
    """Model, sizes and precision of the measurement."""
    summary = run.summary
    if not summary.get("batches"):
        return []
    return [
        str(summary.get("model", "")),
        f"{blocks(run)} blocks",
        f"{count(summary['batches'])} batches in {summary.get('groups')} groups",
        f"{summary.get('study')} under {summary.get('instrument')}"
        if label(run)
        else str(summary.get("study")),
        f"β {small(summary.get('beta'))}",
    ]
