"""How numbers, lists and shared warnings read in prose.

Covers what every verb's sentences and tables use; what a run says is in the findings of its verb.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import floor, log10
from typing import Any

from twinscope.report.reading import RunData

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` decimals and a true minus sign; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """As :func:`number`, with a plus sign before a positive value."""
    if value is None:
        return "–"
    text = number(value, digits)
    # A negative number that rounds to zero is zero.
    if float(text.replace("−", "-")) == 0:
        return f"{0:.{digits}f}"
    return text if value < 0 else f"+{text}"


def small(value: float | None) -> str:
    """Three significant digits, with a power of ten below 0.001 and from 10,000 on."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    exponent = floor(log10(abs(value)))
    if -3 <= exponent < 4:
        return number(value, max(0, 2 - exponent))
    mantissa, _, power = f"{value:.2e}".partition("e")
    return f"{mantissa.replace('-', '−')}×10{str(int(power)).translate(_SUPERSCRIPTS)}"


def cosine(value: float | None) -> str:
    """A cosine with enough digits to show its distance from 1; as ``1 − d`` where that needs too many."""
    if value is None:
        return "–"
    gap = 1.0 - value
    if gap <= 0:
        return number(value, 4)
    # A digit beyond the first nine that differs: 0.9975, 0.99975.
    digits = max(3, 1 - floor(log10(gap)))
    return number(value, digits) if digits <= 7 else f"1 − {small(gap)}"


def count(value: int) -> str:
    """An integer with commas between thousands."""
    return f"{value:,}"


def listed(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""


def known(values: Iterable[Any]) -> list[float]:
    """The values that exist."""
    return [value for value in values if value is not None]


def compact(value: float | None) -> str:
    """As :func:`signed`; a value that three decimals would hide keeps its power of ten."""
    return signed(value) if value is None or value == 0 or abs(value) >= 0.001 else small(value)


def span(values: Sequence[float], form: Callable[[float | None], str] = compact) -> str:
    """``a to b`` from the smallest to the largest, or ``a`` where they read the same."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """``−0.548 (95 % interval −0.614 to −0.482)``."""
    if value is None:
        return "none"
    if low is None or high is None:
        return compact(value)
    return f"{compact(value)} (95 % interval {compact(low)} to {compact(high)})"


def blocks_named(numbers: Sequence[int]) -> str:
    """``block 3``; ``blocks 1, 3 to 5, 8``."""
    runs: list[list[int]] = []
    for each in numbers:
        if runs and runs[-1][-1] == each - 1:
            runs[-1].append(each)
        else:
            runs.append([each])
    parts = [
        f"{part[0]} to {part[-1]}" if len(part) > 2 else ", ".join(str(each) for each in part)
        for part in runs
    ]
    return f"{'block' if len(numbers) == 1 else 'blocks'} {', '.join(parts)}"


def short_site(site: str) -> tuple[str, str]:
    """``layers.3.mlp`` to ("3", ""), ``layers.3.self_attn.q_norm`` to ("3", "q"); others as they are."""
    match = re.search(r"layers\.(\d+)\.", site)
    norm = re.search(r"\.([qk])_norm$", site)
    return match[1] if match else site, norm[1] if norm else ""


def arrow(replaced: str, by: str) -> str:
    """``3 ← 7``: module 7 in the place of module 3; ``4 q ← k`` within a layer."""
    (here, own), (there, other) = short_site(replaced), short_site(by)
    if not own:
        return f"{here} ← {there}"
    return f"{here} {own} ← {other}" if here == there else f"{here} {own} ← {there} {other}"


def power_of_two(exponent: int) -> str:
    """``2`` with a superscript."""
    return f"2{str(exponent).translate(_SUPERSCRIPTS)}"


def study(summary: Mapping[str, Any]) -> str:
    """What is under study, where that is not the precision of the instrument; else nothing."""
    studied, instrument = summary.get("study"), summary.get("instrument")
    if studied is None or studied == instrument:
        return ""
    return f"Study: EP in {studied}, read by an {instrument} instrument"


def unfinished(run: RunData, reached: str) -> list[str]:
    """Why the run is not complete, for one that is not; ``reached`` says how far it came."""
    if run.status == "complete":
        return []
    because = f" ({run.reason.rstrip('.')})" if run.reason else ""
    sentences = {
        "running": f"This run is still going: the page shows it {reached}.",
        "interrupted": f"This run was interrupted and wrote no result: the page shows its journal, "
        f"which ends {reached}.",
        "failed": f"This run failed{because}: what it measured ends {reached}.",
    }
    stopped = f"This run was stopped{because}: what it measured ends {reached}."
    return [sentences.get(run.status, stopped)]


def contended(run: RunData, measured: str) -> list[str]:
    """That the machine was shared while the run went, if it was; ``measured`` names what does not mind."""
    cpu = run.provenance.get("cpu")
    cores = None
    if isinstance(cpu, Mapping):
        affinity = cpu.get("affinity")
        cores = len(affinity) if isinstance(affinity, list) and affinity else cpu.get("logical_cores")
    if not isinstance(cores, int) or cores < 1:
        return []
    # At the start nothing of the load is the run's own; at the end it may keep every core busy itself.
    found = []
    for key, when, limit in (("load_at_start", "began", 0.5), ("load_at_end", "ended", 1.25)):
        load = run.provenance.get(key)
        if isinstance(load, list) and load and isinstance(load[0], int | float) and load[0] > limit * cores:
            found.append(f"{number(load[0], 2)} when the run {when}")
    if not found:
        return []
    return [
        f"The machine was shared: on {cores} {'core' if cores == 1 else 'cores'}, the load average was "
        f"{listed(found)}. {measured} do not depend on it; timings do."
    ]
