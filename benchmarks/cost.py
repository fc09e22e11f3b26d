"""What one training step costs under each rule and each way of running it, all in one process and in turn.

For every shape a model is first trained a little by backpropagation; then equilibrium propagation (K = 1
fused, K = 3 unfused, and K = 1 with graphs made again) and backpropagation (plain and with checkpoints)
take windows of steps on it in the order A B, B A, and so on. A ratio's interval is over those sweeps. Beside
it: FLOPs by the ledger, the peak of activations and of all tensors by the allocator's own events, and for the
EP arms cosine to backpropagation, displacement and residual. ``--compile`` adds compiled arms. The verb
``cost`` asks more carefully about two arms; this shows all of them at once. Writes results/cost.json.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from twinscope.lab.provenance import close, collect
from twinscope.models.gpt import GPT, GPTConfig, build_gpt
from twinscope.propagation.compiling import compile_blocks
from twinscope.propagation.config import ArmSettings
from twinscope.propagation.cost.flops import ledger
from twinscope.propagation.cost.peak_memory import observe, peak
from twinscope.propagation.cost.timing import (
    Contender,
    ratio_of_pairs,
    spread,
    sweep_order,
    synchronizer,
    time_window,
)
from twinscope.propagation.estimators import bp_gradient, ep_gradient
from twinscope.propagation.gates import fidelity_gate
from twinscope.propagation.optimizers import Optimizer, build_optimizer
from twinscope.propagation.settings import EPSettings, OptimizerSettings
from twinscope.propagation.twin import Arm, Estimator
from twinscope.text.batches import train_batch
from twinscope.text.datasets import Dataset, DataSettings, open_dataset

RESULTS = Path(__file__).parent / "results" / "cost.json"
#: layers × width × tokens × sequences
SHAPES = ("12x256x128x4", "6x512x256x2")
OPTIMIZER = OptimizerSettings(kind="adamw", lr=1e-3, warmup=20)
MIB = 2.0**20


@dataclass(frozen=True)
class Variant:
    """One arm: its estimator's settings (None: backpropagation), and how it runs."""

    name: str
    settings: EPSettings | None
    recompute: bool = False
    compiled: bool = False


def variants(displacement: float, precision: str, compiled: bool) -> list[Variant]:
    """The arms, backpropagation first."""

    def ep(rounds: int, fused: bool, recompute: bool = False) -> EPSettings:
        return EPSettings(displacement=displacement, rounds=rounds, fused=fused, recompute=recompute,
                          precision=precision)  # fmt: skip

    found = [
        Variant("bp", None),
        Variant("ep K=1 fused", ep(1, True)),
        Variant("ep K=3 unfused", ep(3, False)),
        Variant("bp recompute", None, recompute=True),
        Variant("ep K=1 fused recompute", ep(1, True, True), recompute=True),
    ]
    if compiled:
        found += [
            Variant("bp compiled", None, compiled=True),
            Variant("ep K=1 fused compiled", ep(1, True), compiled=True),
        ]
    return found


