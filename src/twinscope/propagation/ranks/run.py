"""The verb ``ranks``: does this job compute, on all its ranks, what one of them computes alone?

Covers batches, arms and precisions, the run and its record. The comparison itself is in check.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinscope.lab.errors import ConfigError, Stopped
from twinscope.lab.evidence import claim
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.run import Run, stop_signals
from twinscope.models.decoder import Decoder
from twinscope.models.weights import model_tensors
from twinscope.propagation.config import ArmSettings
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.optimizers import build_optimizer
from twinscope.propagation.ranks.check import Comparison, Estimate, compare
from twinscope.propagation.ranks.config import RanksConfig
from twinscope.propagation.ranks.follower import Follower
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.settings import EPSettings
from twinscope.propagation.train import Prepared, create_run, require_same_data
from twinscope.text.batches import train_batch


def make_run(prepared: Prepared, root: Path, ranks: Ranks) -> Run:
    """Make the run directory with configuration and provenance."""
    return create_run(prepared, root, "ranks", ranks)


def check_over(
    ranks: Ranks, prepared: Prepared, run: Run | Follower, quiet: bool = False
) -> dict[str, Any] | None:
    """Compare on all ranks, and write the result of ``run``; returns the record on rank 0, None on others.

    That gradients differ is a result too.

    Raises:
        ConfigError: the run began on another number of ranks; one rank cannot hold the batch.
        Stopped: a signal ended it early. RankLost: another rank is gone.
    """
    texts, hosts = _texts(ranks, prepared), ranks.gather(socket.gethostname())
    if isinstance(run, Follower):
        with stop_signals(run), Progress("ranks", quiet=True) as silent:
            _compare_all(ranks, prepared, run, silent)
        return None
    require_same_data(run, prepared.data)
    began_on = run.provenance.get("ranks")
    if began_on != [ranks.size]:
        raise ConfigError(
            f"{run.path.name} compares {began_on} ranks with one: resume it on as many, or start a fresh one"
        )

    def work() -> Findings:
        with Progress(prepared.config.name, quiet) as progress:
            _compare_all(ranks, prepared, run, progress)
        summary = _summary(ranks, prepared, run.rows, texts, hosts)
        return summary, [_claim(summary)]

    return carry_out(run, prepared.config.model_dump(mode="json", exclude_none=True), work)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Raise ConfigError: one process cannot go on with this, ``check_over`` on as many ranks can."""
    raise ConfigError(
        f"{run.path.name} compares several ranks with one: "
        f"start them with torchrun --nproc-per-node N -m twinscope resume {run.path}"
    )


def _texts(ranks: Ranks, prepared: Prepared) -> list[int]:
    """How many texts of a batch each rank takes."""
    rows = ranks.rows(prepared.config.data.batch)
    return [int(count) for count in ranks.gather(str(rows.stop - rows.start))]


def _compare_all(ranks: Ranks, prepared: Prepared, run: Run | Follower, progress: Progress) -> None:
    config = _config_of(prepared)
    units = [(precision, arm) for precision in config.precisions for arm in config.arms]
    done, total = 0, len(units) * config.ranks.batches
    for precision, arm in units:
        for row in _arm(ranks, prepared, precision, arm):
            done += 1
            run.append(row)
            progress.update(done, total, f"{arm.name} {precision}")
            asked = Stopped(f"stopped by {run.stop_requested}") if run.stop_requested else None
            stop = ranks.agree_to_stop(asked)
            if stop is not None:
                raise stop


def _arm(ranks: Ranks, prepared: Prepared, precision: str, arm: ArmSettings) -> Iterator[dict[str, Any]]:
    """A row for each batch; the weights move on by a step in between, and stay equal on all ranks."""
    config, seed = _config_of(prepared), prepared.config.train.seeds[0]
    context, device = prepared.initial.config.context, torch.device(config.train.device)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = prepared.initial.build(seed, dtype, device)
    ranks.spread(model_tensors(model).values())
    optimizer = build_optimizer(model, config.optimizer, config.train.steps)
    settings = None
    if arm.rule == "ep":
        settings = config.ep_settings(arm).model_copy(update={"precision": precision})
    for step in range(config.ranks.batches):
        drawn = train_batch(prepared.data.train, context, config.data.batch, seed, step)
        tokens, targets = (torch.from_numpy(part).to(device) for part in drawn)
        estimate = _estimate(model, (tokens, targets), precision, arm, settings, (seed, step))
        found, comparison = compare(model, estimate, ranks, precision, settings)
        ranks.require_same(found.grads.values(), f"gradients of arm '{arm.name}' in {precision}")
        optimizer.step(found.grads, step)
        ranks.require_same(model.parameters(), f"weights of arm '{arm.name}' after a step in {precision}")
        key = f"{precision} arm={arm.name} batch={step}"
        yield {"key": key} if comparison is None else _row(key, precision, arm, step, comparison)


