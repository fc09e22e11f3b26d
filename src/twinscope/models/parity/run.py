"""The verb ``model check``: a run that compares the streamed forward of a folder with the library's.

Covers its configuration, the run directory, the record and its claim. What is compared is in ``parity.py``.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from twinscope.lab.config import Section, parse_config, to_toml
from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.evidence import Facts, Weights, reuse_claim
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect
from twinscope.lab.run import Run
from twinscope.models.parity.check import HIDDEN_TOLERANCE, NLL_TOLERANCE, Method, Parity, check_parity
from twinscope.models.store.library import model_folder
from twinscope.models.store.origin import read_origin


class CheckSettings(Section):
    """``[check]``: the folder, ``texts`` of ``tokens`` each, tolerances, and how the library runs.

    ``budget_mib`` is the soft limit of the streaming process.
    """

    folder: str
    texts: int = Field(default=4, ge=1)
    tokens: int = Field(default=32, ge=2)
    seed: int = 0
    method: Method = "auto"
    threads: int | None = Field(default=None, ge=1)
    budget_mib: float = Field(default=512, gt=0)
    hidden_tolerance: float = Field(default=HIDDEN_TOLERANCE, gt=0)
    nll_tolerance: float = Field(default=NLL_TOLERANCE, gt=0)


class CheckConfig(Section):
    """The configuration of a ``check`` run."""

    name: str
    check: CheckSettings


def make_config(name_or_path: str, quiet: bool = False, **changes: Any) -> CheckConfig:
    """The configuration for a model given by name or path, fetched where it has to be.

    Raises:
        ConfigError, DataError: as for ``model_folder`` of models/store/library.py; a value is refused.
    """
    folder = model_folder(name_or_path, quiet)
    threads = changes.pop("threads", None) or torch.get_num_threads()
    check = {"folder": str(folder), "threads": threads, **changes}
    return parse_config({"name": folder.name, "check": check}, CheckConfig, origin="model check")


def create_run(config: CheckConfig, root: Path) -> Run:
    """Make the run directory with configuration and provenance."""
    settings = config.check
    origin = read_origin(Path(settings.folder))
    provenance = collect(
        seeds=[settings.seed],
        data={"model": settings.folder, **({"files": origin.sha256} if origin is not None else {})},
        compute={"device": "cpu", "threads": settings.threads, "precision": "fp32"},
    )
    return Run.create(root, "check", config.name, to_toml(config), provenance)


def check(config: CheckConfig, run: Run, quiet: bool = False) -> dict[str, Any]:
    """Compare, and write the result of ``run``; returns the record. That parity fails is a result too.

    Raises:
        Stopped: a signal or a budget ended it early. Else as for ``parity.check_parity``.
    """
    settings = config.check
    folder = Path(settings.folder)

    def work() -> Findings:
        threads = torch.get_num_threads()
        torch.set_num_threads(settings.threads or threads)
        try:
            with Progress(f"parity of {config.name}", quiet) as progress:

                def before(done: int, total: int, what: str) -> None:
                    progress.update(done, total, what)
                    if run.stop_requested:
                        raise Stopped(f"stopped by {run.stop_requested} in {what}")

                parity = check_parity(
                    folder,
                    texts=settings.texts,
                    tokens=settings.tokens,
                    seed=settings.seed,
                    method=settings.method,
                    budget_mib=settings.budget_mib,
                    hidden_tolerance=settings.hidden_tolerance,
                    nll_tolerance=settings.nll_tolerance,
                    progress=before,
                )
        finally:
            torch.set_num_threads(threads)
        for row in _rows(parity):
            run.append(row)
        return _summary(folder, parity), [_claim(folder, parity)]

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Do a check that was interrupted again, under the configuration it was started with."""
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    return check(parse_config(mapping, CheckConfig, origin=str(run.path / "config.toml")), run, quiet)


def _rows(parity: Parity) -> list[dict[str, Any]]:
    texts = []
    for index, text in enumerate(parity.texts):
        values = asdict(text)
        texts.append({"key": f"text-{index}", "kind": "text", "source": values.pop("kind"), **values})
    layers = [
        {"key": f"layer-{number}", "kind": "layer", "layer": number, "difference": difference}
        for number, difference in enumerate(parity.layers)
    ]
    return texts + layers


def _summary(folder: Path, parity: Parity) -> dict[str, Any]:
    origin = read_origin(folder)
    nowhere = {"first_part_reason": "no part differs by more than the tolerance"}
    return {
        "model": str(folder),
        "weights": "unstated" if origin is None else origin.weights,
        "weights_sha256": parity.weights_sha256,
        "passed": parity.passed,
        "first_part": parity.first_part,
        **({} if parity.first_part is not None else nowhere),
        "bit_equal": parity.bit_equal,
        "method": parity.method,
        "tokens": parity.tokens,
        "hidden_difference": parity.hidden_difference,
        "hidden_tolerance": parity.hidden_tolerance,
        "nll_difference": parity.nll_difference,
        "nll_tolerance": parity.nll_tolerance,
        "peak_rss_mib": parity.peak_rss_mib,
        "notes": list(parity.notes),
        "versions": parity.versions,
    }


def _claim(folder: Path, parity: Parity) -> dict[str, str]:
    origin = read_origin(folder)
    weights: Weights = "released"  # nobody said what they are; parity does not depend on it
    planted = False
    if origin is not None:
        weights, planted = origin.evidence
    facts = Facts(
        ran=True,
        parity_passed=parity.passed,
        candidate_passed=False,
        weights=weights,
        planted=planted,
        seal_intact=True,
    )
    verdict = "equals" if parity.passed else "does not equal"
    how = "the library's" if parity.method == "whole" else "the library's layer by layer"
    where = "" if parity.first_part is None else f", first in {parity.first_part}"
    return reuse_claim(
        f"the streamed forward of {folder.name} {verdict} {how} on {len(parity.texts)} texts of "
        f"{parity.tokens} tokens: final states within {parity.hidden_difference:.1e}, losses within "
        f"{parity.nll_difference:.1e} nats{where}",
        facts,
    )
