"""How often the verdict on a replacement errs: simulated at 4, 16 and 64 texts, beside exact probabilities.

What is simulated is the whole procedure: a calibration sample sets how many texts are needed, an independent
held-out sample of the same size is judged by ``lab.statistics.equivalence_verdict``. The margin is 1. The
spread over texts is the one for which there are just as many texts as needed for power 0.8, half of it, or
twice it. Differences are normal, heavy-tailed (t with 3 degrees of freedom) or skewed (exponential, with the
long tail to the worse or to the better side), all with that spread.

For normal differences below 30 texts every probability has a closed form, and a simulated rate that
contradicts it stops the script. Writes results/verdict_rates.json, and the figure under docs/results/.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter
from scipy import stats

from twinscope.lab.draws import generator
from twinscope.lab.provenance import close, collect
from twinscope.lab.statistics import (
    SMALL_SAMPLE,
    Verdict,
    equivalence_verdict,
    paired_interval,
    texts_needed,
    tost_power,
)
from twinscope.report.drawing import PALETTE, PANEL_WIDTH, Panel, Plot, plot_files
from twinscope.report.lanes import LANE, NAME, SMALL_TEXT, key, panel_height, prepare, write_lane, write_name

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "verdict_rates.json"
FIGURE = HERE.parent / "docs" / "results" / "verdict-rates"

MARGIN, POWER = 1.0, 0.8
TEXTS = (4, 16, 64)
#: name: spread over the one for which just as many texts are needed as there are.
SPREADS = {"ample": 0.5, "enough": 1.0, "too few": 2.0}
#: True differences, in margins.
DIFFERENCES = (0.0, 1.0, 2.0)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
#: Family-wise chance that a correct simulation is stopped for contradicting a closed form.
FALSE_ALARM = 1e-4
#: Trials of every case that are also judged by the function itself, from the differences.
CHECKED = 20
SEED = 0


def draw_noise(shape: str, rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Noise ``size`` float64 of mean 0 and variance 1; skewness 0, 0, 2 and −2."""
    if shape == "normal":
        return rng.normal(size=size)
    if shape == "heavy-tailed":
        return rng.standard_t(3, size=size) / math.sqrt(3.0)
    skewed = rng.exponential(size=size) - 1.0
    return skewed if shape == "skewed to worse" else -skewed


SHAPES = ("normal", "heavy-tailed", "skewed to worse", "skewed to better")


@cache
def largest_spread(texts: int) -> float:
    """The largest spread for which ``texts`` texts are as many as needed, to 1e-12 of it."""
    low, high = 1e-3, 1e3
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if tost_power(texts, middle, MARGIN) >= POWER else (low, middle)
    return low


def intervals(noise: np.ndarray) -> np.ndarray:
    """Both intervals of every trial of ``noise (trials, n)``: ``(trials, 4)``, 95 % low and high, then 90 %.

    Intervals move and stretch with the differences, so one pair serves every spread and true difference.
    """
    found = np.empty((len(noise), 4))
    for trial, row in enumerate(noise):
        wide, narrow = paired_interval(row, 0.95, seed=trial), paired_interval(row, 0.90, seed=trial)
        found[trial] = wide.low, wide.high, narrow.low, narrow.high
    return found


def judged(ends: np.ndarray, enough: np.ndarray) -> np.ndarray:
    """Index into VERDICTS (trials,) from intervals (trials, 4) and whether texts are enough (trials,)."""
    different = (ends[:, 0] > MARGIN) | (ends[:, 1] < -MARGIN)
    inside = (ends[:, 2] > -MARGIN) & (ends[:, 3] < MARGIN)
    given = {"different": different, "underpowered": ~enough, "equivalent": inside}
    return np.select(
        list(given.values()), [VERDICTS.index(word) for word in given], VERDICTS.index("inconclusive")
    )


def exact_rates(texts: int, spread: float, difference: float) -> dict[str, float]:
    """The probability of each verdict for normal differences, Student's intervals and two samples of n.

    ``different``: a noncentral t beyond its 97.5 % quantile, on either side. ``equivalent``: ``tost_power``;
    the two exclude each other. Whether texts are as many as needed hangs on the calibration sample alone:
    (n − 1)s²/σ² is χ² with n − 1 degrees of freedom.
    """
    dof, scale = texts - 1, math.sqrt(texts) / spread
    quantile = stats.t.ppf(0.975, dof)
    different = stats.nct.sf(quantile, dof, (difference - MARGIN) * scale)
    different += stats.nct.sf(quantile, dof, -(difference + MARGIN) * scale)
    equivalent = tost_power(texts, spread, MARGIN, difference)
    short = stats.chi2.sf(dof * (largest_spread(texts) / spread) ** 2, dof)
    return {
        "different": float(different),
        "underpowered": float((1 - different) * short),
        "equivalent": float((1 - short) * equivalent),
        "inconclusive": float((1 - short) * (1 - different - equivalent)),
    }


