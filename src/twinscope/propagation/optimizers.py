"""The optimizers of a twin run: Muon for the blocks' matrices with AdamW for the rest, or AdamW alone.

Covers the learning-rate schedule, clipping by global norm, the update, and a state that continues bit for
bit. It does not judge gradients: whether one is finite, and whether to skip the step, is the loop's business.

What Muon takes are the two-dimensional parameters of the blocks, each whole: a fused projection (query,
key and value, or gate and up, stacked by rows) is one matrix. Embeddings, positions, norms, biases and
the head are AdamW's. Weight decay is decoupled and acts on every parameter with two dimensions or more,
embeddings included, under either optimizer; vectors (norm gains, biases) never decay.

Shapes: k matrices in a batch, n rows and m columns of a tall matrix (n ≥ m).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from twinscope.lab.errors import DataError
from twinscope.models.decoder import Decoder
from twinscope.propagation.gradients import parameter_names
from twinscope.propagation.settings import OptimizerSettings

#: AdamW's learning rate beside Muon where the settings name none.
DEFAULT_ADAMW_LR = 3e-3
#: Quintic Newton–Schulz iteration (Jordan 2024, "Muon: an optimizer for hidden layers in neural networks"):
#: x ↦ a·x + b·x³ + c·x⁵ on each singular value. Five of them bring any x in [0.002, 1] into [0.68, 1.21].
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_ITERATIONS = 5
#: A matrix of a smaller Frobenius norm is divided by this instead, so that zero stays zero.
_SMALLEST_NORM = 1e-7
#: Matrices of one shape are iterated together, in pairs and up to this many elements: one small matrix is too
#: little work for two threads, an odd one leaves a thread idle, and a batch larger than the cache is slower.
_BATCH_ELEMENTS = 2**18


def build_optimizer(model: Decoder, settings: OptimizerSettings, horizon: int) -> Optimizer:
    """The optimizer of ``model``, its state at zero; parameters that require no gradient are left alone.

    ``horizon`` is the number of steps over which the rate falls, unless ``settings`` fixes one: a run
    that is stopped, resumed or extended keeps the schedule it started with.
    """
    names = parameter_names(model)
    inner = [pair for block in names.blocks for pair in block]
    matrices = {name: p for name, p in inner if settings.kind == "muon" and p.dim() == 2}
    others = {name: p for name, p in [*inner, *names.outer] if name not in matrices}
    return Optimizer(matrices, others, settings, settings.horizon or horizon)


def learning_rate(settings: OptimizerSettings, horizon: int, index: int) -> float:
    """The rate of ``settings.lr`` at step ``index`` from 0: a function of its arguments alone.

    Linear up to ``lr`` over the first ``warmup`` steps (the first takes lr / warmup, the last lr), then half
    a cosine down to ``final_lr_fraction * lr`` at ``horizon``, where it stays.
    """
    return settings.lr * _scheduled_fraction(settings, horizon, index)


@torch.no_grad()
def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of each matrix near 1, by five Newton–Schulz iterations.

    Same coefficients, iterations and normalisation as ``torch.optim.Muon``, which computes in bfloat16;
    here ``dtype`` says what to compute in (None: :func:`newton_schulz_dtype`). Wide matrices are
    transposed, so that the Gram matrix has the smaller side; the result is the same.

    Args:
        matrices: ``(k, rows, columns)`` or ``(rows, columns)``, floating point; is not changed.

    Returns:
        A tensor of the same shape and dtype; its singular values lie near 1, those of a matrix that is
        nearly singular below.
    """
    wide = matrices.shape[-2] < matrices.shape[-1]
    tall = matrices.mT if wide else matrices
    batch = tall.reshape(-1, *tall.shape[-2:]).clone(memory_format=torch.contiguous_format)
    result = _orthogonalize_batch(batch, dtype or newton_schulz_dtype(matrices)).reshape(tall.shape)
    return result.mT if wide else result