@dataclass
class Subject:
    """One shape's model, which all arms share: what a step costs does not depend on the weights."""

    shape: GPTConfig
    batch: int
    precision: str
    model: GPT
    compiled: GPT | None
    data: Dataset
    device: torch.device
    steps: int = 0

    def tokens(self, index: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        drawn = train_batch(self.data.train, self.shape.context, self.batch, seed, index)
        tokens, targets = (torch.from_numpy(part).to(self.device) for part in drawn)
        return tokens, targets

    def gradient(self, variant: Variant) -> Estimator:
        settings = variant.settings
        if settings is None:
            return lambda model, tokens, targets, seed, step: bp_gradient(
                model, tokens, targets, precision=self.precision, recompute=variant.recompute
            )
        return lambda model, tokens, targets, seed, step: ep_gradient(
            model, tokens, targets, settings, seed, step, diagnose=False
        )

    def arm(self, variant: Variant, optimizers: dict[bool, Optimizer]) -> Arm:
        model = self.compiled if variant.compiled else self.model
        assert model is not None
        if variant.compiled not in optimizers:
            optimizers[variant.compiled] = build_optimizer(model, OPTIMIZER, 1000)
        rule = "bp" if variant.settings is None else "ep"
        settings = ArmSettings(name="arm", rule=rule)
        return Arm(settings, self.gradient(variant), model, optimizers[variant.compiled])

    def advance(self, arm: Arm) -> None:
        tokens, targets = self.tokens(self.steps)
        arm.advance(tokens, targets, 0, self.steps)
        self.steps += 1


def prepare(spec: str, options: argparse.Namespace, data: Dataset, device: torch.device) -> Subject:
    """The shape of ``spec`` after some steps of backpropagation."""
    layers, width, context, batch = (int(number) for number in spec.split("x"))
    shape = GPTConfig(
        vocab=data.vocab, layers=layers, width=width, heads=max(1, width // 64), context=context
    )
    model, compiled = build_gpt(shape, device=device), None
    subject = Subject(shape, batch, options.precision, model, None, data, device)
    optimizer = build_optimizer(model, OPTIMIZER, max(1, options.base_steps))
    for step in range(options.base_steps):
        optimizer.step(bp_gradient(model, *subject.tokens(step, seed=0)).grads, step)
    if options.compile:
        compiled = build_gpt(shape, device=device)
        compiled.load_state_dict(model.state_dict())
        compile_blocks(compiled)
        subject.compiled = compiled
    return subject


def measure(subject: Subject, chosen: list[Variant], windows: int, steps: int) -> list[dict[str, Any]]:
    """A row for every arm."""
    fidelity = {variant.name: _fidelity(subject, variant) for variant in chosen}
    memory = {variant.name: _memory(subject, variant) for variant in chosen}
    optimizers: dict[bool, Optimizer] = {}
    arms = {variant.name: subject.arm(variant, optimizers) for variant in chosen}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    wait = synchronizer(subject.device)
    for arm in arms.values():  # kernels, workspaces and compiled code are made outside every window
        subject.advance(arm)
    for _, name in sweep_order(list(arms), windows):
        contender = Contender(name, lambda arm=arms[name]: subject.advance(arm), lambda: None)
        seconds[name].append(time_window(contender, warmup=1, steps=steps, synchronize=wait).step_seconds)
    bp = _ledger(subject, chosen[0])
    return [
        {
            "shape": f"{subject.shape.layers} blocks x {subject.shape.width}, T {subject.shape.context}, "
            f"{subject.batch} sequences, {subject.precision}",
            "arm": variant.name,
            "step_seconds": median(seconds[variant.name]),
            "spread": spread(seconds[variant.name]),
            **_ratio(seconds[variant.name], seconds["bp"]),
            "flops_ratio": _ledger(subject, variant) / bp,
            **memory[variant.name],
            "activation_ratio": memory[variant.name]["activations_mib"] / memory["bp"]["activations_mib"],
            "peak_ratio": memory[variant.name]["peak_mib"] / memory["bp"]["peak_mib"],
            **fidelity[variant.name],
        }
        for variant in chosen
    ]


def _ratio(above: list[float], below: list[float]) -> dict[str, float]:
    found = ratio_of_pairs(above, below)
    return {"ratio": found.median, "ratio_low": found.low, "ratio_high": found.high}


def _ledger(subject: Subject, variant: Variant) -> int:
    recompute = variant.recompute if variant.settings is None else False
    return ledger(subject.shape, subject.batch, variant.settings, OPTIMIZER, recompute=recompute).total


def _memory(subject: Subject, variant: Variant) -> dict[str, float]:
    """Peaks in MiB: of what is neither parameter, state nor returned gradient; and of everything."""
    # Two moments and the gradients; a compiled arm's own allocations are seen like any other.
    parameters = sum(p.numel() * p.element_size() for p in subject.model.parameters())
    model = subject.compiled if variant.compiled else subject.model
    assert model is not None
    gradient, (tokens, targets) = subject.gradient(variant), subject.tokens(0)
    gradient(model, tokens, targets, 0, 0)
    events, found = observe(lambda: gradient(model, tokens, targets, 0, 0), subject.device)
    apart = {grad.untyped_storage().data_ptr() for grad in found.grads.values()}
    return {
        "activations_mib": peak(events, apart) / MIB,
        "peak_mib": (3 * parameters + peak(events)) / MIB,
    }


def _fidelity(subject: Subject, variant: Variant) -> dict[str, Any]:
    """Over four batches: median and worst cosine, smallest displacement, largest residual."""
    names = ("median_cosine", "worst_cosine", "displacement", "residual")
    if variant.settings is None:
        return dict.fromkeys(names)
    settings = variant.settings.model_copy(update={"precision": "fp32"})
    gates = [fidelity_gate(subject.model, *subject.tokens(i), settings, 0, i) for i in range(4)]
    cosines = [cosine for gate in gates for cosine in gate.cosines.blocks]
    said = [gate.gradient.diagnostics for gate in gates]
    values = (
        median(cosines),
        min(cosines),
        min(max(one.displacement_ratio) for one in said),
        max(one.residual or 0.0 for one in said),
    )
    return dict(zip(names, values, strict=True))


def show(rows: list[dict[str, Any]]) -> None:
    """The table of one shape."""
    print(rows[0]["shape"])
    heads = ("s/step", "ratio", "interval", "FLOPs", "activ.", "peak", "cosine", "worst", "moved", "residual")
    print(f"{'':24}" + "".join(f"{head:>{15 if head == 'interval' else 9}}" for head in heads))
    for row in rows:
        interval = f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}"
        line = (
            f"{row['arm']:24}{row['step_seconds']:9.4f}{row['ratio']:9.3f}{interval:>15}"
            f"{row['flops_ratio']:9.3f}{row['activation_ratio']:9.3f}{row['peak_ratio']:9.3f}"
        )
        if row["median_cosine"] is not None:
            line += (
                f"{row['median_cosine']:9.5f}{row['worst_cosine']:9.5f}"
                f"{row['displacement']:9.1e}{row['residual']:9.4f}"
            )
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="LAYERSxWIDTHxTOKENSxSEQUENCES, may be repeated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("fp32", "amp"), default="fp32")
    parser.add_argument("--displacement", type=float, default=1.1e-3)
    parser.add_argument("--base-steps", type=int, default=100, help="steps of backpropagation beforehand")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="steps of a window")
    parser.add_argument("--compile", action="store_true", help="add arms with compiled blocks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    data = open_dataset(DataSettings(corpus="sotu"))
    compute = {"device": options.device, "threads": options.threads, "precision": options.precision}
    provenance = collect(seeds=[0], data=data.hashes, compute=compute)
    rows = []
    for spec in options.shape or SHAPES:
        subject = prepare(spec, options, data, device)
        chosen = variants(options.displacement, options.precision, options.compile)
        found = measure(subject, chosen, options.windows, options.steps)
        show(found)
        rows += found
    record = {"benchmark": "cost", "rows": rows, "load": os.getloadavg(), "provenance": close(provenance)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
