"""What could cost less than the floor of five passes, and what it does to equilibrium propagation.

A fused EP step with one round is a free pass, forces, a rebuild and a read of two: 5F, against 3F for
backpropagation. The first two only decide where the states are displaced. Each attempt replaces them by
something cheaper; the rebuild and the read at the displaced states stay the package's own, and so do the
displacement and the residual that decide whether it still counts (METHOD 1.2: displacement 1e-3 or more,
residual 0.1 or less, in every block). FLOPs are counted by the dispatcher; seconds are of the bare gradient,
in turn with backpropagation's. A fresh and a briefly trained model are tried, each on a batch that nothing
was chosen or fitted on. Prints a table and writes results/below_floor.json.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from twinscope import EPSettings, GPTConfig, bp_gradient, build_gpt
from twinscope.lab.provenance import close, collect
from twinscope.models.decoder import Decoder
from twinscope.models.gpt import GPT, Block
from twinscope.propagation.cost.counting import count
from twinscope.propagation.cost.timing import sweep_order, synchronizer
from twinscope.propagation.estimators import ep_gradient
from twinscope.propagation.gates import cosines
from twinscope.propagation.gradients import Diagnostics, Gradient, GradientSum, parameter_names
from twinscope.propagation.nudged import Start, begin, displacement_factors, nudged_phase, unit_ratios
from twinscope.propagation.optimizers import build_optimizer
from twinscope.propagation.phases import Free, Problem, problem_of, summed_cross_entropy, top, trace_block
from twinscope.propagation.settings import OptimizerSettings
from twinscope.text.batches import train_batch
from twinscope.text.datasets import DataSettings, open_dataset

RESULTS = Path(__file__).parent / "results" / "below_floor.json"
DISPLACEMENT = 1.1e-3
LEAST_DISPLACEMENT, MOST_RESIDUAL = 1e-3, 0.1
#: The residual that the chosen shortcuts may have on the batch they are chosen on.
CHOSEN_RESIDUAL = 0.08

#: An adjoint (B, T, C) above a block to the one below it.
Down = Callable[[Tensor], Tensor]
#: Runs a block on a state (B, T, C): its output, and how adjoints go down through it.
Passage = Callable[[Block, Tensor], tuple[Tensor, Down]]
#: Free states and first adjoints of a problem.
Where = Callable[[Problem], Start]


def exact(block: Block, z: Tensor) -> tuple[Tensor, Down]:
    """The block's own VJP."""
    leaf = z.detach().requires_grad_()
    with torch.enable_grad():
        output = block(leaf)
    return output.detach(), partial(_vjp, output, leaf)


def identity(block: Block, z: Tensor) -> tuple[Tensor, Down]:
    """The block runs, and its Jacobian counts as the identity."""
    return block(z), lambda adjoint: adjoint


def absent(block: Block, z: Tensor) -> tuple[Tensor, Down]:
    """The block is left out of both passes."""
    return z, lambda adjoint: adjoint


def through_mlp(block: Block, z: Tensor) -> tuple[Tensor, Down]:
    """The MLP's VJP; attention's Jacobian counts as the identity."""
    h = (z + block.attn(block.attn_norm(z))).requires_grad_()
    with torch.enable_grad():
        output = h + block.mlp(block.mlp_norm(h))
    return output.detach(), partial(_vjp, output, h)


def through_values(block: Block, z: Tensor) -> tuple[Tensor, Down]:
    """The VJP with attention's probabilities held fixed: no way down through queries and keys."""
    attention = block.attn
    count_, heads, width = z.shape[1], attention.heads, attention.head_width
    rows = heads * width
    leaf = z.detach().requires_grad_()
    with torch.enable_grad():
        x = block.attn_norm(leaf)
        with torch.no_grad():
            weight, bias = attention.qkv.weight, attention.qkv.bias
            queries, keys = F.linear(x, weight[: 2 * rows], bias[: 2 * rows]).split(rows, dim=-1)
            q, k = (part.unflatten(-1, (heads, width)).transpose(1, 2) for part in (queries, keys))
            mask = torch.ones(count_, count_, dtype=torch.bool, device=z.device).tril_()
            scores = (q @ k.mT).mul_(width**-0.5).masked_fill_(~mask, -math.inf)
            probabilities = scores.softmax(-1)
        v = F.linear(x, weight[2 * rows :], bias[2 * rows :]).unflatten(-1, (heads, width)).transpose(1, 2)
        h = leaf + attention.out((probabilities @ v).transpose(1, 2).flatten(-2))
        output = h + block.mlp(block.mlp_norm(h))
    return output.detach(), partial(_vjp, output, leaf)