def simulate(texts: int, shape: str, trials: int) -> list[dict[str, Any]]:
    """A row for every spread and true difference: rates of verdicts with 95 % Clopper–Pearson intervals.

    Raises:
        AssertionError: the fast judgement and ``equivalence_verdict`` disagree.
    """
    rng = generator(SEED, f"verdict rates {shape}", texts)
    heldout, calibration = (draw_noise(shape, rng, (trials, texts)) for _ in range(2))
    unit, measured = intervals(heldout), calibration.std(axis=1, ddof=1)
    most = largest_spread(texts)
    rows = []
    for name, share in SPREADS.items():
        spread = share * most
        enough = spread * measured <= most
        for difference in DIFFERENCES:
            words = judged(spread * unit + difference, enough)
            for trial in range(min(CHECKED, trials)):
                needed = texts_needed(float(spread * measured[trial]), MARGIN, POWER)
                said = equivalence_verdict(spread * heldout[trial] + difference, MARGIN, needed, seed=trial)
                assert VERDICTS[words[trial]] == said, (texts, shape, name, difference, trial)
            closed = shape == "normal" and texts < SMALL_SAMPLE
            exact = exact_rates(texts, spread, difference) if closed else None
            rows.append(
                {
                    "texts": texts,
                    "shape": shape,
                    "spread": name,
                    "sd": spread,
                    "needed": texts_needed(spread * (1 - 1e-9), MARGIN, POWER),
                    "difference": difference,
                    "trials": trials,
                    "verdicts": {
                        word: _rate(
                            int(np.count_nonzero(words == place)),
                            trials,
                            None if exact is None else exact[word],
                        )
                        for place, word in enumerate(VERDICTS)
                    },
                }
            )
    return rows


def _rate(found: int, trials: int, exact: float | None) -> dict[str, float | None]:
    interval = stats.binomtest(found, trials).proportion_ci(0.95, "exact")
    # A sum of products of probabilities may end a rounding outside [0, 1].
    exact = None if exact is None else min(1.0, max(0.0, exact))
    return {
        "rate": found / trials,
        "low": float(interval.low),
        "high": float(interval.high),
        "exact": exact,
        "p_value": None if exact is None else float(stats.binomtest(found, trials, exact).pvalue),
    }


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How simulated rates agree with the closed forms: number of rates, smallest p-value, largest gap.

    Raises:
        AssertionError: a rate contradicts its closed form at FALSE_ALARM over all of them.
    """
    compared = [rate for row in rows for rate in row["verdicts"].values() if rate["exact"] is not None]
    smallest = min(rate["p_value"] for rate in compared)
    assert smallest >= FALSE_ALARM / len(compared), (
        f"a simulated rate contradicts its closed form: {smallest:g}"
    )
    return {
        "compared": len(compared),
        "smallest_p_value": smallest,
        "least_allowed": FALSE_ALARM / len(compared),
        "largest_gap": max(abs(rate["rate"] - rate["exact"]) for rate in compared),
    }


def is_error(verdict: str, difference: float) -> bool:
    """Whether the verdict states something false: equivalent without being inside the margin, or different
    without being outside it. A difference of exactly the margin is neither."""
    if verdict == "equivalent":
        return abs(difference) >= MARGIN
    return verdict == "different" and abs(difference) <= MARGIN


def errors(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each number of texts and shape, the largest rate of each false statement and where it occurs."""
    found = []
    for texts in TEXTS:
        for shape in SHAPES:
            mine = [row for row in rows if row["texts"] == texts and row["shape"] == shape]
            for verdict in ("equivalent", "different"):
                worst = max(
                    (row for row in mine if is_error(verdict, row["difference"])),
                    key=lambda row, verdict=verdict: row["verdicts"][verdict]["rate"],
                )
                rate = worst["verdicts"][verdict]
                found.append(
                    {
                        "texts": texts,
                        "shape": shape,
                        "verdict": verdict,
                        "difference": worst["difference"],
                        "spread": worst["spread"],
                        **{key: rate[key] for key in ("rate", "low", "high")},
                    }
                )
    return found


# ------------------------------------------------------------------------------------------------- the figure

#: In the order of a bar: what is claimed stands at its ends and stands out.
_COLOURS = {
    "equivalent": PALETTE["arm-1"][0],
    "inconclusive": PALETTE["rule"][0],
    "underpowered": PALETTE["grid"][0],
    "different": PALETTE["arm-2"][0],
}
_SHORT = {
    "normal": "normal",
    "heavy-tailed": "t, 3 dof",
    "skewed to worse": "skew +",
    "skewed to better": "skew −",
}
_SHOWN = ("ample", "enough")


