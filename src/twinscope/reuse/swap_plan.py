"""What a replacement fixes before anything is read: the pair, both directions, texts, margin, nulls, budgets.

Covers the sealed content of a ``swap`` run in either mode, its file, and the refusal of one that changed. It
stands on the sealed plan of a scan and takes model, margin, seed and compute from there. The seal is that of
plan.py. Which texts there are is decided in swap_texts.py, which pair in swap_run.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinscope.lab.errors import DataError
from twinscope.lab.provenance import utc_now
from twinscope.lab.record import decode, encode
from twinscope.reuse import nulls
from twinscope.reuse.branches import Comparison
from twinscope.reuse.plan import Pair, Plan, comparisons_of, pair_content, seal
from twinscope.reuse.reuse_config import Budgets
from twinscope.reuse.scan import Group
from twinscope.reuse.swap_texts import BYTES_COUNTED, SwapTexts
from twinscope.reuse.texts import Passage, Split

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

FORMAT = "twinscope.swap/1"
SWAP_FILE = "swap.json"
#: The scan's record as it was when this run began; the plan lies beside it as ``plan.json``.
SCAN_FILE = "scan-result.json"
#: The power with which a true change of 0 is to be found equivalent, and the level of each one-sided test.
POWER, ALPHA = 0.8, 0.05
#: Nulls beside every direction, as the run states them.
NULLS = (
    "zero: the branch adds nothing",
    "mean: the branch adds its mean update over calibration tokens",
    "other: modules of the same kind, matched in depth, in the same place",
    "self: the site itself in its own place, which must change exactly nothing",
)
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class SwapPlan:
    """The sealed content of a ``swap`` run as plain JSON, its seal, and when it was sealed."""

    content: dict[str, Any]
    sealed: str
    sealed_at: str

    @property
    def mode(self) -> str:
        """``pair | sweep``."""
        return str(self.content["mode"])

    @property
    def texts(self) -> list[Passage]:
        """The passages, calibration first."""
        return [
            Passage(item["name"], item["split"], item["origin"], tuple(item["ids"]), item["text"])
            for item in self.content["texts"]["passages"]
        ]

    @property
    def nbytes(self) -> dict[str, int | None]:
        """UTF-8 bytes of the predicted tokens of each text, by its name; None where they are not known."""
        return {item["name"]: item["bytes"] for item in self.content["texts"]["passages"]}

    @property
    def pair(self) -> Pair:
        """The pair whose sites replace each other, in the mode ``pair``."""
        item = self.content["pair"]
        return Pair(
            item["id"], item["kind"], item["left"], item["right"], comparisons_of(item), item["exploratory"]
        )

    @property
    def budgets(self) -> Budgets:
        """Where the run stops softly; its stages have minutes of their own, :attr:`minutes`."""
        return Budgets.model_validate(self.content["budgets"])

    @property
    def minutes(self) -> dict[str, float]:
        """Minutes of each part of the run."""
        return dict(self.content["minutes"])

    @property
    def margin(self) -> float:
        """The change of loss in nats per token that a replacement may make, either way."""
        return float(self.content["margin"])

    def groups(self, split: Split) -> list[Group]:
        """The texts of a split in the groups in which they always go through the model."""
        passages = [passage for passage in self.texts if passage.split == split]
        size = int(self.content["group"])
        found: list[Group] = []
        for start in range(0, len(passages), size):
            part = tuple(passages[start : start + size])
            ids = torch.tensor([passage.ids for passage in part])
            found.append(Group(f"{split}-{start // size}", split, part, ids))
        return found


def base_content(
    plan: Plan,
    scan: Mapping[str, str],
    texts: SwapTexts,
    budgets: Budgets,
    minutes: Mapping[str, float],
    group: int,
) -> dict[str, Any]:
    """What both modes seal: scan, model, texts, margin, power, budgets, compute; ``group`` texts go together.

    ``scan`` names the scan's run (``run``), its seal (``sealed``) and the SHA-256 of its record
    (``result_sha256``).
    """
    own = plan.content["texts"]
    return {
        "name": plan.content["name"],
        "scan": dict(scan),
        "model": plan.content["model"],
        "texts": {
            "from": texts.origin,
            "tokens": len(texts.passages[0].ids),
            "tokenizer_sha256": own["tokenizer_sha256"],
            "bos": own["bos"],
            "padding": "none",
            "max_overlap": own["max_overlap"],
            "bytes_counted": BYTES_COUNTED,
            "bytes_reason": texts.bytes_reason,
            "passages": [
                {
                    "name": passage.name,
                    "split": passage.split,
                    "origin": passage.origin,
                    "ids": list(passage.ids),
                    "text": passage.text,
                    "sha256": passage.sha256,
                    "bytes": nbytes,
                }
                for passage, nbytes in zip(texts.passages, texts.nbytes, strict=True)
            ],
        },
        "margin": plan.content["margin"],
        "power": POWER,
        "alpha": ALPHA,
        "seed": plan.seed,
        "budgets": budgets.model_dump(mode="json"),
        "minutes": dict(minutes),
        "group": group,
        "compute": plan.content["compute"],
    }


def pair_part(lm: StreamedLM, pair: Pair, chosen: str) -> dict[str, Any]:
    """What the mode ``pair`` seals beside :func:`base_content`; ``chosen`` says why this pair."""
    return {
        "mode": "pair",
        "pair": {**pair_content(pair), "exploratory": pair.exploratory, "chosen": chosen},
        "directions": [
            {
                "direction": direction_of(comparison),
                "replaced": comparison.reference,
                "by": comparison.substitute,
                "saved": saved(lm, comparison.reference),
            }
            for comparison in pair.comparisons
        ],
        "nulls": list(NULLS),
    }


def sealed_plan(content: Mapping[str, Any]) -> SwapPlan:
    """The content as plain JSON values under its seal, as of this moment."""
    plain = json.loads(encode(dict(content)))
    return SwapPlan(plain, seal(plain), utc_now())


def swap_bytes(swap: SwapPlan) -> bytes:
    """The plan as the bytes of :data:`SWAP_FILE`."""
    stored = {
        "format": FORMAT,
        "sealed": swap.sealed,
        "sealed_at": swap.sealed_at,
        "content": swap.content,
    }
    return encode(stored, indent=1) + b"\n"


def load_swap(path: Path, sealed: str) -> SwapPlan:
    """Read a :data:`SWAP_FILE` and hold it against its seal and against ``sealed``, as the run began with.

    Raises:
        DataError: it cannot be read, is none, or changed since it was sealed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        stored = decode(data) if len(data) <= _MAX_BYTES else None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        stored = None
    keys = {"format", "sealed", "sealed_at", "content"}
    if not isinstance(stored, dict) or set(stored) != keys or stored["format"] != FORMAT:
        raise DataError(f"{path} is not what a swap seals: start the run again from its scan")
    content = stored["content"]
    if not isinstance(content, dict) or not seal(content) == stored["sealed"] == sealed:
        raise DataError(
            f"{path} is not what this run sealed before it began: bring the file back, or start the run "
            "again from its scan"
        )
    return SwapPlan(content, sealed, str(stored["sealed_at"]))


def direction_of(comparison: Comparison) -> str:
    """``"layers.3.mlp <- layers.4.mlp"``: the replaced site, and the one in its place."""
    return f"{comparison.reference} <- {comparison.substitute}"


def variants_of(pair: Pair) -> int:
    """How many residual streams a direction holds: substitute, self, zero, mean, and other modules."""
    return 4 + max(len(comparison.others) for comparison in pair.comparisons)


def saved(lm: StreamedLM, site: str) -> dict[str, int]:
    """Parameters and bytes of a site's own tensors in the files, its norms among them."""
    entries = [lm.files.entry(name) for name in lm.own_tensors(site)]
    return {
        "parameters": sum(torch.Size(entry.shape).numel() for entry in entries),
        "bytes": sum(entry.nbytes for entry in entries),
    }


def null_names(comparison: Comparison) -> Sequence[str]:
    """The nulls beside a direction, in the order of its rows."""
    others = (f"{nulls.OTHER}.{site}" for site in comparison.others)
    return (nulls.ZERO, nulls.MEAN, nulls.SELF, *others)