def by_matrix(matrix: Tensor) -> Passage:
    """The Jacobian of every token counts as the identity plus one matrix (C, C), fitted beforehand."""
    return lambda block, z: (block(z), lambda adjoint: adjoint + adjoint @ matrix)


def passing(passages: Sequence[Passage]) -> Where:
    """Where the states go by one passage for each of blocks 1 … L; block 1's is never taken."""

    def where(problem: Problem) -> Start:
        model = problem.model
        with torch.enable_grad(), problem.cast():
            embedded = model.embed(problem.tokens)
        states = [embedded.detach()]
        output, first = trace_block(problem, 0, states[0], weights=True)
        states.append(output)
        downs: list[Down] = []
        with _frozen(model), torch.no_grad():
            for index in range(1, len(model.blocks)):
                output, down = passages[index](model.blocks[index], states[-1])  # type: ignore[arg-type]
                states.append(output.detach())
                downs.append(down)
            at_top = top(problem, states[-1])
            adjoints = [at_top.adjoint]
            while downs:
                adjoints.append(downs.pop()(adjoints[-1]))
        free = Free(embedded, states, [first])
        return Start(problem, parameter_names(model), free, at_top.cost, adjoints[::-1])

    return where


def in_context(context: Callable[[], Any], passage: Passage) -> Passage:
    """A passage inside a context, its way down too."""

    def inside(block: Block, z: Tensor) -> tuple[Tensor, Down]:
        with context():
            output, down = passage(block, z)

        def below(adjoint: Tensor) -> Tensor:
            with context():
                return down(adjoint).to(z.dtype)

        return output.to(z.dtype), below

    return inside


class _Int8(torch.autograd.Function):
    """A linear map with weights and, batch by batch, activations rounded to 8 bits; down as well as up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _int8_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # torch rounds with a scale of 6e-5 at least, and adjoints are smaller than that.
        largest = grad.abs().max().clamp_min(1e-30)
        return _int8_product(grad / largest, ctx.weight.t().contiguous(), None) * largest, None, None


class Int8Linear(TorchFunctionMode):
    """Sends every linear map through 8-bit products, which torch has for CPUs and means to remove."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _Int8.apply(args[0], args[1], args[2] if len(args) > 2 else (kwargs or {}).get("bias"))
        return func(*args, **(kwargs or {}))


def _int8_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale = max(float(weight.abs().max()) / 127, 1e-12)
        quantized = torch.quantize_per_tensor(weight, scale, 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, bias)
        # Without the reduced range, instruction sets before VNNI may overflow in 16 bits.
        return torch.ops.quantized.linear_dynamic(x.contiguous(), packed, reduce_range=True)


def half_of_the_texts(problem: Problem) -> Start:
    """Free pass and forces for half of the texts; the other half is not nudged."""
    rows = problem.tokens.shape[0] // 2
    part = begin(problem.model, problem.tokens[:rows], problem.targets[:rows])
    with torch.enable_grad():
        embedded = problem.model.embed(problem.tokens)
    output, first = trace_block(problem, 0, embedded.detach(), weights=True)
    share = rows / problem.tokens.shape[0]
    adjoints = [share * torch.cat([a, torch.zeros_like(a)]) for a in part.adjoints]
    states = [embedded.detach(), output, *part.free.states[2:]]
    return Start(problem, part.names, Free(embedded, states, [first]), part.cost / share, adjoints)