def figure(record: Mapping[str, Any]) -> Plot:
    """The stacked rates of the cases with texts enough: a panel for each number of texts and spread."""
    rows = record["rows"]
    height = panel_height([[len(SHAPES)] * len(DIFFERENCES)], len(_COLOURS))
    panels = []
    for texts in TEXTS:
        for spread in _SHOWN:
            mine = [row for row in rows if row["texts"] == texts and row["spread"] == spread]
            words = " ".join(
                f"{row['shape']}, true difference {row['difference']:g} margins: "
                + ", ".join(f"{word} {rate['rate']:.3f}" for word, rate in row["verdicts"].items())
                + "."
                for row in mine
            )
            title = f"{texts} texts, {mine[0]['needed']} needed"
            panels.append(Panel(title, words, partial(draw_rates, mine, height)))
    columns = ("texts", "spread", "sd", "needed", "shape", "difference")
    measures = ("rate", "low", "high", "exact")
    return Plot(
        name="verdict-rates",
        title="How often each verdict is given",
        reading="",
        panels=tuple(panels),
        columns=(*columns, "verdict", *measures),
        rows=tuple(
            (*(row[key] for key in columns), word, *(rate[key] for key in measures))
            for row in rows
            for word, rate in row["verdicts"].items()
        ),
        size=(PANEL_WIDTH, height),
    )


def draw_rates(rows: Sequence[Mapping[str, Any]], height: int, axes: Axes) -> None:
    """A stacked bar for each true difference and shape; the share of false verdicts is written beside it."""
    place = prepare(axes, height, len(_COLOURS))
    axes.set_xlim(0, 1.27)
    axes.set_xlabel("share of trials; false verdicts in per cent")
    axes.xaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for difference in DIFFERENCES:
        name = "none" if difference == 0 else "the margin" if difference == 1 else f"{difference:g} margins"
        write_name(axes, place, f"true difference: {name}", "")
        place += NAME
        for shape in SHAPES:
            row = next(row for row in rows if row["difference"] == difference and row["shape"] == shape)
            write_lane(axes, place + LANE / 2, _SHORT[shape])
            left, false = 0.0, []
            for word, colour in _COLOURS.items():
                rate = row["verdicts"][word]["rate"]
                axes.barh(place + LANE / 2, rate, 0.76 * LANE, left=left, color=colour, linewidth=0)
                left += rate
                if is_error(word, difference):
                    false.append(f"{100 * rate:.1f}")
            axes.annotate(
                " + ".join(false),
                (1.265, place + LANE / 2),
                # By the offset: a text right of 1 would count as the label of a line.
                xytext=(0, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                color=PALETTE["alert"][0],
                size=SMALL_TEXT,
            )
            place += LANE
    key(axes, {word: {"color": colour, "linewidth": 7.0} for word, colour in _COLOURS.items()})


# ------------------------------------------------------------------------------------------------- the script


def draw(record: Mapping[str, Any]) -> None:
    """Write the figure of a record."""
    FIGURE.mkdir(exist_ok=True)
    (FIGURE / "verdict-rates.png").write_bytes(plot_files(figure(record))["verdict-rates.png"])


def main() -> None:
    """Simulate, compare, print the largest errors, and write the record and its figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--trials",
        type=int,
        default=10_000,
        help="trials of every case, a fifth of them from 30 texts on (default 10000)",
    )
    parser.add_argument("--figure", action="store_true", help="draw the record that is there, and no more")
    options = parser.parse_args()
    if options.figure:
        draw(json.loads(RESULTS.read_text()))
        return
    compute = {"device": "cpu", "threads": 1, "precision": "fp64"}
    provenance = collect(seeds=[SEED], data={}, compute=compute)
    rows = []
    for texts in TEXTS:
        for shape in SHAPES:
            # From 30 texts on each trial takes two bootstraps.
            share = 1 if texts < SMALL_SAMPLE else 5
            rows += simulate(texts, shape, -(-options.trials // share))
            print(f"{texts} texts, {shape}: done", flush=True)
    record = {
        "benchmark": "verdict_rates",
        "margin": MARGIN,
        "power": POWER,
        "trials": options.trials,
        "closed_forms": compare(rows),
        "largest_errors": errors(rows),
        "rows": rows,
        "provenance": close(provenance),
    }
    for worst in record["largest_errors"]:
        print(
            f"{worst['texts']} texts, {worst['shape']}: {worst['verdict']} at {worst['difference']:g} "
            f"margins in {100 * worst['rate']:.2f} % [{100 * worst['low']:.2f}, "
            f"{100 * worst['high']:.2f}], spread {worst['spread']}"
        )
    print(f"closed forms: {record['closed_forms']}")
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    draw(record)


if __name__ == "__main__":
    main()