def _estimate(
    model: Decoder,
    batch: tuple[Tensor, Tensor],
    precision: str,
    arm: ArmSettings,
    settings: EPSettings | None,
    draws: tuple[int, int],
) -> Estimate:
    """The gradient of one arm on one batch, over the ranks it is given; ``draws`` are seed and step."""
    if settings is None:
        recompute = arm.checkpointed
        return lambda ranks: bp_gradient(model, *batch, precision=precision, recompute=recompute, ranks=ranks)
    return lambda ranks: ep_gradient(model, *batch, settings, *draws, ranks=ranks)


def _config_of(prepared: Prepared) -> RanksConfig:
    assert isinstance(prepared.config, RanksConfig)
    return prepared.config


def _row(key: str, precision: str, arm: ArmSettings, step: int, found: Comparison) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": key,
        "kind": "gradient",
        "arm": arm.name,
        "rule": arm.rule,
        "precision": precision,
        "batch": step,
        "block_difference": found.blocks,
        "outer_difference": found.outer,
        "loss_difference": found.loss,
        "beta_difference": found.beta,
        "tolerance": found.tolerance,
        "summed_bytes": found.nbytes,
        "passed": found.passed,
        "timing": {"alone_seconds": found.seconds[0], "ranks_seconds": found.seconds[1]},
    }
    if found.outer is None:
        row["outer_difference_reason"] = "this decoder has no parameter outside its blocks"
    if found.beta is None:
        row["beta_difference_reason"] = "this arm sets no beta"
    return row


def _summary(
    ranks: Ranks, prepared: Prepared, rows: list[dict[str, Any]], texts: list[int], hosts: list[str]
) -> dict[str, Any]:
    config = _config_of(prepared)
    arms = []
    for precision in config.precisions:
        for arm in config.arms:
            of = [row for row in rows if (row["precision"], row["arm"]) == (precision, arm.name)]
            worst = max(of, key=_worst)
            arms.append(
                {
                    "arm": arm.name,
                    "rule": arm.rule,
                    "precision": precision,
                    "worst_difference": _worst(worst),
                    "tolerance": worst["tolerance"],
                    "passed": all(row["passed"] for row in of),
                }
            )
    return {
        "ranks": ranks.size,
        "backend": ranks.backend,
        "device": config.train.device,
        "hosts": sorted(set(hosts)),
        "texts": texts,
        "batches": config.ranks.batches,
        "passed": all(arm["passed"] for arm in arms),
        "arms": arms,
    }


def _worst(row: dict[str, Any]) -> float:
    outer = [] if row["outer_difference"] is None else [row["outer_difference"]]
    return max([*row["block_difference"], *outer])


def _claim(summary: dict[str, Any]) -> dict[str, str]:
    worst = {
        precision: max(a["worst_difference"] for a in summary["arms"] if a["precision"] == precision)
        for precision in dict.fromkeys(arm["precision"] for arm in summary["arms"])
    }
    differs = ", ".join(f"{value:.1e} in {precision}" for precision, value in worst.items())
    verb = "give" if summary["passed"] else "do not give"
    return claim(
        f"{summary['ranks']} ranks over {summary['backend']} {verb} the gradient that one gives on the same "
        f"batches: the largest relative difference of a block is {differs}",
        "measured",
        "that these ranks, on this batch, shape and device, add up to the whole batch"
        if summary["passed"]
        else "that sums over these ranks, or their arithmetic, cannot be trusted as they are",
        "other numbers of ranks, other machines, or speed",
    )