class Foot(nn.Module, Decoder):
    """The same GPT with its lowest blocks counted as embedding: one clamped layer that is not relaxed."""

    def __init__(self, gpt: GPT, blocks: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.lowest = blocks
        self.blocks = nn.ModuleList(list(gpt.blocks)[blocks:])

    def embed(self, tokens: Tensor) -> Tensor:
        z = self.gpt.embed(tokens)
        for block in list(self.gpt.blocks)[: self.lowest]:
            z = block(z)
        return z

    def readout(self, z: Tensor) -> Tensor:
        return self.gpt.readout(z)


def estimate(model: Decoder, where: Where, tokens: Tensor, targets: Tensor, diagnose: bool) -> Gradient:
    """The fused EP gradient with one round, from a start of any making."""
    problem = problem_of(model, tokens, targets, "fp32", summed_cross_entropy)
    start = where(problem)
    beta = DISPLACEMENT / max(unit_ratios(start))
    factors = displacement_factors(start, [1.0] * len(model.blocks), 1, beta)
    grads = GradientSum(model)
    settings = EPSettings(rounds=1, nudge="positive")
    outcome = nudged_phase(start, settings, factors, grads, diagnose=diagnose)
    outer = parameter_names(model).outer
    found = torch.autograd.grad(start.free.embedded, [p for _, p in outer], outcome.below, allow_unused=True)
    grads.add(outer, found)
    said = Diagnostics("ep", 1, beta, (1,), [], outcome.displacement_ratio, outcome.residual)
    return Gradient(start.loss, grads.result(), said)


def chosen_passages(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[list[Passage], str]:
    """From the top down, the cheapest passage whose adjoint stays within a bound that rises to the limit."""
    layers = len(model.blocks)
    start = begin(model, tokens, targets)
    known, states = start.adjoints, start.free.states
    menu = {"identity": identity, "mlp": through_mlp, "values": through_values, "exact": exact}
    passages: list[Passage] = [exact] * layers
    names = ["none"] * layers
    adjoint = known[-1]
    with _frozen(model), torch.no_grad():
        for index in reversed(range(1, layers)):
            bound = CHOSEN_RESIDUAL * (layers - index) / (layers - 1)
            for name, passage in menu.items():
                below = passage(model.blocks[index], states[index])[1](adjoint)  # type: ignore[arg-type]
                passages[index], names[index] = passage, name
                if float((below - known[index - 1]).norm() / known[index - 1].norm()) <= bound:
                    break
            adjoint = below
    return passages, " ".join(names[1:])


def fitted_matrices(model: GPT, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Passage]:
    """For each block the matrix that takes its adjoints down best, by least squares over tokens."""
    above: list[list[Tensor]] = [[] for _ in model.blocks]
    for tokens, targets in batches:
        for found, adjoint in zip(above, begin(model, tokens, targets).adjoints, strict=True):
            found.append(adjoint.flatten(0, 1) / adjoint.norm())
    stacked = [torch.cat(found).double() for found in above]
    passages: list[Passage] = [exact]
    for upper, lower in zip(stacked[1:], stacked, strict=False):
        ridge = 1e-3 * upper.square().sum() / upper.shape[1] * torch.eye(upper.shape[1], device=upper.device)
        solved = torch.linalg.solve(upper.mT @ upper + ridge, upper.mT @ (lower - upper))
        passages.append(by_matrix(solved.float()))
    return passages


def trained(shape: GPTConfig, data: Any, steps: int, batch: int, device: torch.device) -> GPT:
    """The shape after so many steps of backpropagation."""
    model = build_gpt(shape, device=device)
    optimizer = build_optimizer(model, OptimizerSettings(lr=1e-3, warmup=min(40, steps)), max(steps, 1))
    for step in range(steps):
        drawn = (
            torch.from_numpy(part).to(device) for part in train_batch(data, shape.context, batch, 0, step)
        )
        optimizer.step(bp_gradient(model, *drawn).grads, step)
    return model


def measure(
    model: GPT, batches: Sequence[tuple[Tensor, Tensor]], sweeps: int, only: str
) -> list[dict[str, Any]]:
    """A row for every attempt on one model, on the first batch; the others are for choosing and fitting.

    ``only`` keeps the attempts whose name has it, and the exact one.
    """
    (tokens, targets), *others = batches
    layers = len(model.blocks)
    passages, description = chosen_passages(model, *others[0])
    half, every = layers // 2, range(layers)
    alternate = [identity if index % 2 else exact for index in every]
    sparse = [absent if index % 2 else exact for index in every]
    upper = [exact if index < layers // 3 else through_values for index in every]
    attempts: dict[str, tuple[Decoder, Where]] = {
        "exact (the floor)": (model, passing([exact] * layers)),
        "no forces: identity in every block": (model, passing([identity] * layers)),
        "identity in every other block": (model, passing(alternate)),
        "every other block left out of both passes": (model, passing(sparse)),
        "attention by identity": (model, passing([through_mlp] * layers)),
        "attention's probabilities fixed": (model, passing([through_values] * layers)),
        "attention's probabilities fixed above the lowest third": (model, passing(upper)),
        f"cheapest that fits, block by block ({description})": (model, passing(passages)),
        "one fitted matrix a block": (model, passing(fitted_matrices(model, others))),
        "half of the texts": (model, half_of_the_texts),
        f"lowest {half} blocks as one clamped layer": (Foot(model, half), begin_of),
        "bf16 in free pass and forces": (model, passing([in_context(_bf16(tokens.device), exact)] * layers)),
    }
    if tokens.device.type == "cpu":
        # The dispatcher's table has no formula for 8-bit products: they are missing from the FLOPs.
        attempts["int8 in free pass and forces"] = (model, passing([in_context(Int8Linear, exact)] * layers))
    attempts = {name: found for name, found in attempts.items() if only in name or "exact (" in name}
    reference = bp_gradient(model, tokens, targets)
    whole = count(lambda: bp_gradient(model, tokens, targets)).total
    rows = []
    for name, (decoder, where) in attempts.items():
        found = estimate(decoder, where, tokens, targets, True)
        renamed = Gradient(found.loss, _renamed(found.grads), found.diagnostics)
        values = cosines(model, renamed.grads, reference.grads).blocks
        said = found.diagnostics
        assert said.residual is not None
        # The other texts' states have no displacement to be compared with; a clamped layer has none at all.
        everywhere = "texts" not in name and "clamped" not in name
        rows.append(
            {
                "attempt": name,
                "flops_ratio": count(lambda d=decoder, w=where: estimate(d, w, tokens, targets, False)).total
                / whole,
                "median_cosine": median(values),
                "worst_cosine": min(values),
                "displacement": max(said.displacement_ratio),
                "residual": said.residual,
                "displaced_everywhere": everywhere,
                "valid": everywhere
                and max(said.displacement_ratio) >= LEAST_DISPLACEMENT
                and said.residual <= MOST_RESIDUAL,
            }
        )
    steps = {name: partial(estimate, d, w, tokens, targets, False) for name, (d, w) in attempts.items()}
    for row, ratio in zip(rows, ratios(model, steps, tokens, targets, sweeps), strict=True):
        row["seconds_ratio"] = ratio
    return rows


def ratios(
    model: GPT, steps: dict[str, Callable[[], object]], tokens: Tensor, targets: Tensor, sweeps: int
) -> list[float]:
    """Seconds of every step over backpropagation's of the same sweep, the median over sweeps."""
    wait = synchronizer(tokens.device)
    everything = {"bp": partial(bp_gradient, model, tokens, targets), **steps}
    seconds: dict[str, list[float]] = {name: [] for name in everything}
    for sweep, name in sweep_order(list(everything), sweeps + 1):
        wait()
        began = time.perf_counter()
        everything[name]()
        wait()
        if sweep:
            seconds[name].append(time.perf_counter() - began)
    return [median(a / b for a, b in zip(seconds[name], seconds["bp"], strict=True)) for name in steps]


def begin_of(problem: Problem) -> Start:
    """The package's own start."""
    return begin(problem.model, problem.tokens, problem.targets)


@contextmanager
def _frozen(model: Decoder) -> Iterator[None]:
    """No parameter in any graph made inside."""
    parameters = [p for _, p in model.named_parameters()]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _bf16(device: torch.device) -> Callable[[], Any]:
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def _vjp(output: Tensor, leaf: Tensor, adjoint: Tensor) -> Tensor:
    return torch.autograd.grad(output, leaf, adjoint.to(output.dtype))[0]


def _renamed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a :class:`Foot` under the names of its GPT."""
    return {name.removeprefix("gpt."): grad for name, grad in grads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="training steps of the trained model")
    parser.add_argument("--sweeps", type=int, default=6)
    parser.add_argument("--only", default="", help="attempts whose name has this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    data = open_dataset(DataSettings(corpus="sotu"))
    shape = GPTConfig(
        vocab=data.vocab, layers=options.layers, width=options.width, heads=max(1, options.width // 64),
        context=options.context,
    )  # fmt: skip
    compute = {"device": options.device, "threads": options.threads, "precision": "fp32"}
    provenance = collect(seeds=[0], data=data.hashes, compute=compute)
    drawn = [train_batch(data.train, shape.context, options.batch, 1, index) for index in range(9)]
    batches = [(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)) for x, y in drawn]
    rows = []
    print(f"{'':44} {'FLOPs':>6} {'seconds':>7} {'median':>8} {'worst':>8} {'moved':>8} {'residual':>8}")
    for start, steps in (("fresh", 0), (f"after {options.steps} steps", options.steps)):
        model = trained(shape, data.train, steps, options.batch, device)
        settings = EPSettings(displacement=DISPLACEMENT, rounds=1, nudge="positive")
        usual = ep_gradient(model, *batches[0], settings)
        own = estimate(model, passing([exact] * options.layers), *batches[0], True)
        # The frame in which attempts are made is the package's: with exact passages it gives its gradient.
        assert all(torch.allclose(own.grads[n], g, rtol=1e-3, atol=1e-7) for n, g in usual.grads.items())
        for row in measure(model, batches, options.sweeps, options.only):
            rows.append({"start": start, **row})
            verdict = "counts" if row["valid"] else "does not count"
            print(
                f"{start}: {row['attempt']}\n{'':44} {row['flops_ratio']:6.3f} {row['seconds_ratio']:7.3f} "
                f"{row['median_cosine']:8.5f} {row['worst_cosine']:8.5f} {row['displacement']:8.1e} "
                f"{row['residual']:8.4f}  {verdict}",
                flush=True,
            )
    record = {
        "benchmark": "below_floor",
        "shape": shape.model_dump(),
        "batch": options.batch,
        "rows": rows,
        "provenance": close(provenance),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
