"""What a probe says in sentences: what this machine holds and how fast it multiplies, reads and converts.

Covers the sentences; no drawing, no markup.
"""

from __future__ import annotations

from twinscope.report.reading import Row, RunData
from twinscope.report.wording import contended, count, listed, number, small, unfinished


def products(run: RunData) -> list[Row]:
    """The timed matrix products, fewest threads first."""
    found = [row for row in run.rows if row["kind"] == "matmul"]
    return sorted(found, key=lambda row: (row["threads"], row["shape"]))


def part(run: RunData, kind: str) -> Row | None:
    """The row of ``reading`` or ``conversion``."""
    return next((row for row in run.rows if row["kind"] == kind), None)


def shape(row: Row) -> str:
    """``2048 × 6144``, the shape of W."""
    return " × ".join(str(size) for size in row["shape"][1:])


def threads(row: Row) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{count(row['threads'])} {'thread' if row['threads'] == 1 else 'threads'}"


def outcome(run: RunData) -> str:
    """The best rate with each number of threads, and the memory of the process that multiplied."""
    found = products(run)
    if not found:
        return "No product was timed."
    best: dict[str, float] = {}
    for row in found:
        best[threads(row)] = max(row["gflop_per_s"], best.get(threads(row), 0.0))
    rates = listed([f"{number(rate, 0)} GFLOP/s with {name}" for name, rate in best.items()])
    text = f"This machine multiplies fp32 matrices at up to {rates}"
    peak = run.summary.get("peak_rss_mib")
    if peak is not None:
        text += f"; the process that held NumPy alone peaked at {number(peak, 0)} MiB"
    return f"{text}. It says nothing about any model."


def remarks(run: RunData) -> list[str]:
    """Reading and conversion, and what the first call costs."""
    found = []
    reading, conversion = part(run, "reading"), part(run, "conversion")
    if reading is not None:
        disk, cache = reading["disk_mib_per_s"], reading["cache_mib_per_s"]
        parts = [] if disk is None else [f"{number(disk, 0)} MiB/s from the disk"]
        parts += [] if cache is None else [f"{number(cache, 0)} MiB/s from memory"]
        if parts:
            found.append(f"A file is read at {listed(parts)}.")
        if disk is None:
            found.append(f"The disk's rate is not known: {reading['disk_mib_per_s_reason'].rstrip('.')}.")
    if conversion is not None:
        found.append(
            f"bf16 becomes fp32 at {number(conversion['million_values_per_s'], 0)} million values per second "
            f"with one thread, in pieces of {count(conversion['piece_values'])} values."
        )
    slow = [row for row in products(run) if row["first_s"] > 2 * min(row["next_s"], default=row["first_s"])]
    if slow:
        worst = max(slow, key=lambda row: row["first_s"] / min(row["next_s"]))
        times = small(worst["first_s"] / min(worst["next_s"]))
        found.append(f"A first call takes up to {times} times the best of the later ones.")
    return found


def warnings(run: RunData) -> list[str]:
    """Sentences that limit what the probe shows, the gravest first."""
    found = unfinished(run, "before the machine is described")
    quota = (run.summary.get("memory") or {}).get("limit_mib")
    if quota is not None:
        found.append(f"A control group limits this process to {number(quota, 0)} MiB of memory.")
    return [*found, *contended(run, "Sizes")]


def facts(run: RunData) -> list[str]:
    """Processor, cores, memory."""
    summary = run.summary
    if "cores" not in summary:
        return []
    return [
        str(summary["processor"]["model"]),
        f"{count(summary['cores'])} {'core' if summary['cores'] == 1 else 'cores'}",
        f"{number(summary['memory']['total_mib'] / 1024, 1)} GiB",
    ]