def newton_schulz_dtype(matrix: Tensor) -> torch.dtype:
    """What to iterate in: float64 for float64, bfloat16 on a CUDA device that has it, else float32.

    CPUs without bfloat16 units emulate it at a small fraction of their float32 rate, so no CPU uses it.
    """
    if matrix.dtype == torch.float64:
        return torch.float64
    if matrix.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def newton_schulz_flops(rows: int, columns: int) -> int:
    """FLOPs of the matrix products in :func:`orthogonalize` of one matrix, 2 per multiply-add.

    Per iteration ``2nm²`` (Gram matrix), ``2m³`` (its square) and ``2nm²`` (the update), m the smaller side.
    """
    m, n = sorted((rows, columns))
    return NEWTON_SCHULZ_ITERATIONS * (4 * n * m**2 + 2 * m**3)


def _orthogonalize_batch(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`orthogonalize` of contiguous tall matrices ``(k, n, m)``, whose memory is used up."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    norm = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True)
    x = batch.div_(norm.clamp_(min=_SMALLEST_NORM)).to(dtype)
    next_x = torch.empty_like(x)  # (k, n, m)
    gram = x.new_empty(x.shape[0], x.shape[2], x.shape[2])  # (k, m, m)
    polynomial = torch.empty_like(gram)
    for _ in range(NEWTON_SCHULZ_ITERATIONS):
        torch.bmm(x.mT, x, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, x, polynomial, beta=a, out=next_x)
        x, next_x = next_x, x
    return x.to(batch.dtype)


class Optimizer:
    """Parameters by name, the moments that go with them, and the schedule; see :func:`build_optimizer`.

    No ``.grad`` is left on the parameters, and the position in the schedule is not part of the state: it
    is the index that each step is given.
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        settings: OptimizerSettings,
        horizon: int,
    ) -> None:
        self.settings = settings
        self.horizon = horizon
        self._matrices = dict(matrices)
        self._others = dict(others)
        self._batches = _batches_of_one_shape(matrices)
        # One tensor for each batch of tall matrices, so that threads share its elementwise work as a whole.
        self._momenta = [_stacked(matrices, names).zero_() for names in self._batches]
        decay = {True: settings.weight_decay, False: 0.0}
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in others.values() if (p.dim() >= 2) == is_matrix], "weight_decay": value}
                for is_matrix, value in decay.items()
            ],
            lr=0.0,  # set at every step
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        # torch makes these at the first step; made here, a state is complete at any time.
        for p in others.values():
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], index: int) -> dict[str, float]:
        """Update every parameter in place with the gradients of step ``index`` (from 0).

        ``grads`` holds one tensor per trainable parameter, of its shape and dtype; it is not changed.

        Returns:
            ``lr``, the scheduled rate of ``settings.lr``, and ``grad_norm``, the global L2 norm before
            clipping.

        Raises:
            ValueError: a parameter has no gradient, a gradient no parameter, or their shapes differ.
        """
        shapes = {name: p.shape for name, p in (self._matrices | self._others).items()}
        found = {name: grad.shape for name, grad in grads.items()}
        if strange := {name for name, _ in shapes.items() ^ found.items()}:
            raise ValueError(f"gradients and parameters differ in {_some(sorted(strange))}")
        norm = float(nn.utils.get_total_norm(grads.values()))
        clip = self.settings.clip
        scale = clip / norm if clip is not None and norm > clip else 1.0
        fraction = _scheduled_fraction(self.settings, self.horizon, index)
        rate = self.settings.lr * fraction
        adamw_rate = rate
        if self.settings.kind == "muon":
            adamw_rate = (self.settings.adamw_lr or DEFAULT_ADAMW_LR) * fraction
        for names, momenta in zip(self._batches, self._momenta, strict=True):
            self._muon_step(names, momenta, _stacked(grads, names).mul_(scale), rate)
        self._adamw_step(grads, scale, adamw_rate)
        return {"lr": rate, "grad_norm": norm}

    def state(self) -> dict[str, Tensor]:
        """A copy of all moments: ``muon.momentum.<name>``, ``adamw.{step,exp_avg,exp_avg_sq}.<name>``."""
        return {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in self._live_state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what :meth:`state` returned, bit for bit; on any doubt nothing is changed.

        Raises:
            DataError: a tensor is missing, unexpected, or of another shape or dtype; names it.
        """
        own = self._live_state()
        belongs = "it belongs to another model or another kind of optimizer"
        if missing := own.keys() - state.keys():
            raise DataError(f"the optimizer state lacks {_some(sorted(missing))}: {belongs}")
        if unexpected := state.keys() - own.keys():
            raise DataError(f"the optimizer state holds {_some(sorted(unexpected))} without use: {belongs}")
        for name, target in own.items():
            found = state[name]
            if found.shape != target.shape or found.dtype != target.dtype:
                raise DataError(
                    f"the optimizer state {name} is {_kind(found)} but this model needs {_kind(target)}: "
                    "continue with the model and precision it was saved from"
                )
        for name, target in own.items():
            target.copy_(state[name])

    def _live_state(self) -> dict[str, Tensor]:
        state = {
            f"muon.momentum.{name}": _laid_as(momentum, self._matrices[name])
            for names, momenta in zip(self._batches, self._momenta, strict=True)
            for name, momentum in zip(names, momenta, strict=True)
        }
        for name, p in self._others.items():
            state |= {f"adamw.{key}.{name}": tensor for key, tensor in self._adamw.state[p].items()}
        return state

    def _muon_step(self, names: list[str], momenta: Tensor, grads: Tensor, rate: float) -> None:
        """One batch, ``momenta`` and ``grads`` (k, n, m), in the conventions of ``torch.optim.Muon``.

        Nesterov momentum on a moving average, decoupled decay, and ``rate * √max(1, rows/columns)``, which
        gives the outputs of a tall matrix the RMS change of those of a square one. ``grads`` is used up.
        """
        momenta.lerp_(grads, 1 - self.settings.momentum)
        directions = grads.lerp_(momenta, self.settings.momentum)
        updates = _orthogonalize_batch(directions, newton_schulz_dtype(directions))
        for name, update in zip(names, updates, strict=True):
            p = self._matrices[name]
            rows, columns = p.shape
            p.mul_(1 - rate * self.settings.weight_decay)
            p.add_(_laid_as(update, p), alpha=-rate * math.sqrt(max(1, rows / columns)))

    def _adamw_step(self, grads: Mapping[str, Tensor], scale: float, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        for name, p in self._others.items():
            # The fused kernel walks both in memory order, so they must be laid out alike.
            p.grad = torch.empty_like(p).copy_(grads[name]).mul_(scale)
        self._adamw.step()
        for p in self._others.values():
            p.grad = None


def _scheduled_fraction(settings: OptimizerSettings, horizon: int, index: int) -> float:
    if index < settings.warmup:
        return (index + 1) / settings.warmup
    progress = min(1.0, (index - settings.warmup) / max(1, horizon - settings.warmup))
    final = settings.final_lr_fraction
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def _batches_of_one_shape(matrices: Mapping[str, Tensor]) -> list[list[str]]:
    """The names, grouped by shape up to transposition and then cut into batches of an even size."""
    by_shape: dict[torch.Size, list[str]] = {}
    for name, matrix in matrices.items():
        by_shape.setdefault(_tall(matrix).shape, []).append(name)
    batches = []
    for shape, names in by_shape.items():
        size = max(2, _BATCH_ELEMENTS // shape.numel() // 2 * 2)
        batches += [names[start : start + size] for start in range(0, len(names), size)]
    return batches


def _stacked(tensors: Mapping[str, Tensor], names: list[str]) -> Tensor:
    """A new tensor ``(k, n, m)`` of the named matrices, each of them tall."""
    return torch.stack([_tall(tensors[name].detach()) for name in names])


def _tall(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] < matrix.shape[1] else matrix


def _laid_as(tall: Tensor, matrix: Tensor) -> Tensor:
    return tall.mT if matrix.shape[0] < matrix.shape[1] else tall


def _some(names: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _kind(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
