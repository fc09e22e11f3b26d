"""The plan of a scan: what is fixed before any activation is read, and the seal over it.

Covers the rule that chooses pairs, the content that is sealed, the seal, and the refusal of a plan, a model
or texts that changed since. How texts are chosen is in texts.py, what is measured in branches.py, the run
directory in plan_run.py.

The seal is the SHA-256 of the content as canonical JSON: keys sorted, no blanks, ASCII, floats with every
bit. Beside it stand the hashes of the content's parts, so that a refusal can name the part that changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from twinscope.lab.config import suggestion
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.record import decode, encode
from twinscope.reuse.branches import KINDS, NORMS, Comparison, Kind, both_ways
from twinscope.reuse.decision import Thresholds
from twinscope.reuse.identity import Identity
from twinscope.reuse.nulls import layer_of
from twinscope.reuse.reuse_config import Budgets, ReuseConfig, Rule, split_pair
from twinscope.reuse.texts import Passage, Split, TextCodec

if TYPE_CHECKING:
    from twinscope.models.streamed.model import StreamedLM

FORMAT = "twinscope.plan/1"
PLAN_FILE = "plan.json"
#: Nulls beside every pair, as the plan states them.
NULLS = (
    "zero: no update",
    "mean: the reference's mean update over calibration tokens",
    "permuted: the substitute with its residual channels permuted at the output",
    "other: modules of the same kind, matched in depth, named with each pair",
    "self: the reference itself, which must give exactly 0",
)
_MAX_BYTES = 16 << 20
_LAYERS_OF_NEURONS = 4


@dataclass(frozen=True)
class Pair:
    """Two sites, and the comparison in both directions with the null modules of each."""

    id: str
    kind: Kind
    left: str
    right: str
    comparisons: tuple[Comparison, Comparison]
    exploratory: bool = False


@dataclass(frozen=True)
class Plan:
    """A sealed plan: its content as plain JSON, the seal, when it was sealed, and where the model lay.

    ``planned_peak_mib`` is not sealed: it counts what the planning process held.
    """

    content: dict[str, Any]
    sealed: str
    sealed_at: str
    folder: Path
    planned_peak_mib: float

    @property
    def texts(self) -> list[Passage]:
        """The passages, calibration first."""
        return [
            Passage(item["name"], item["split"], item["origin"], tuple(item["ids"]), item["text"])
            for item in self.content["texts"]["passages"]
        ]

    def ids(self, split: Split) -> Tensor:
        """Tokens of the passages of one split, ``(B, T)`` int64."""
        return torch.tensor([passage.ids for passage in self.texts if passage.split == split])

    @property
    def pairs(self) -> list[Pair]:
        """The sealed pairs in order."""
        return [
            Pair(item["id"], item["kind"], item["left"], item["right"], comparisons_of(item))
            for item in self.content["pairs"]["list"]
        ]

    @property
    def thresholds(self) -> Thresholds:
        """What counts as the same function."""
        return Thresholds.model_validate(self.content["thresholds"])

    @property
    def budgets(self) -> Budgets:
        """Where the scan stops softly."""
        return Budgets.model_validate(self.content["budgets"])

    @property
    def seed(self) -> int:
        """The seed of null permutations and of ties among null modules."""
        return int(self.content["seed"])


def make_content(
    config: ReuseConfig,
    lm: StreamedLM,
    identity: Identity,
    passages: Sequence[Passage],
    codec: TextCodec,
    planned_peak_mib: float,
) -> dict[str, Any]:
    """The content of a plan as plain JSON values; nothing is computed on the model.

    Raises:
        ConfigError: a pair, a layer or a text does not fit the model, or the planned peak is beyond the
            budget.
    """
    reuse = config.reuse
    pairs, rule, notes = choose_pairs(config, lm)
    largest = max(max(passage.ids) for passage in passages)
    if largest >= lm.vocab:
        raise ConfigError(
            f"the texts hold the token {largest}, but the model reads 0 … {lm.vocab - 1}: use its tokenizer"
        )
    if planned_peak_mib > reuse.budgets.process_mib:
        what = "scan" if pairs else "comparison of neurons"
        raise ConfigError(
            f"the {what} would take about {planned_peak_mib:.0f} MiB, over reuse.budgets.process_mib = "
            f"{reuse.budgets.process_mib:g}: raise it, or take fewer or shorter texts"
        )
    content: dict[str, Any] = {
        "name": config.name,
        "model": {
            "source": config.model.source if "/" not in config.model.source else "a folder",
            "family": lm.family,
            "layers": lm.layers,
            "width": lm.width,
            "vocab": lm.vocab,
            "sha256": identity.sha256,
            "files": identity.files,
            "weights": identity.weights,
            "planted": identity.planted,
            "told_by": identity.told_by,
        },
        "texts": {
            "tokens": reuse.texts.tokens,
            "tokenizer_sha256": codec.sha256,
            "bos": {"policy": codec.policy, "ids": list(codec.prefix)},
            "padding": "none",
            "max_overlap": reuse.texts.max_overlap,
            "settings": reuse.texts.model_dump(mode="json"),
            "passages": [
                {
                    "name": passage.name,
                    "split": passage.split,
                    "origin": passage.origin,
                    "ids": list(passage.ids),
                    "text": passage.text,
                    "sha256": passage.sha256,
                }
                for passage in passages
            ],
        },
        "pairs": {"rule": rule, "notes": notes, "list": [pair_content(pair) for pair in pairs]},
        "thresholds": reuse.thresholds.model_dump(mode="json"),
        "margin": reuse.margin,
        "nulls": list(NULLS),
        "neuron_layers": neuron_layers(reuse.layers, lm.layers),
        "neurons": reuse.neurons.model_dump(mode="json"),
        "seed": reuse.seed,
        "budgets": reuse.budgets.model_dump(mode="json"),
        "compute": {
            "device": reuse.device,
            "threads": reuse.threads or torch.get_num_threads(),
            "precision": "fp32",
            "parity": reuse.parity,
        },
    }
    return json.loads(encode(content))


def choose_pairs(config: ReuseConfig, lm: StreamedLM) -> tuple[list[Pair], str, list[str]]:
    """The pairs of a plan, the rule in words, and what the model does not have.

    The rule takes neighbours in depth, evenly spaced from the first to the last: attention among the
    full-attention layers, MLPs among all layers, and the q and k norm within evenly spaced layers that have
    both. No weight and no activation has a part in it. A rule that asks for none of each gives none.

    Raises:
        ConfigError: a pair of the configuration names no site of this model or two kinds of modules, or
            there is no pair at all.
    """
    reuse = config.reuse
    if reuse.pairs is not None:
        named = [pair_of(lm, text, reuse.seed, reuse.nulls.others) for text in reuse.pairs]
        twice = [pair.id for index, pair in enumerate(named) if pair.id in {p.id for p in named[:index]}]
        if twice:
            raise ConfigError(f"reuse.pairs: {twice[0]} stands there twice")
        return named, "the pairs were given by name", []
    asked = reuse.rule or Rule()
    notes: list[str] = []
    chosen: list[tuple[Kind, str, str]] = []
    wanted: tuple[tuple[Kind, int], ...] = (("attention", asked.attention), ("mlp", asked.mlp))
    for kind, count in wanted:
        sites = lm.sites(kind)
        taken = spread(list(pairwise(sites)), count)
        chosen.extend((kind, left, right) for left, right in taken)
        if len(taken) < count:
            notes.append(f"{count} pairs of kind {kind} were asked for, the model gives {len(taken)}")
    k_norms = set(lm.sites("k_norm"))
    both = [(q, k) for q in lm.sites("q_norm") if (k := q.replace("q_norm", "k_norm")) in k_norms]
    taken = spread(both, asked.norms)
    chosen.extend(("q_norm", q, k) for q, k in taken)
    if asked.norms and not both:
        notes.append(f"the family {lm.family} has no q and k norms, so there are no pairs of them")
    elif len(taken) < asked.norms:
        notes.append(f"{asked.norms} pairs of q and k norms were asked for, the model gives {len(taken)}")
    if reuse.rule is not None and not (asked.attention or asked.mlp or asked.norms):
        return [], "no pairs of modules: the plan is for neurons alone", []
    if not chosen:
        raise ConfigError("the rule finds no pair in this model: name some in reuse.pairs")
    rule = (
        f"neighbours in depth, evenly spaced: {asked.attention} attention pairs among full-attention "
        f"layers, {asked.mlp} MLP pairs, and q norm with k norm within {asked.norms} layers"
    )
    pairs = [_pair(lm, kind, left, right, reuse.seed, reuse.nulls.others) for kind, left, right in chosen]
    return pairs, rule, notes


def pair_of(lm: StreamedLM, text: str, seed: int, others: int, exploratory: bool = False) -> Pair:
    """The pair ``"SITE=SITE"`` of this model.

    Raises:
        ConfigError: a site that the model does not have, or two modules of different kinds.
    """
    try:
        left, right = split_pair(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    kinds: dict[str, Kind] = {site: kind for kind in get_args(Kind) for site in lm.sites(kind)}
    for site in (left, right):
        if site not in kinds:
            raise ConfigError(f"the model has no site '{site}'{suggestion(site, _near(site, list(kinds)))}")
    if kinds[left] != kinds[right] and not (kinds[left] in NORMS and kinds[right] in NORMS):
        raise ConfigError(
            f"{left} is a site of kind '{kinds[left]}' and {right} of '{kinds[right]}': a pair has one kind"
        )
    return _pair(lm, kinds[left], left, right, seed, others, exploratory)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """``count`` of the items, evenly spaced with half a step at both ends; all of them if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[int((index + 0.5) * len(items) / count)] for index in range(count)]


