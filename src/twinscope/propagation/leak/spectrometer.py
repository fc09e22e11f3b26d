"""The leak spectrometer: how the EP gradient departs from BP, block by block, as the gain grows (METHOD 1.4).

Covers :func:`leak_spectrum` and the order of the work. The units of work are in passes.py, statistics in
spectrum.py, the self-test in selftest.py, run directories in run.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from twinscope.lab.errors import ConfigError
from twinscope.models.decoder import Decoder, check_decoder
from twinscope.propagation.leak import spectrum
from twinscope.propagation.leak.config import GAINS, LeakSettings
from twinscope.propagation.leak.paired import Batch
from twinscope.propagation.leak.passes import Bench, Ledger
from twinscope.propagation.phases import state_dtype
from twinscope.propagation.settings import EPSettings


@dataclass(frozen=True)
class LeakSpectrum:
    """What the spectrometer reads: rows and summary of the ``leak`` record; lists run over blocks.

    A number that does not exist is None, with a sentence under ``<name>_reason`` beside it.
    """

    rows: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def displacement_ratio(self) -> list[float]:
        return self.summary["displacement_ratio"]

    @property
    def gain_low(self) -> list[float | None]:
        return self.summary["gain_low"]

    @property
    def gain_high(self) -> list[float | None]:
        return self.summary["gain_high"]

    @property
    def odd(self) -> list[float | None]:
        return self.summary["odd"]

    @property
    def even(self) -> list[float | None]:
        return self.summary["even"]

    @property
    def self_test(self) -> dict[str, dict[str, Any]]:
        return self.summary["self_test"]


def leak_spectrum(
    model: Decoder,
    batches: Sequence[Batch],
    settings: EPSettings,
    gains: Sequence[float] = GAINS,
    groups: int = 8,
    seed: int = 0,
    budget_mib: float | None = None,
    *,
    band: float = 0.02,
    study: str | None = None,
) -> LeakSpectrum:
    """Measure the leak of EP under ``settings`` on ``batches`` of (tokens, targets), each (B, T) int64.

    Arms: every gain at +beta, and (-beta, gain 1); one beta for all, that of ``settings`` or the one its
    displacement asks for on the first batch at gain 1. The nudge of ``settings`` is not used, and nothing
    is drawn, so ``seed`` is a label. The instrument has the precision of the model's parameters; amp needs
    ``study="amp"``. Group means beyond ``budget_mib`` (1024) go to a temporary file.

    Raises:
        ConfigError: settings, gains, groups or batches that cannot be measured, or no usable decoder.
        RunFailed: the self-test failed, or a gradient is not finite.
    """
    check_decoder(model)
    if settings.precision == "amp" and study != "amp":
        raise ConfigError("amp is an object of study, never the instrument: pass study = 'amp'")
    if settings.rounds == 0:
        raise ConfigError("rounds = 0 is backpropagation, whose leak is zero: set rounds to 1 or more")
    if settings.gain.profile != "uniform" or (settings.gain.value or 1.0) != 1.0:
        raise ConfigError("the arms set the gain: leave settings.gain at its default")
    precision = "fp64" if state_dtype(model) == torch.float64 else "fp32"
    values: dict[str, Any] = {
        "batches": len(batches),
        "groups": groups,
        "gains": [float(gain) for gain in gains],
        "band": band,
        "seed": seed,
        "study": study,
        "precision": precision,
    }
    if budget_mib is not None:
        values["budget_mib"] = budget_mib
    try:
        leak = LeakSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        raise ConfigError(f"leak_spectrum: {where}{first['msg'].removeprefix('Value error, ')}") from None
    settings = settings.model_copy(update={"precision": study or precision})
    with tempfile.TemporaryDirectory(prefix="twinscope-leak-") as folder:
        return measure(model, batches, settings, leak, Ledger(), Path(folder))


def measure(
    model: Decoder,
    batches: Sequence[Batch],
    settings: EPSettings,
    leak: LeakSettings,
    ledger: Ledger,
    scratch: Path,
    before: Callable[[int, int, str], None] = lambda done, total, stage: None,
) -> LeakSpectrum:
    """Self-test, both passes, statistics; continues from the rows of ``ledger``.

    ``before(done, total, stage)`` is called before each unit of work and may raise to stop. Group means
    beyond the budget go to a file in ``scratch``, which is removed again.

    Raises:
        RunFailed: the self-test failed, or a gradient is not finite.
    """
    bench = Bench(model, batches, settings, leak, ledger)
    total = 2 * len(batches)
    before(0, total, "self-test")
    test, nudge = bench.self_test(), bench.nudge()
    if bench.open_batches():
        with bench.means(scratch) as means:
            for index in range(len(batches)):
                before(index, total, "pass 1")
                bench.reference(index, means)
            means.divide(leak.batches // leak.groups)
            vectors = bench.vectors()
            for index in bench.open_batches():
                before(len(batches) + index, total, "pass 2")
                bench.arms(index, means, vectors)
            bench.grams(vectors)
    tables = bench.tables()
    summary = {
        "beta": nudge["beta"],
        **spectrum.summary(tables, leak.gains, leak.band, settings),
        "self_test": {name: test[name] for name in ("null", "planted")},
        "control": bench.control(tables),
        "blocks": len(bench.lengths),
        "parameters": bench.lengths,
        "batches": leak.batches,
        "groups": leak.groups,
        "band": leak.band,
        "instrument": leak.precision,
        "study": leak.study or leak.precision,
        "unit_roundoff": torch.finfo(bench.dtype).eps / 2,
        "memory": bench.memory(),
    }
    return LeakSpectrum(spectrum.rows(tables, bench.without_vectors), summary)
