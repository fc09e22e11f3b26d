"""The tables of swaps: directions with verdicts, measures, nulls, texts, and a sweep's sites and pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinscope.report.reading import RunData
from twinscope.report.swap.findings import directions, entries, is_sweep, kind_name, kinds, null_name
from twinscope.report.tables import Cell, Table, given, integer, measured
from twinscope.report.trust import weights_cell
from twinscope.report.wording import compact, number, small

#: Of a sweep the table of pairs has the mildest; all are in the figure's CSV.
_MOST_PAIRS = 60


def tables(run: RunData) -> list[Table]:
    """The tables that the run has data for, in the order of the report."""
    found = (verdicts(run), measures(run), nulls(run), texts(run), sites(run), pairs(run))
    return [table for table in found if table is not None]


def verdicts(run: RunData) -> Table | None:
    """Each direction: its change with both intervals, the verdict, texts, level and reason."""
    rows = [
        (
            Cell(part["replaced"]),
            Cell(part["by"]),
            *(measured(part[key], compact) for key in ("delta_nll", "low", "high", "low_90", "high_90")),
            Cell(part["verdict"] or "–", None, part.get("verdict_reason")),
            integer(part["texts"]),
            integer(part["needed"]),
            measured(part["calibration_delta_nll"], compact),
            measured(part["calibration_sd"], small),
            Cell(part["level"]),
            Cell(part["reason"]),
        )
        for part in directions(run)
    ]
    if not rows:
        return None
    margin = f"{run.summary['margin']:g}"
    return Table(
        "swap-verdicts",
        f"Each direction on held-out text, judged against a margin of ±{margin} nats per token",
        (
            "replaced",
            "by",
            "change",
            "95 % low",
            "high",
            "90 % low",
            "high",
            "verdict",
            "texts",
            "needed",
            "on calibration",
            "spread there",
            "level",
            "why",
        ),
        (False, False, *[True] * 5, False, *[True] * 4, False, False),
        tuple(rows),
        f"Intervals over texts: {directions(run)[0]['method']}. Needed: texts with which no true change is "
        f"found equivalent with a power of {number(run.summary['power'], 1)}, by the spread on calibration.",
    )


def measures(run: RunData) -> Table | None:
    """Each direction: loss, perplexity and bits per byte before and after, divergence, what it would save."""
    rows = []
    for part in directions(run):
        saved = part["saved"]
        rows.append(
            (
                Cell(part["replaced"]),
                Cell(part["by"]),
                *(given(part, key, number, digits=4) for key in ("nll_before", "nll_after")),
                *(given(part, key, number, digits=2) for key in ("perplexity_before", "perplexity_after")),
                *(
                    given(part, key, number, digits=4)
                    for key in ("bits_per_byte_before", "bits_per_byte_after")
                ),
                *(given(part, key, small) for key in ("logit_js", "logit_js_worst")),
                *(given(part, f"logit_topk_{k}", number, digits=3) for k in (1, 5, 10)),
                measured(part["worst"]["delta_nll"], compact),
                Cell(part["worst"]["text"]),
                integer(saved["parameters"]),
                measured(saved["bytes"] / 2**20, number, digits=2),
            )
        )
    if not rows:
        return None
    return Table(
        "swap-measures",
        "The model as it is and with the replacement, over all predicted held-out tokens",
        (
            "replaced",
            "by",
            "nats",
            "after",
            "perplexity",
            "after",
            "bits per byte",
            "after",
            "next token, bits",
            "worst text",
            "top 1",
            "top 5",
            "top 10",
            "worst change",
            "on text",
            "parameters",
            "MiB",
        ),
        (False, False, *[True] * 12, False, True, True),
        tuple(rows),
        "Last, the parameters that the replacement would leave unused: stated, never a condition. "
        f"{run.summary.get('bytes_counted', '')}",
    )


def nulls(run: RunData) -> Table | None:
    """Every null of every direction over the held-out texts."""
    rows = [
        (
            Cell(part["replaced"]),
            Cell(null_name(null["null"], True)),
            *(measured(null[key], compact) for key in ("delta_nll", "low", "high")),
            given(null, "logit_js", small),
            *(given(null, f"logit_topk_{k}", number, digits=3) for k in (1, 5, 10)),
        )
        for part in directions(run)
        for null in part["nulls"]
    ]
    if not rows:
        return None
    return Table(
        "swap-nulls",
        "What else was put in the place of the module: change of the loss with its 95 % interval",
        ("replaced", "by", "change", "low", "high", "next token, bits", "top 1", "top 5", "top 10"),
        (False, False, *[True] * 7),
        tuple(rows),
        "The module itself has to give exactly 0.",
    )


def texts(run: RunData) -> Table | None:
    """Each direction on each text."""
    rows = [
        (
            Cell(row["replaced"]),
            Cell(row["by"]),
            Cell("held-out" if row["split"] == "heldout" else row["split"]),
            Cell(row["text"]),
            integer(row["tokens"]),
            integer(row["bytes"]),
            *(measured(row[key], number, digits=4) for key in ("nll_before", "nll")),
            measured(row["delta_nll"], compact),
            # Without reasons: what calibration text does not have is the same on every row.
            measured(row["logit_js"], small),
            measured(row["logit_topk_1"], number, digits=3),
        )
        for row in run.rows
        if row.get("mode") == "pair"
    ]
    if not rows:
        return None
    return Table(
        "swap-texts",
        "Each direction on each text",
        (
            "replaced",
            "by",
            "texts",
            "text",
            "tokens",
            "bytes",
            "nats",
            "after",
            "change",
            "next token, bits",
            "top 1",
        ),
        (False,) * 4 + (True,) * 7,
        tuple(rows),
    )


def sites(run: RunData) -> Table | None:
    """Of a sweep: every site with its best and worst substitute, and with no update at all."""
    rows = []
    for kind in kinds(run):
        zero = {part["site"]: part for part in kind["zero"]}
        for site in kind["sites"]:
            mine = sorted(
                (entry for entry in entries(kind) if entry.replaced == site),
                key=lambda entry: entry.delta_nll,
            )
            none: Mapping[str, Any] = zero.get(site, {})
            rows.append(
                (
                    Cell(kind_name(kind["kind"])),
                    Cell(site),
                    Cell(mine[0].by),
                    *(measured(value, compact) for value in (mine[0].delta_nll, mine[0].low, mine[0].high)),
                    Cell(mine[0].verdict or "–", None, kind.get("verdict_reason")),
                    *(measured(none.get(key), compact) for key in ("delta_nll", "low", "high")),
                    Cell(mine[-1].by),
                    measured(mine[-1].delta_nll, compact),
                    integer(sum(entry.verdict == "equivalent" for entry in mine)),
                )
            )
    if not rows:
        return None
    return Table(
        "sweep-sites",
        "Every site: its best substitute, no update at all, its worst substitute; with 95 % intervals",
        (
            "kind",
            "replaced",
            "best by",
            "change",
            "low",
            "high",
            "verdict",
            "left out",
            "low",
            "high",
            "worst by",
            "change",
            "equivalent",
        ),
        (False, False, False, True, True, True, False, True, True, True, False, True, True),
        tuple(rows),
        "Intervals are of single changes; the verdict is corrected for the number of pairs.",
    )


def pairs(run: RunData) -> Table | None:
    """Of a sweep: the replacements that change the loss least."""
    if not is_sweep(run):
        return None
    every = [(kind["kind"], entry) for kind in kinds(run) for entry in entries(kind)]
    every.sort(key=lambda item: abs(item[1].delta_nll))
    rows = [
        (
            Cell(kind_name(name)),
            Cell(entry.replaced),
            Cell(entry.by),
            *(
                measured(value, compact)
                for value in (entry.delta_nll, entry.low, entry.high, entry.low_all, entry.high_all)
            ),
            measured(entry.p_holm, small),
            Cell(entry.verdict or "–"),
            Cell(entry.verdict_alone or "–"),
            integer(entry.needed),
        )
        for name, entry in every[:_MOST_PAIRS]
    ]
    if not rows:
        return None
    more = (
        "" if len(every) <= _MOST_PAIRS else f"The {_MOST_PAIRS} mildest; all are in the figures' CSV files. "
    )
    return Table(
        "sweep-pairs",
        "Replacements, the mildest first: change with 95 % intervals, alone and for all pairs at once",
        (
            "kind",
            "replaced",
            "by",
            "change",
            "low",
            "high",
            "low, all",
            "high, all",
            "p",
            "verdict",
            "alone",
            "needed",
        ),
        (False, False, False, *[True] * 6, False, False, True),
        tuple(rows),
        f"{more}p: Holm's adjusted p-value of a change within the margin. Alone: the verdict if this had "
        "been the only pair. Needed: texts with which no true change is found equivalent in spite of the "
        "correction.",
    )


def comparison(runs: Mapping[str, RunData]) -> Table:
    """One row per direction of each swap, or per kind of each sweep."""
    rows = []
    for name, run in runs.items():
        texts = (run.summary.get("texts") or {}).get("heldout")
        start = (
            Cell(name),
            Cell(run.status),
            Cell(str(run.summary.get("model", "–"))),
            Cell(weights_cell(run.summary)),
            integer(texts),
        )
        before = len(rows)
        for part in directions(run):
            change = (measured(part[key], compact) for key in ("delta_nll", "low", "high"))
            rows.append(
                (*start, Cell(part["direction"]), *change, Cell(part["verdict"] or "–"), Cell(part["level"]))
            )
        for kind in kinds(run):
            best = min(entries(kind), key=lambda entry: abs(entry.delta_nll))
            within = sum(entry.verdict == "equivalent" for entry in entries(kind))
            rows.append(
                (
                    *start,
                    Cell(f"{kind['kind']}: mildest {best.replaced} <- {best.by}"),
                    *(measured(value, compact) for value in (best.delta_nll, best.low, best.high)),
                    Cell(f"{within} of {kind['pairs']} equivalent"),
                    Cell(str(run.summary["level"])),
                )
            )
        if len(rows) == before:
            rows.append((*start, *[Cell("–")] * 6))
    return Table(
        "swap-comparison",
        "The swaps side by side: change of the held-out loss in nats per token, with its 95 % interval",
        (
            "run",
            "status",
            "model",
            "weights",
            "texts",
            "replacement",
            "change",
            "low",
            "high",
            "verdict",
            "level",
        ),
        (False,) * 4 + (True, False) + (True,) * 3 + (False,) * 2,
        tuple(rows),
    )
