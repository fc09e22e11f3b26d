"""One sitting of a run over a sealed plan: budgets of its parts, memory that was seen, parity of the model.

Covers what every verb over a plan does around its work, whatever the work is. A run that is resumed has
several sittings; what they have in common is in its journal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from twinscope.lab.budget import Budget, peak_rss_mib, rss_parts_mib
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.run import Run
from twinscope.models.parity.check import find_parity
from twinscope.reuse.apart import call_apart
from twinscope.reuse.identity import identify
from twinscope.reuse.plan import Plan, require_same_model
from twinscope.reuse.plan_run import folder_of
from twinscope.reuse.reuse_config import Budgets
from twinscope.reuse.scan import Before


class Clock:
    """Budgets of a run, and the largest memory that its checks saw; it lives as long as one sitting.

    ``minutes`` are those of parts that the budgets of the plan do not name.
    """

    def __init__(self, limits: Budgets, minutes: Mapping[str, float] | None = None) -> None:
        self._minutes = limits.stage_minutes
        self._own = dict(minutes or {})
        self._budget = Budget(
            process_mib=limits.process_mib,
            available_mib=limits.available_mib,
            seconds=60.0 * limits.minutes,
            swap_mib_per_s=limits.swap_mib_per_s,
        )
        self._seen: dict[str, float] = {}
        self._last = time.monotonic()

    def stage(self, name: str) -> Any:
        """The part of the work with a budget of its own."""
        own = self._own.get(name)
        return self._budget.stage(name, self._minutes.seconds(name) if own is None else 60.0 * own)

    def check(self) -> None:
        """Note the memory and hold every limit. Raises BudgetExceeded."""
        for part, size in rss_parts_mib().items():
            self._seen[part] = max(size, self._seen.get(part, 0.0))
        self._budget.check()

    def timing(self) -> dict[str, float]:
        """Seconds since the last row, and the memory so far; what a row keeps beside its values."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        parts = {f"{name}_mib": size for name, size in self._seen.items() if name != "total"}
        return {"seconds": seconds, "peak_rss_mib": peak_rss_mib(), **parts}


def held_model(plan: Plan, quiet: bool = False) -> Path:
    """The folder of a plan's model, once it holds what was sealed, and is what the plan says it is.

    Raises:
        DataError: it is gone, changed since the plan was sealed, or its weights are told to be others.
    """
    folder = plan.folder
    if not folder.is_dir():
        try:
            folder = folder_of(plan.content["model"]["source"], quiet)
        except ConfigError:
            raise DataError(f"the model of the plan is not at {folder} any more: bring it back") from None
    identity = identify(folder, stated_weights(plan))
    require_same_model(plan, identity)
    model = plan.content["model"]
    if (identity.weights, identity.planted) != (model["weights"], model["planted"]):
        here, there = (
            f"{weights}{', with copies planted' if planted else ''} ({told_by})"
            for weights, planted, told_by in (
                (identity.weights, identity.planted, identity.told_by),
                (model["weights"], model["planted"], model["told_by"]),
            )
        )
        raise DataError(f"the weights in {folder} are {here}, and the plan says {there}: make a new plan")
    return folder


def hold_parity(run: Run, plan: Plan, folder: Path, clock: Clock, before: Before) -> dict[str, Any]:
    """Whether the streamed forward equals the library's: by a receipt, or by a check in another process.

    Returns the journal's row, with ``passed`` and ``detail``.

    Raises:
        Stopped: the check ended before it was done.
    """
    known = next((row for row in run.rows if row["key"] == "parity"), None)
    if known is not None:
        return known
    with clock.stage("parity"):
        before("parity", 0, 1)
        found = find_parity(folder)
        detail = "there is no receipt of a check, and the plan asks for none: run twinscope model check"
        if found is None and plan.content["compute"]["parity"] == "check":
            options = (
                "--budget-mib",
                str(plan.budgets.process_mib),
                "--runs",
                str(run.path.parent),
                "--quiet",
            )
            limit = plan.budgets.stage_minutes.seconds("parity")
            done = call_apart("model", "check", str(folder), *options, timeout=limit)
            if done["code"] == Stopped.exit_code:
                raise Stopped(
                    f"the check of parity stopped ({done.get('error')}); plan with reuse.parity = 'receipt' "
                    "to go on without one, at the level capacity"
                )
            found = find_parity(folder)
            detail = f"the check gave no receipt: {done.get('error', 'it said nothing')}"
        if found is not None:
            detail = (
                f"final states differ by {found.hidden_difference:.1e} (at most "
                f"{found.hidden_tolerance:.0e}) and the loss by {found.nll_difference:.1e} nats (at most "
                f"{found.nll_tolerance:.0e})"
            )
        row = {"key": "parity", "passed": found is not None and found.passed, "detail": detail}
        run.append(row | {"timing": clock.timing()})
        before("parity", 1, 1)
    return row


def memory_of(run: Run, clock: Clock, limits: Budgets) -> tuple[float, dict[str, Any]]:
    """The peak in MiB of all sittings, and ``memory`` as a summary has it."""
    timings = [row["timing"] for row in run.rows if "timing" in row] + [clock.timing()]
    largest = {
        name: max((timing[name] for timing in timings if name in timing), default=None)
        for name in ("peak_rss_mib", "anonymous_mib", "file_mib")
    }
    memory: dict[str, Any] = {"budget_mib": limits.process_mib}
    for name in ("anonymous_mib", "file_mib"):
        memory[name] = largest[name]
        if largest[name] is None:
            memory[f"{name}_reason"] = "this system does not tell the two apart"
    peak = largest["peak_rss_mib"]
    assert peak is not None
    return peak, memory


def set_numerics(device: str, threads: int) -> None:
    """What holds for the whole process: threads, deterministic kernels, no TF32.

    Raises:
        ConfigError: the device cannot be used here.
    """
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("give cpu, cuda or cuda:N")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"reuse.device = '{device}' cannot be used here: {reason}") from None
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # It would fill every buffer with NaN before a matrix is read into it, at the price of the read itself.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def stated_weights(plan: Plan) -> Any:
    """What the configuration said of the weights, where the plan took its word; else None."""
    model = plan.content["model"]
    return model["weights"] if model["told_by"] == "the configuration" else None
