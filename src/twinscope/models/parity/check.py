"""Parity: does the streamed forward of a folder equal the library's own, in states and in loss?

Covers the texts it is tried on, the comparison, and a receipt in the cache that holds for these weights, this
code and these versions alone. The library runs in a process of its own (``reference.py``): as a whole
where the memory allows it, else layer by layer on the streamed residuals. Parity supports no statement about
reuse.

Shapes: B texts, T positions, C channels, L layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinscope.lab.budget import available_mib, peak_rss_mib
from twinscope.lab.draws import generator
from twinscope.lab.durable import write_atomic, writing
from twinscope.lab.errors import ConfigError, DataError, Stopped, TwinscopeError
from twinscope.lab.provenance import utc_now
from twinscope.lab.run import cache_root
from twinscope.models.store.origin import file_sha256
from twinscope.models.streamed.model import StreamedLM, open_streamed
from twinscope.models.tensor_files import open_tensors

Method = Literal["auto", "whole", "layers"]
HIDDEN_TOLERANCE, NLL_TOLERANCE = 1e-5, 1e-4
_VERSIONED = ("torch", "transformers", "safetensors", "twinscope")
#: The modules of models/ that a streamed forward consists of.
_CODE = ("streamed/*.py", "tensor_files.py", "tensor_headers.py")
_PASSAGES = (
    "The river had been rising since the morning, and by the time the lamps were lit the lower road was "
    "gone. Nobody in the village was surprised, because it happened in most years, and the boats lay "
    "already tied to the fence behind the school. What troubled them was the bridge, which had cost 1,200.",
    "A sum of many small errors need not be small, but it is often far smaller than the largest bound that "
    "one can prove for it. The reason is that rounding goes up about as often as it goes down; where it does "
    "not, as in a long running total, the order of the terms matters and can be chosen with care.",
)


@dataclass(frozen=True)
class TextParity:
    """One text: relative difference of the final states, largest difference of the loss, and both losses.

    ``hidden_difference`` is ‖streamed − library‖ / ‖library‖ over tokens and channels; losses are means in
    nats per token, their difference the largest over tokens.
    """

    kind: Literal["real", "random"]
    hidden_difference: float
    nll_difference: float
    nll_streamed: float
    nll_library: float


@dataclass(frozen=True)
class Parity:
    """What came out.

    ``layers`` holds the relative difference of what enters each layer, where that was looked at: always by
    the method ``layers``, where it then is the error of the part before alone, else only if parity failed.
    ``first_part`` is the first part of the model that differs by more than the tolerance, None if none does.
    ``peak_rss_mib`` is that of the streaming process; ``notes`` are what was decided when it was opened.
    """

    passed: bool
    method: Literal["whole", "layers"]
    tokens: int
    texts: list[TextParity]
    layers: list[float]
    first_part: str | None
    bit_equal: bool
    hidden_tolerance: float
    nll_tolerance: float
    weights_sha256: str
    versions: dict[str, str]
    peak_rss_mib: float
    notes: list[str]
    made: str

    @property
    def hidden_difference(self) -> float:
        """The worst of the texts."""
        return max(text.hidden_difference for text in self.texts)

    @property
    def nll_difference(self) -> float:
        """The worst of the texts."""
        return max(text.nll_difference for text in self.texts)


def check_parity(
    folder: Path | str,
    *,
    texts: int = 4,
    tokens: int = 32,
    seed: int = 0,
    method: Method = "auto",
    budget_mib: float | None = 512,
    hidden_tolerance: float = HIDDEN_TOLERANCE,
    nll_tolerance: float = NLL_TOLERANCE,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Parity:
    """Compare the streamed forward of ``folder`` with the library's on a few texts, and keep a receipt.

    Half of the texts are real where the folder has a tokenizer, the rest random ids, a function of ``seed``.
    Both sides compute in float32 on the CPU with this process's number of threads. ``progress`` is called
    between the parts and may raise to stop.

    Raises:
        DataError: the folder cannot be opened, or the library cannot load it.
        ConfigError: no such family, or a ``method`` that the memory or the family does not allow.
        Stopped: memory or time ran out, or ``progress`` raised it.
    """
    folder = Path(folder).expanduser().absolute()
    progress(0, 5, "hashing the weights")
    key, weights = _receipt_key(folder)
    with open_streamed(folder, budget_mib=budget_mib) as lm:
        ids, kinds = choose_ids(folder, lm.vocab, texts, tokens, seed)
        chosen = _method(lm, method, ids)
        progress(1, 5, "streamed states")
        streamed = {"hidden": lm.hidden(ids)}
        progress(2, 5, "streamed loss")
        streamed["nll"] = lm.nll(ids)
        given = {"ids": ids}
        if chosen == "layers":
            progress(3, 5, "streamed states of every layer")
            streamed |= _states(lm, ids)
            given |= streamed
        peak = peak_rss_mib()
        progress(4, 5, f"the library, {'as a whole' if chosen == 'whole' else 'layer by layer'}")
        library = _library(
            folder, chosen, lm.config._attn_implementation, given, lambda: progress(4, 5, "the library")
        )
        compared = [
            TextParity(
                kind,
                _relative(streamed["hidden"][b], library["hidden"][b]),
                _largest(streamed["nll"][b], library["nll"][b]),
                streamed["nll"][b].double().mean().item(),
                library["nll"][b].double().mean().item(),
            )
            for b, kind in enumerate(kinds)
        ]
        if chosen == "whole" and _first_part(compared, [], hidden_tolerance, nll_tolerance) is not None:
            progress(3, 5, "where they part")
            streamed |= _states(lm, ids)
        layers = [
            _relative(streamed[name], library[name])
            for name in (f"states.{number}" for number in range(lm.layers))
            if name in streamed and name in library
        ]
    first = _first_part(compared, layers, hidden_tolerance, nll_tolerance)
    parity = Parity(
        passed=first is None,
        method=chosen,
        tokens=tokens,
        texts=compared,
        layers=layers,
        first_part=first,
        bit_equal=torch.equal(streamed["hidden"], library["hidden"]),
        hidden_tolerance=hidden_tolerance,
        nll_tolerance=nll_tolerance,
        weights_sha256=weights,
        versions=_versions(),
        peak_rss_mib=peak,
        notes=list(lm.notes),
        made=utc_now(),
    )
    path = _receipt(key)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(asdict(parity), indent=2, allow_nan=False).encode() + b"\n")
    return parity


def find_parity(folder: Path | str) -> Parity | None:
    """The receipt of an earlier check of these weights with this code and these versions, or None.

    Reads every byte of the weights to know that they are the same. A receipt may say that parity failed.

    Raises:
        DataError: the folder's weights cannot be read.
    """
    path = _receipt(_receipt_key(Path(folder).expanduser().absolute())[0])
    try:
        stored = json.loads(path.read_bytes())
        texts = [TextParity(**text) for text in stored.pop("texts")]
        return Parity(texts=texts, **stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def choose_ids(
    folder: Path, vocab: int, texts: int, tokens: int, seed: int
) -> tuple[Tensor, list[Literal["real", "random"]]]:
    """Token ids ``(texts, tokens)`` int64, and what each text is.

    Raises:
        ConfigError: no text, or texts of fewer than two tokens.
    """
    if texts < 1 or tokens < 2:
        raise ConfigError(f"{texts} texts of {tokens} tokens show nothing: use 1 or more of 2 or more")
    rows: list[Tensor] = []
    kinds: list[Literal["real", "random"]] = []
    for passage in _passages(folder)[: texts // 2]:
        if len(passage) >= tokens and max(passage[:tokens]) < vocab:
            rows.append(torch.tensor(passage[:tokens]))
            kinds.append("real")
    for index in range(texts - len(rows)):
        drawn = generator(seed, "parity", index).integers(0, vocab, tokens)
        rows.append(torch.from_numpy(drawn))
        kinds.append("random")
    return torch.stack(rows), kinds


def _passages(folder: Path) -> list[list[int]]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return []
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for malformed files
        raise DataError(f"{path} is no tokenizer.json ({error}): bring the model's own") from None
    return [tokenizer.encode(passage, add_special_tokens=False).ids for passage in _PASSAGES]


def _states(lm: StreamedLM, ids: Tensor) -> dict[str, Tensor]:
    """The residual stream that enters each layer, as ``states.l``; none for a family without known layers."""
    try:
        first: dict[int, str] = {}
        for kind in ("attention", "linear_attention", "mlp"):
            for site in lm.sites(kind):
                first.setdefault(int(site.split(".")[1]), site)
        sites = set(first.values())
        return {
            f"states.{point.site.split('.')[1]}": point.z.clone()
            for point in lm.walk(ids, sites)
            if point.site in sites
        }
    except ConfigError:
        return {}


def _first_part(
    texts: list[TextParity], layers: list[float], hidden_tolerance: float, nll_tolerance: float
) -> str | None:
    """The first part of the model whose result differs by more than the tolerance."""
    for number, difference in enumerate(layers):
        if difference > hidden_tolerance:
            return "embedding" if number == 0 else f"layers.{number - 1}"
    if any(text.hidden_difference > hidden_tolerance for text in texts):
        return f"layers.{len(layers) - 1} or the last norm" if layers else "hidden states"
    if any(text.nll_difference > nll_tolerance for text in texts):
        return "head"
    return None


def _method(lm: StreamedLM, method: Method, ids: Tensor) -> Literal["whole", "layers"]:
    values = sum(math.prod(lm.files.entry(name).shape) for name in lm.files.names)
    logits = ids.shape[1] * lm.vocab * 12 / 2**20
    needed = 1.25 * values * 4 / 2**20 + logits + 1024
    left = available_mib()
    if method == "whole" or (method == "auto" and needed <= left):
        if needed > left:
            raise ConfigError(
                f"the whole model takes about {needed:,.0f} MiB in the library, {left:,.0f} MiB are left: "
                "use --method layers"
            )
        return "whole"
    return "layers"


def _library(
    folder: Path, method: str, attention: str, given: dict[str, Tensor], waiting: Callable[[], None]
) -> dict[str, Tensor]:
    """What ``parity_reference.main`` answers, run in a process of its own."""
    with TemporaryDirectory(prefix="twinscope-parity-") as work:
        place = Path(work)
        request = {
            "folder": str(folder), "method": method, "attention": attention,
            "threads": torch.get_num_threads(),
        }  # fmt: skip
        (place / "request.json").write_text(json.dumps(request))
        save_file({name: value.contiguous() for name, value in given.items()}, place / "given.safetensors")
        program = "import sys; from twinscope.models.parity.reference import main; main(sys.argv[1])"
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", program, work],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0"},
            )
            try:
                while True:
                    try:
                        process.wait(0.2)
                        break
                    except subprocess.TimeoutExpired:
                        waiting()
            finally:
                process.kill()
                process.wait()
        if (place / "error.txt").is_file():
            raise DataError((place / "error.txt").read_text())
        if process.returncode == -9:
            raise Stopped(
                "the library's forward was killed, as happens when memory runs out: free some, or use "
                "--method layers"
            )
        if process.returncode:
            lines = [line for line in (place / "log").read_text(errors="replace").split("\n") if line.strip()]
            raise TwinscopeError(f"the library's forward of {folder} failed ({lines[-1] if lines else '?'})")
        return {name: value.clone() for name, value in load_file(place / "answer.safetensors").items()}


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """‖ours − theirs‖ / ‖theirs‖ in float64; what is not finite counts as entirely different."""
    a, b = ours.double(), theirs.double()
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return sys.float_info.max
    difference, size = (a - b).norm().item(), b.norm().item()
    if size == 0:
        return 0.0 if difference == 0 else sys.float_info.max
    return difference / size


def _largest(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; what is not finite counts as entirely different."""
    found = (ours.double() - theirs.double()).abs().max().item()
    return found if found < sys.float_info.max else sys.float_info.max


def _receipt_key(folder: Path) -> tuple[str, str]:
    """The name of the receipt, and the hash of the weights that is part of it."""
    with open_tensors(folder) as files:
        weights = files.sha256()
    here = Path(__file__).parents[1]
    code = sorted({path for pattern in _CODE for path in here.glob(pattern)})
    parts = {
        "weights": weights,
        "config": file_sha256(folder / "config.json"),
        "versions": _versions(),
        "code": {path.name: file_sha256(path) for path in code},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(), weights


def _receipt(key: str) -> Path:
    return cache_root() / "parity" / f"{key}.json"


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _VERSIONED}
