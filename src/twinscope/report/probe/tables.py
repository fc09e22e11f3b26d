"""The tables of probes: products, the machine, several probes side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.probe.findings import part, products, shape
from twinscope.report.reading import RunData
from twinscope.report.tables import Cell, Table, given, integer, measured
from twinscope.report.wording import number, small


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (matmul(run), machine(run))
    return [table for table in found if table is not None]


def matmul(run: RunData) -> Table | None:
    """Every timed product."""
    rows = [
        (
            integer(row["shape"][0]),
            Cell(shape(row)),
            integer(row["threads"]),
            measured(1e3 * row["first_s"], small),
            Cell(", ".join(small(1e3 * value) for value in row["next_s"])),
            measured(row["gflop_per_s"], number, digits=1),
            measured(row["error"], small),
            measured(row["error_bound"], small),
            given(row, "peak_rss_mib", number, digits=0),
        )
        for row in products(run)
    ]
    if not rows:
        return None
    return Table(
        "matmul",
        "X @ W in fp32: milliseconds of the first call and the next, and the difference from float64",
        (
            "rows of X",
            "W",
            "threads",
            "first, ms",
            "next, ms",
            "GFLOP/s",
            "error",
            "rounding allows",
            "peak, MiB",
        ),
        (True, False, True, True, False, True, True, True, True),
        tuple(rows),
        "GFLOP/s are those of the best call after the first.",
    )


def machine(run: RunData) -> Table | None:
    """What the machine has; what it does not tell has its reason."""
    summary = run.summary
    if "cores" not in summary:
        return None
    memory, swap, disk, processor = (summary[key] for key in ("memory", "swap", "disk", "processor"))
    reading, conversion = summary["reading"], summary["conversion"]
    rows = [
        (Cell("cores this process can use"), integer(summary["cores"])),
        (Cell("processors of the machine"), integer(processor["logical"])),
        (Cell("memory, MiB"), measured(memory["total_mib"], number, digits=0)),
        (Cell("memory available, MiB"), measured(memory["available_mib"], number, digits=0)),
        (Cell("limit of the control group, MiB"), given(memory, "limit_mib", number, digits=0)),
        (Cell("swap, MiB"), measured(swap["total_mib"], number, digits=0)),
        (Cell("swap in use, MiB"), measured(swap["used_mib"], number, digits=0)),
        (Cell("disk free, MiB"), measured(disk["free_mib"], number, digits=0)),
        (Cell("read from the disk, MiB/s"), given(reading, "disk_mib_per_s", number, digits=0)),
        (Cell("read from memory, MiB/s"), given(reading, "cache_mib_per_s", number, digits=0)),
        (
            Cell("bf16 to fp32, million values/s"),
            measured(conversion["million_values_per_s"], number, digits=0),
        ),
    ]
    return Table("machine", "The machine", ("what", "value"), (False, True), tuple(rows))


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per probe: cores, memory, rates."""
    rows = [
        (
            Cell(name),
            Cell(run.status),
            integer(run.summary.get("cores")),
            measured((run.summary.get("memory") or {}).get("total_mib"), number, digits=0),
            measured(max((row["gflop_per_s"] for row in products(run)), default=None), number, digits=0),
            given(part(run, "reading") or _NOTHING, "disk_mib_per_s", number, digits=0),
            given(part(run, "reading") or _NOTHING, "cache_mib_per_s", number, digits=0),
            given(part(run, "conversion") or _NOTHING, "million_values_per_s", number, digits=0),
        )
        for name, run in runs.items()
    ]
    return Table(
        "probe-comparison",
        "The machines side by side; memory in MiB, reading in MiB/s, conversion in million values/s",
        ("run", "status", "cores", "memory", "GFLOP/s", "disk", "from memory", "bf16 to fp32"),
        (False,) * 2 + (True,) * 6,
        tuple(rows),
    )


_NOTHING: Mapping[str, Any] = {}
