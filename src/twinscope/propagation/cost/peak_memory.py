"""The peak of tensor memory in one training step of one arm, told apart into what holds it.

Covers the exact peak from the allocator's own events, in a process of its own for every arm, and beside it
the largest resident memory that process had before it was observed. What is not seen: memory of libraries
that do not take it from torch's allocator, such as packing buffers of matrix products; the resident peak has
it. Memory depends on shapes alone, so weights and tokens are random.

``total`` is the peak over the whole step, parameters, optimizer state, gradients and the batch included.
``activations`` is the peak while the gradient is computed, of everything that is neither parameter, optimizer
state, nor a gradient that is returned: graphs, states, adjoints, logits and what the kernels need.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinscope.lab.budget import peak_rss_mib
from twinscope.lab.config import Section
from twinscope.models.gpt import GPTConfig, build_gpt
from twinscope.propagation.compiling import compile_blocks
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.cost.apart import run_apart
from twinscope.propagation.optimizers import build_optimizer
from twinscope.propagation.train import set_numerics
from twinscope.propagation.twin import Arm, estimator

_MIB = 2.0**20
#: Device types as torch's profiler numbers them.
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


@dataclass(frozen=True)
class Peak:
    """Peaks in MiB of tensor memory on the arm's device; ``resident`` is the process's own, on the host."""

    total: float
    activations: float
    parameters: float
    gradients: float
    optimizer: float
    resident: float


@dataclass(frozen=True)
class Event:
    """One allocation (positive) or release (negative) of ``size`` bytes at an address."""

    address: int
    size: int


class Subject(Section):
    """What to observe: one arm of a training, at a shape."""

    training: TrainConfig
    shape: GPTConfig
    arm: str


def peak_apart(subject: Subject, timeout: float | None = None) -> Peak:
    """Observe one step of the arm in a process of its own; ``timeout`` is in seconds.

    Raises:
        TwinscopeError: the process failed or took longer than ``timeout``.
    """

    def late(seconds: float) -> str:
        return f"the memory of arm '{subject.arm}' was not seen within {seconds:g} s: set cost.memory = false"

    failed = f"observing the memory of arm '{subject.arm}'"
    return Peak(**run_apart("twinscope.propagation.cost.peak_memory", subject, timeout, late, failed))


def peak_here(subject: Subject) -> Peak:
    """As :func:`peak_apart`, in this process; ``resident`` then is this process's peak so far."""
    settings = subject.training.train
    set_numerics(settings.device, settings.threads or torch.get_num_threads(), "cost.device")
    device = torch.device(settings.device)
    dtype = torch.float64 if settings.precision == "fp64" else torch.float32
    model = build_gpt(subject.shape, 0, dtype, device)
    if settings.compile:
        compile_blocks(model)
    optimizer = build_optimizer(model, subject.training.optimizer, 8)
    chosen = next(arm for arm in subject.training.arms if arm.name == subject.arm)
    arm = Arm(chosen, estimator(subject.training, chosen), model, optimizer)
    draws = torch.Generator().manual_seed(0)
    size = (2, subject.training.data.batch, subject.shape.context)
    tokens, targets = torch.randint(subject.shape.vocab, size, generator=draws).to(device)
    # What is made once (kernels, workspaces, caches) is made before anything is observed.
    for step in range(2):
        arm.advance(tokens, targets, 0, step)
    resident = peak_rss_mib()
    whole, _ = observe(lambda: arm.advance(tokens, targets, 0, 2), device)
    part, found = observe(lambda: arm.gradient(model, tokens, targets, 0, 3), device)
    grads = list(found.grads.values())
    parameters = _bytes(model.parameters())
    # A copy, laid out as the state that is held.
    state = _bytes(optimizer.state().values())
    batch = _bytes([tokens, targets])
    return Peak(
        total=(parameters + state + batch + peak(whole)) / _MIB,
        activations=peak(part, {grad.untyped_storage().data_ptr() for grad in grads}) / _MIB,
        parameters=parameters / _MIB,
        gradients=_bytes(grads) / _MIB,
        optimizer=state / _MIB,
        resident=resident,
    )


def observe(call: Callable[[], Any], device: torch.device) -> tuple[list[Event], Any]:
    """What ``call`` allocates and releases on the device, in order, and what it returns."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True) as profiler:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_bytes())
    wanted = _DEVICE_TYPES[device.type]
    found = [
        entry
        for entry in trace["traceEvents"]
        if entry.get("name") == "[memory]" and entry["args"]["Device Type"] == wanted
    ]
    # The profiler writes them in order; sorting keeps that where two have one time.
    found.sort(key=lambda entry: entry["ts"])
    return [Event(entry["args"]["Addr"], entry["args"]["Bytes"]) for entry in found], result


def peak(events: Sequence[Event], apart: set[int] | None = None) -> int:
    """Largest number of bytes held at once of what the events allocate.

    What stands at an address of ``apart`` at the end is left out from its last allocation on.
    """
    last: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.size > 0 and apart is not None and event.address in apart:
            last[event.address] = index
    left_out = set(last.values())
    held = highest = 0
    for index, event in enumerate(events):
        if index not in left_out:
            held += event.size
            highest = max(highest, held)
    return highest


def _bytes(tensors: Any) -> int:
    """Bytes of the distinct storages of the tensors."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        assert isinstance(tensor, Tensor)
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def as_row(found: Peak) -> Mapping[str, float]:
    """The peak as fields of a row, in MiB."""
    return {f"{name}_mib": value for name, value in asdict(found).items()}


def main() -> None:
    """Read a :class:`Subject` as JSON from standard input, print the peak as one line of JSON."""
    print(json.dumps(asdict(peak_here(Subject.model_validate_json(sys.stdin.read())))))


if __name__ == "__main__":
    main()
