"""What rows of a comparison say: no level without its grounds, verdicts, what is saved, claims."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from twinscope.lab.statistics import texts_needed
from twinscope.reuse.neurons.findings import findings
from twinscope.reuse.neurons.pairs import Direction, Pair, to_json
from twinscope.reuse.neurons.settings import NeuronSettings
from twinscope.reuse.neurons.stages import decide_needed

MARGIN, WIDTH, TEXTS = 0.05, 10, 6
QUIET = [0.001, -0.001, 0.002, -0.002, 0.0, 0.0]
LOUD = [0.31, 0.29, 0.3, 0.3, 0.31, 0.29]
PAIRS = [
    Pair(Direction((0, 1), (2, 3), -0.99, -2.0), Direction((2, 3), (0, 1), -0.98, -0.5), True, 1),
    Pair(Direction((2, 0), (2, 1), 0.97, 1.0), Direction((2, 1), (2, 0), 0.97, 1.0), True, 2),
    Pair(Direction((0, 1), (0, 2), 0.96, 1.0), Direction((0, 2), (0, 1), 0.96, 1.0), True, None),
    Pair(Direction((0, 4), (2, 5), 0.6, 1.0), Direction((2, 5), (0, 4), 0.7, 1.0), False, 3),
]
R2 = {0: [0.98, 0.96], 1: [0.94, 0.95], 2: [0.9, 0.9], 3: [0.4, 0.5]}


class Rows:
    """A study of journal rows alone."""

    def __init__(self, /, **changes: Any) -> None:
        weights = {"weights": "trained", "planted": False} | changes.pop("model", {})
        texts = [SimpleNamespace(split="calibration", ids=range(20))] * TEXTS
        texts += [SimpleNamespace(split="heldout", ids=range(20))] * TEXTS
        self.plan = SimpleNamespace(content={"margin": MARGIN, "model": weights}, texts=texts)
        self.settings = NeuronSettings(replaced=[1, 2])
        self.layers = {
            number: SimpleNamespace(layer=number, neurons=6, site=f"layers.{number}.mlp") for number in (0, 2)
        }
        self.lm = SimpleNamespace(
            width=WIDTH,
            module=lambda site: (None, {"gate_proj.weight": (f"{site}.gate",)}),
            files=SimpleNamespace(entry=lambda name: SimpleNamespace(nbytes=2 * 60, shape=(6, 10))),
        )
        self.run = SimpleNamespace(rows=[])
        deltas = {"best": QUIET, "random": LOUD, "zeroed": LOUD} | changes.pop("deltas", {})
        for split in ("calibration", "heldout"):
            for way in ("forward", "backward"):
                for count in (1, 2):
                    for stand in ("best", "random", "zeroed"):
                        given = deltas.get((way, count, stand), deltas.get((way, stand), deltas[stand]))
                        if split == "calibration":
                            given = [value - np.mean(given) for value in given]
                        self.keep(
                            {
                                "key": f"replacement/{split}/{way}/{count}/{stand}",
                                "split": split,
                                "way": way,
                                "stand": stand,
                                "pairs": count,
                                "texts": [f"{split}-{index}" for index in range(TEXTS)],
                                "nll": [3.0 + value for value in given],
                                "delta_nll": list(given),
                                "branch_error": [0.1] * TEXTS,
                            }
                        )
        for number in self.layers:
            self.keep(
                {
                    "key": f"search/{number}",
                    "layer": number,
                    "tokens": 120,
                    "best_layer": [2] * 6,
                    "best_neuron": [3] * 6,
                    "correlation": [0.5, -0.99, 0.2, 0.1, 0.3, 0.999],
                    "scale": [1.0] * 6,
                    "energy": [1.0] * 6,
                    "silent": [4, 5],
                    "dead": [5],
                }
            )
            for first in (0, 5):
                maxima = [0.5 + 0.01 * (first + at) + 0.001 * number for at in range(5)]
                self.keep({"key": f"null/{number}/{first}", "maxima": maxima})
        rows = {
            "pairs-decided": {
                "threshold": 0.8,
                "pairs": [to_json(pair) for pair in PAIRS],
                "identical": [True, False, False, False],
            },
            "confirmed": {"pairs": [[[r2, 0.01] for r2 in R2[index]] for index in range(len(PAIRS))]},
            "self": {"largest_change": 0.0, "branch_error": 0.0},
            "analytic": {"entries": []},
            "residuals/heldout": {"nll": [3.0] * TEXTS},
        } | changes
        for key, row in rows.items():
            self.keep({"key": key, **row})

    def keep(self, row: dict[str, Any]) -> None:
        self.run.rows.append(row)

    def find(self, key: str) -> dict[str, Any] | None:
        return next((row for row in self.run.rows if row["key"] == key), None)

    def row(self, key: str) -> dict[str, Any]:
        found = self.find(key)
        assert found is not None, key
        return found


def judged(
    parity: bool = True, sealed: bool = True, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    study: Any = Rows(**changes)
    decide_needed(study, PAIRS)
    summary, claims, _ = findings(study, PAIRS, parity, sealed)
    return summary, claims


def levels(summary: dict[str, Any]) -> list[str]:
    return [entry["level"] for entry in summary["duplicates"]] + [entry["level"] for entry in summary["sets"]]


def test_replaced_both_ways_within_the_margin_is_an_intervention():
    summary, claims = judged()
    # Of the three duplicates one shares a neuron, so it is in no set and was never replaced.
    assert [entry["id"] for entry in summary["duplicates"]] == [pair.id for pair in PAIRS[:3]]
    assert levels(summary) == ["intervention", "intervention", "candidate", "intervention", "intervention"]
    assert summary["level"] == "intervention"
    assert [entry["zeroed_alike"] for entry in summary["sets"]] == [False, False]
    alone, together = (entry["reason"].rpartition("; ")[2] for entry in summary["duplicates"][:2])
    assert alone == "replaced by each other, the loss keeps to the margin"
    assert together == "with the 2 best pairs replaced, the loss keeps to the margin"
    assert [claim["level"] for claim in claims] == ["candidate", "intervention", "intervention"]
    assert "general capability" in claims[1]["does_not_support"]


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("loss", [LOUD, [0.06, -0.06, 0.3, -0.3, 0.05, 0.0]])
def test_one_direction_never_hides_the_other(way, loss):
    summary, claims = judged(deltas={(way, 1, "best"): loss, (way, 2, "best"): loss})
    assert set(levels(summary)) == {"candidate"}
    assert f"replacement in the direction {way}, which failed" in claims[1]["does_not_support"]
    # A set that fails does not take from a larger one that passes, nor give to it.
    summary, _ = judged(deltas={(way, 2, "best"): loss})
    assert levels(summary) == ["intervention", "candidate", "candidate", "intervention", "candidate"]


@pytest.mark.parametrize(
    ("ground", "level", "words"),
    [
        ({"model": {"weights": "random"}}, "parity", "the weights are random, so the pair stays below"),
        ({"model": {"weights": "random", "planted": True}}, "parity", "the weights are random"),
        ({"parity": False}, "capacity", "parity was not shown"),
        ({"sealed": False}, "parity", "the seal of the plan is broken"),
        ({"self": {"largest_change": 1e-9, "branch_error": 0.0}}, "candidate", "held-out R² at least"),
        ({"self": {"largest_change": 0.0, "branch_error": 1e-9}}, "candidate", "held-out R² at least"),
    ],
)
def test_no_level_without_its_ground(ground, level, words):
    summary, claims = judged(**ground)
    assert set(levels(summary)) == {level}
    assert summary["level"] == level
    assert {claim["level"] for claim in claims} == {level}
    assert all(words in entry["reason"] for entry in summary["duplicates"])
    assert summary["instrument"]["passed"] == ("self" not in ground)
    warned = [text for text in summary["warnings"] if "replaced by themselves changed the loss" in text]
    assert len(warned) == ("self" in ground)


def test_a_set_with_a_pair_that_is_not_confirmed_is_no_candidate():
    weaker = R2 | {1: [0.99, 0.49]}
    summary, _ = judged(confirmed={"pairs": [[[r2, 0.01] for r2 in weaker[index]] for index in range(4)]})
    assert [entry["id"] for entry in summary["duplicates"]] == [PAIRS[0].id, PAIRS[2].id]
    assert [entry["level"] for entry in summary["sets"]] == ["intervention", "parity"]
    assert summary["sets"][1]["reason"].startswith("1 of 2 pairs are confirmed duplicates")
    silent = R2 | {0: [None, 0.9]}
    study: Any = Rows(confirmed={"pairs": [[[r2, None] for r2 in silent[index]] for index in range(4)]})
    decide_needed(study, PAIRS)
    _, _, rows = findings(study, PAIRS, True, True)
    match = next(row for row in rows if row["key"] == f"match/{PAIRS[0].id}")
    assert (match["confirmed"], match["level"]) == (False, "parity")
    assert match["reason"] == "the smaller R² is none on held-out text, where 0.5 is the least"
    assert match["directions"][0]["r2_heldout_reason"] == "the neuron is zero on all held-out tokens"
    assert match["directions"][1]["branch_error_reason"]
    last = next(row for row in rows if row["key"] == f"match/{PAIRS[3].id}")
    assert last["reason"].startswith(
        "the weaker correlation is 0.600 on calibration text, where more than 0.8"
    )


def test_planted_copies_and_harmless_neurons_are_said_to_be_so():
    summary, claims = judged(model={"weights": "trained", "planted": True}, deltas={"zeroed": QUIET})
    assert summary["level"] == "intervention"
    assert all("copies were planted" in claim["does_not_support"] for claim in claims)
    assert [entry["zeroed_alike"] for entry in summary["sets"]] == [True, True]
    assert all("setting them to zero keeps it" in claim["does_not_support"] for claim in claims[1:])
    # Harmless one way only is not harmless.
    summary, _ = judged(deltas={("forward", "zeroed"): QUIET})
    assert [entry["zeroed_alike"] for entry in summary["sets"]] == [False, False]


def test_intervals_verdicts_and_needed_texts_are_those_of_the_method():
    summary, _ = judged()
    by_place = {(item["pairs"], item["way"], item["stand"]): item for item in summary["replaced"]}
    assert len(by_place) == 12
    best, zero = by_place[1, "forward", "best"], by_place[2, "backward", "zeroed"]
    half = stats.t.ppf(0.975, TEXTS - 1) * np.std(QUIET, ddof=1) / np.sqrt(TEXTS)
    assert best["low"] == pytest.approx(np.mean(QUIET) - half)
    assert best["high"] == pytest.approx(np.mean(QUIET) + half)
    assert best["high_90"] < best["high"]
    assert (best["verdict"], zero["verdict"]) == ("equivalent", "different")
    assert best["needed"] == texts_needed(float(np.std(QUIET, ddof=1)), MARGIN)
    assert zero["delta_nll"] == pytest.approx(np.mean(LOUD))
    assert zero["delta_nll_calibration"] == pytest.approx(0, abs=1e-12)
    wide = [0.3, -0.3, 0.2, -0.2, 0.1, -0.1]
    summary, _ = judged(deltas={"best": wide})
    assert {item["verdict"] for item in summary["replaced"] if item["stand"] == "best"} == {"underpowered"}
    assert {item["needed"] for item in summary["replaced"] if item["stand"] == "best"} == {
        texts_needed(float(np.std(wide, ddof=1)), MARGIN)
    }
    endless = [1e6, -1e6, 1e6, -1e6, 1e6, -1e6]
    summary, _ = judged(deltas={"best": endless})
    assert summary["replaced"][0]["needed"] is None
    assert summary["replaced"][0]["verdict"] == "underpowered"


def test_what_the_summary_counts():
    summary, _ = judged()
    assert summary["null_max_correlation"] == pytest.approx(0.5 + 0.09 + 0.002)
    assert summary["null"]["threshold"] == 0.8
    # Gate and up across layers, the output vector as well within one; two bytes a value.
    assert [(entry["parameters"], entry["bytes"]) for entry in summary["sets"]] == [
        (2 * WIDTH, 4 * WIDTH),
        (5 * WIDTH, 10 * WIDTH),
    ]
    first, second = summary["layers"]
    assert (first["beyond_null"], first["confirmed"], first["dead"]) == (2, 2, 2)
    assert (second["beyond_null"], second["confirmed"]) == (3, 3)
    assert first["largest_correlation"] == 0.99
    assert first["median_correlation"] == pytest.approx(0.35)
    assert summary["analytic"] == [
        {
            "kind": "dead",
            "layers": [number],
            "neurons": 1,
            "examples": [f"layers.{number}.mlp.4"],
            "detail": "they add next to nothing on calibration text, though their weights could",
        }
        for number in (0, 2)
    ]
    assert summary["tokens"] == {"calibration": 114, "heldout": 114}
    assert summary["skipped"] == 1
    assert [text.partition(",")[0] for text in summary["warnings"]] == [
        "114 calibration tokens",
        "114 heldout tokens",
        "the plan fixes 2 layers",
    ]
    assert summary["nll"] == 3.0
    assert summary["perplexity"] == pytest.approx(np.exp(3.0))


def test_needed_texts_are_written_down_once():
    study: Any = Rows()
    decide_needed(study, PAIRS)
    decide_needed(study, PAIRS)
    assert [row["key"] for row in study.run.rows].count("calibration-decided") == 1
