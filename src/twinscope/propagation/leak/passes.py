"""The units of work of one leak measurement, each a row under its key.

Covers the self-test, the choice of beta, the reference of a batch (pass 1), the arms of a batch (pass 2) and
the Gram tables of arms whose vectors are kept. A row that is there already is not measured again, except
where the vectors behind it are needed: what is repeated must come out the same, which the ledger checks.

Memory: J copies of the blocks' parameters for the reference, in a scratch file beyond the budget, and J for
each arm that still fits the budget. Scalars aside, nothing else grows with the number of arms or batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from twinscope.lab.errors import RunFailed
from twinscope.lab.statistics import ratio_jackknife
from twinscope.models.decoder import Decoder
from twinscope.propagation.gradients import parameter_names
from twinscope.propagation.leak.block_vectors import GroupMeans, gram, sizes
from twinscope.propagation.leak.config import LeakSettings
from twinscope.propagation.leak.paired import (
    Batch,
    arm_vectors,
    beta_for,
    compare,
    reference_vectors,
    safe_displacement,
)
from twinscope.propagation.leak.selftest import self_test
from twinscope.propagation.leak.spectrum import Arm, Tables, intervals
from twinscope.propagation.nudged import begin, unit_ratios
from twinscope.propagation.phases import state_dtype
from twinscope.propagation.settings import EPSettings

Row = dict[str, Any]

MIB = 1024.0 * 1024.0


class Ledger:
    """Rows of finished work by key; ``keep`` stores a row for good and refuses one that differs."""

    def __init__(self, rows: Iterable[Row] = (), keep: Callable[[Row], None] | None = None) -> None:
        self._rows = {row["key"]: row for row in rows}
        self._keep = keep

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __getitem__(self, key: str) -> Row:
        return self._rows[key]

    def add(self, row: Row) -> Row:
        """Store ``row`` and return the one that stands under its key."""
        if self._keep is not None:
            self._keep(row)
        return self._rows.setdefault(row["key"], row)


class Bench:
    """What is under the instrument, and the rows read so far."""

    def __init__(
        self,
        model: Decoder,
        batches: Sequence[Batch],
        settings: EPSettings,
        leak: LeakSettings,
        ledger: Ledger,
    ) -> None:
        self.model, self.batches, self.settings, self.leak, self.ledger = (
            model,
            batches,
            settings,
            leak,
            ledger,
        )
        self.names = parameter_names(model)
        self.lengths = sizes(self.names.blocks)
        self.dtype = state_dtype(model)
        self.every = [*(Arm(gain, 1) for gain in sorted(leak.gains)), Arm(1.0, -1)]
        self.copy_mib = leak.groups * sum(self.lengths) * self.dtype.itemsize / MIB
        self.spills = self.copy_mib > leak.budget_mib
        room = leak.budget_mib - (0.0 if self.spills else self.copy_mib)
        fitting = int(room / self.copy_mib) if self.copy_mib else len(self.every)
        self.with_vectors = self.every[:fitting]

    @property
    def without_vectors(self) -> str:
        """Why some arms lack the fields that need vectors."""
        return (
            f"group means of an arm take {self.copy_mib:.1f} MiB, and {len(self.with_vectors)} of "
            f"{len(self.every)} arms fit the budget of {self.leak.budget_mib:g} MiB: raise leak.budget_mib"
        )

    def memory(self) -> dict[str, Any]:
        """What the group means take, as planned."""
        return {
            "budget_mib": self.leak.budget_mib,
            "group_means_mib": self.copy_mib,
            "spilled": self.spills,
            "arms_with_vectors": len(self.with_vectors),
            "vectors_mib": self.copy_mib * len(self.with_vectors),
        }

    def self_test(self) -> Row:
        """The row of the self-test.

        Raises:
            RunFailed: the instrument does not read what was planted.
        """
        key = "self-test"
        if key not in self.ledger:
            test = self_test(self.model, self.names, self.batches, self.leak.precision)
            parts = {"null": test.null, "planted": test.planted}
            row: Row = {"key": key, "kind": "self_test"}
            self.ledger.add(row | {n: {"passed": p.passed, "detail": p.detail} for n, p in parts.items()})
        row = self.ledger[key]
        failed = [
            f"{name} ({row[name]['detail']})" for name in ("null", "planted") if not row[name]["passed"]
        ]
        if failed:
            raise RunFailed(
                f"the spectrometer's self-test failed, so nothing was measured: {'; '.join(failed)}; "
                "check that the model is a deterministic decoder with finite gradients"
            )
        return row

    def nudge(self) -> Row:
        """The row with the one beta of all arms and that of the control, both from the first batch."""
        key = "nudge"
        if key in self.ledger:
            return self.ledger[key]
        # With amp under study the nudge of its own forces decides; the control is the instrument's.
        start = begin(self.model, *self.batches[0], self.settings.precision)
        beta = self.settings.beta
        if beta is None:
            assert self.settings.displacement is not None
            beta = beta_for(start, self.settings.displacement)
        if self.settings.precision != self.leak.precision:
            start = begin(self.model, *self.batches[0], self.leak.precision)
        control = beta_for(start, safe_displacement(self.leak.precision))
        return self.ledger.add({"key": key, "kind": "nudge", "beta": beta, "control_beta": control})

    def open_batches(self) -> list[int]:
        """Batches that pass 2 has to go over, in order."""
        grams = [self._gram_key(arm) for arm in self.with_vectors]
        if not all(key in self.ledger for key in grams):
            return list(range(len(self.batches)))
        return [
            index
            for index in range(len(self.batches))
            if not (self._batch_key(index) in self.ledger and self._cross_key(index) in self.ledger)
        ]

    @contextmanager
    def means(self, scratch: Path) -> Iterator[GroupMeans]:
        """Empty group means of the reference, in ``scratch`` beyond the budget."""
        means = GroupMeans(self.lengths, self.leak.groups, self.dtype, scratch if self.spills else None)
        try:
            yield means
        finally:
            means.close()

    def vectors(self) -> dict[Arm, GroupMeans]:
        """Empty group means of the arms that fit the budget."""
        return {
            arm: GroupMeans(self.lengths, self.leak.groups, self.dtype, None) for arm in self.with_vectors
        }

    def reference(self, index: int, means: GroupMeans) -> None:
        """Pass 1 on one batch: its reference gradient into the group means."""
        loss, vectors = reference_vectors(self.model, self.names, self.batches[index], self.leak.precision)
        squares = [float(gram([vector], [vector])[0, 0]) for vector in vectors]
        self.ledger.add(
            {
                "key": f"reference batch={index}",
                "kind": "reference",
                "batch": index,
                "loss": loss,
                "bb": squares,
            }
        )
        _add(means, index, vectors)

    def arms(self, index: int, means: GroupMeans, vectors: Mapping[Arm, GroupMeans]) -> None:
        """Pass 2 on one batch: every arm and the control against the reference."""
        began = time.perf_counter()
        nudge, batch, layers = self.nudge(), self.batches[index], len(self.lengths)
        _, reference = reference_vectors(self.model, self.names, batch, self.leak.precision)
        start = begin(self.model, *batch, self.settings.precision)
        row: Row = {
            "key": self._batch_key(index),
            "kind": "batch",
            "batch": index,
            "displacement": [nudge["beta"] * ratio for ratio in unit_ratios(start)],
            "arms": {},
        }
        cross: Row = {
            "key": self._cross_key(index),
            "kind": "cross",
            "batch": index,
            "base": _with_means(means, reference),
            "arms": {},
        }
        for arm in self.every:
            found = arm_vectors(start, self.settings, [arm.gain] * layers, arm.sign, nudge["beta"])
            products = compare(found, reference)
            row["arms"][arm.label] = {"db": products.db, "dd": products.dd, "gg": products.gg}
            cross["arms"][arm.label] = _with_means(means, found)
            if arm in vectors:
                _add(vectors[arm], index, found)
        if self.settings.precision != self.leak.precision:
            start = begin(self.model, *batch, self.leak.precision)
        control = arm_vectors(start, self._control_settings(), [1.0] * layers, 1, nudge["control_beta"])
        row["control"] = compare(control, reference).db
        row["timing"] = {"seconds": time.perf_counter() - began}
        self.ledger.add(row)
        self.ledger.add(cross)

    def grams(self, vectors: Mapping[Arm, GroupMeans]) -> None:
        """The tables ⟨D_j,D_k⟩ of the arms whose vectors were kept, once pass 2 is through."""
        for arm, means in vectors.items():
            means.divide(self.leak.batches // self.leak.groups)
            blocks = [means.block(block) for block in range(len(self.lengths))]
            tables = [gram(rows, list(rows)).tolist() for rows in blocks]
            self.ledger.add({"key": self._gram_key(arm), "kind": "gram", "arm": arm.label, "blocks": tables})

    def tables(self) -> Tables:
        """Every row, as arrays."""
        batches = [self.ledger[self._batch_key(index)] for index in range(len(self.batches))]
        crosses = [self.ledger[self._cross_key(index)] for index in range(len(self.batches))]
        references = [self.ledger[f"reference batch={index}"] for index in range(len(self.batches))]
        labels = [arm.label for arm in self.every]

        def products(name: str) -> np.ndarray:
            return np.array([[row["arms"][label][name] for row in batches] for label in labels])

        return Tables(
            arms=self.every,
            bb=np.array([row["bb"] for row in references]),
            db=products("db"),
            dd=products("dd"),
            gg=products("gg"),
            base=np.array([row["base"] for row in crosses]),
            cross=np.array([[row["arms"][label] for row in crosses] for label in labels]),
            gram={
                self.every.index(arm): np.array(self.ledger[self._gram_key(arm)]["blocks"])
                for arm in self.with_vectors
            },
            displacement=np.array([row["displacement"] for row in batches]),
            control=np.array([row["control"] for row in batches]),
        )

    def control(self, tables: Tables) -> dict[str, Any]:
        """What the control arm reads, and what it controls."""
        blocks = range(len(self.lengths))
        found = [ratio_jackknife(tables.control[:, block], tables.bb[:, block]) for block in blocks]
        displacement = safe_displacement(self.leak.precision)
        return {
            "description": (
                f"linear read, one round, gain 1, {self.leak.precision}, displacement {displacement:.1e}, "
                "on the same batches: the linear read cannot lose a displacement, and curvature is of the "
                "order of the displacement, so it should read 0; it controls the pairing, the phases and "
                "the reference"
            ),
            "beta": self.nudge()["control_beta"],
            "displacement": displacement,
            **intervals("projection", found),
        }

    def _control_settings(self) -> EPSettings:
        return EPSettings(beta=1.0, rounds=1, fused=False, read="linear", precision=self.leak.precision)

    def _batch_key(self, index: int) -> str:
        return f"arms batch={index}"

    # Products with group means hold for one number of batches only; all others outlive an extension.
    def _cross_key(self, index: int) -> str:
        return f"cross batch={index} of={len(self.batches)}"

    def _gram_key(self, arm: Arm) -> str:
        return f"gram {arm.label} of={len(self.batches)}"


def _add(means: GroupMeans, index: int, vectors: Sequence[Tensor]) -> None:
    for block, vector in enumerate(vectors):
        means.add(index % means.groups, block, vector)


def _with_means(means: GroupMeans, vectors: Sequence[Tensor]) -> list[list[float]]:
    return [gram(means.block(block), [vector])[:, 0].tolist() for block, vector in enumerate(vectors)]