def neuron_layers(given: Sequence[int] | None, layers: int) -> list[int]:
    """The layers whose neurons are compared later: those given, else four evenly spaced.

    Raises:
        ConfigError: a layer that the model does not have.
    """
    if given is None:
        return spread(range(layers), _LAYERS_OF_NEURONS)
    if max(given) >= layers:
        raise ConfigError(f"reuse.layers: the model has the layers 0 … {layers - 1}, not {max(given)}")
    return list(given)


def seal(content: Mapping[str, Any]) -> str:
    """The SHA-256 of the content as canonical JSON, in hex."""
    return hashlib.sha256(_canonical(content)).hexdigest()


def plan_bytes(plan: Plan) -> bytes:
    """The plan as the bytes of ``plan.json``."""
    parts = {name: hashlib.sha256(_canonical(part)).hexdigest() for name, part in plan.content.items()}
    stored = {
        "format": FORMAT,
        "sealed": plan.sealed,
        "sealed_at": plan.sealed_at,
        "folder": str(plan.folder),
        "planned_peak_mib": plan.planned_peak_mib,
        "parts": parts,
        "content": plan.content,
    }
    return encode(stored, indent=1) + b"\n"


def load_plan(path: Path, sealed: str | None = None) -> Plan:
    """Read a ``plan.json`` and hold it against its seal, and against ``sealed``, as recorded elsewhere.

    Raises:
        DataError: it cannot be read, is no plan, or changed since it was sealed; names the parts.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read the plan {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path} is larger than {_MAX_BYTES >> 20} MiB, which no plan is: check the path")
    try:
        stored = decode(data)
    except ValueError as error:
        raise DataError(f"{path} is no plan ({error}): make it with twinscope plan") from None
    keys = {"format", "sealed", "sealed_at", "folder", "planned_peak_mib", "parts", "content"}
    if not isinstance(stored, dict) or stored.get("format") != FORMAT or set(stored) != keys:
        raise DataError(f"{path} is no plan of the form {FORMAT}: make it with twinscope plan")
    content, parts = stored["content"], stored["parts"]
    if not isinstance(content, dict) or not isinstance(parts, dict):
        raise DataError(f"{path} is damaged: make the plan again")
    found = seal(content)
    if found != stored["sealed"] or sealed not in (None, found):
        names = sorted({*content, *parts})
        changed = [
            name for name in names
            if name not in content
            or hashlib.sha256(_canonical(content[name])).hexdigest() != parts.get(name)
        ]  # fmt: skip
        what = f"its {' and '.join(changed)} changed" if changed else "another content was put in"
        raise DataError(
            f"{path} is not the plan that was sealed: {what} since; bring the plan back, or make a new one "
            "with twinscope plan"
        )
    try:
        return Plan(
            content,
            found,
            str(stored["sealed_at"]),
            Path(stored["folder"]),
            float(stored["planned_peak_mib"]),
        )
    except (TypeError, ValueError):
        raise DataError(f"{path} is damaged: make the plan again") from None


def require_same_model(plan: Plan, identity: Identity) -> None:
    """Return if the model is the one that was sealed.

    Raises:
        DataError: a file changed, is missing, or was added; names it.
    """
    then, now = plan.content["model"]["files"], identity.files
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if changed:
        raise DataError(
            f"the model changed since the plan was sealed ({', '.join(changed[:4])}): bring the files back, "
            "or make a new plan"
        )


def pair_content(pair: Pair) -> dict[str, Any]:
    """A pair as plain JSON."""
    return {
        "id": pair.id,
        "kind": pair.kind,
        "left": pair.left,
        "right": pair.right,
        "comparisons": [
            {
                "kind": comparison.kind,
                "reference": comparison.reference,
                "substitute": comparison.substitute,
                "others": list(comparison.others),
            }
            for comparison in pair.comparisons
        ],
    }


def comparisons_of(item: Mapping[str, Any]) -> tuple[Comparison, Comparison]:
    """The comparisons of a pair as :func:`pair_content` stores it."""
    first, second = (
        Comparison(part["kind"], part["reference"], part["substitute"], tuple(part["others"]))
        for part in item["comparisons"]
    )
    return first, second


def _pair(
    lm: StreamedLM, kind: Kind, left: str, right: str, seed: int, others: int, exploratory: bool = False
) -> Pair:
    comparisons = both_ways(lm, kind, left, right, seed, others)
    return Pair(f"{left}={right}", kind, left, right, comparisons, exploratory)


def _near(site: str, known: list[str]) -> list[str]:
    """The known sites of the same layer, or those of one layer, so that a suggestion stays short."""
    try:
        return [name for name in known if layer_of(name) == layer_of(site)] or known[: len(KINDS)]
    except ValueError:
        return known[: len(KINDS)]


def _canonical(value: Any) -> bytes:
    ordered = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return ordered.encode("ascii")
