"""The texts of a replacement: the plan's own, or more and longer ones by the plan's rule, with their bytes.

Covers choosing passages that share too little with the plan's to be copies, and how many UTF-8 bytes the
tokens stand for that are predicted. A corpus and a tokenizer take memory that a process does not give back,
so this runs in a process of its own: ``python -m twinscope.reuse.swap_texts`` reads a request as JSON on
standard input and answers with one line of JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from twinscope.lab.errors import ConfigError, DataError, TwinscopeError
from twinscope.reuse.apart import compute_apart, required
from twinscope.reuse.texts import (
    Passage,
    TextCodec,
    TextSettings,
    bos_token_id,
    choose_texts,
    open_codec,
)

if TYPE_CHECKING:
    from twinscope.reuse.plan import Plan

OWN = "the plan's own"
NEW = "chosen by the plan's rule, apart from its own texts"
BYTES_COUNTED = (
    "UTF-8 bytes of what the tokenizer decodes from all tokens of a text, less those of its first token "
    "alone, which nothing predicts"
)


@dataclass(frozen=True)
class SwapTexts:
    """Passages, calibration first, and for each the bytes of its predicted tokens; None, with one reason."""

    passages: tuple[Passage, ...]
    nbytes: tuple[int | None, ...]
    bytes_reason: str
    origin: str


def fixed_texts(plan: Plan, folder: Path, texts: int | None = None, tokens: int | None = None) -> SwapTexts:
    """The plan's own texts, or with ``texts`` or ``tokens`` others: so many of each split, of so many tokens.

    Raises:
        ConfigError: other texts are asked for, and the plan does not say by which settings it chose its own,
        or
            it was given files.
        DataError: the corpus gives too few, or the tokenizer is not the plan's.
    """
    content = plan.content["texts"]
    settings = content.get("settings")
    new = texts is not None or tokens is not None
    if new and settings is None:
        raise ConfigError(
            "--texts and --tokens choose texts by the plan's own rule, which this plan does not hold: plan "
            "and scan again, or leave them out"
        )
    if new and settings.get("calibration_files") is not None:
        raise ConfigError(
            "--texts and --tokens choose texts from a corpus, and the texts of this plan are files given one "
            "by one: leave them out"
        )
    if new:
        own = len([passage for passage in plan.texts if passage.split == "heldout"])
        count = own if texts is None else texts
        settings = {**settings, "calibration": count, "heldout": count}
        settings["tokens"] = content["tokens"] if tokens is None else tokens
    request = {
        "settings": settings,
        "new": new,
        "folder": str(folder),
        "seed": plan.seed,
        "tokenizer_sha256": content["tokenizer_sha256"],
        "plan": [_plain(passage) for passage in plan.texts],
    }
    answer = required(compute_apart("twinscope.reuse.swap_texts", request))
    return SwapTexts(
        tuple(_passage(item) for item in answer["passages"]) if new else tuple(plan.texts),
        tuple(answer["bytes"]),
        answer["bytes_reason"],
        NEW if new else OWN,
    )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Passages and bytes for a request of :func:`fixed_texts`.

    Raises:
        ConfigError, DataError: as for :func:`fixed_texts`.
    """
    folder = Path(request["folder"])
    own = [_passage(item) for item in request["plan"]]
    passages = own
    codec, reason = _codec(request, folder)
    if request["new"]:
        if codec is None:
            raise DataError(f"{reason}: bring it back, or leave out --texts and --tokens")
        passages = choose_texts(_settings(request), codec, request["seed"], own)
    counted = [None if codec is None else _predicted_bytes(passage, codec) for passage in passages]
    if codec is not None:
        reason = "its predicted tokens decode to no text of their own"
    return {
        "passages": [_plain(passage) for passage in passages],
        "bytes": counted,
        "bytes_reason": reason,
    }


def main() -> None:
    """Read a request, print the answer, and leave with the exit code of an error."""
    try:
        found, code = answer(json.loads(sys.stdin.read())), 0
    except TwinscopeError as error:
        found, code = {"error": str(error)}, error.exit_code
    print(json.dumps(found), flush=True)
    sys.exit(code)


def _codec(request: dict[str, Any], folder: Path) -> tuple[TextCodec | None, str]:
    """The tokenizer of the plan's texts, or None and why it is not at hand."""
    settings = TextSettings() if request["settings"] is None else _settings(request)
    try:
        codec = open_codec(settings, folder, bos_token_id(folder))
    except (ConfigError, DataError) as error:
        return None, f"the tokenizer of the plan's texts is not at hand ({error})"
    if codec.sha256 != request["tokenizer_sha256"]:
        return None, f"{codec.name} is not the tokenizer that made the plan's texts"
    return codec, ""


def _settings(request: dict[str, Any]) -> TextSettings:
    try:
        return TextSettings.model_validate(request["settings"])
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        where = ".".join(map(str, item["loc"])) or "texts"
        raise ConfigError(
            f"--texts and --tokens: {where}: {item['msg'][0].lower()}{item['msg'][1:]}"
        ) from None


def _predicted_bytes(passage: Passage, codec: TextCodec) -> int | None:
    first = codec.decode(passage.ids[:1])
    found = len(codec.decode(passage.ids).encode()) - len(first.encode())
    return found if found > 0 else None


def _plain(passage: Passage) -> dict[str, Any]:
    return {
        "name": passage.name,
        "split": passage.split,
        "origin": passage.origin,
        "ids": list(passage.ids),
        "text": passage.text,
    }


def _passage(item: dict[str, Any]) -> Passage:
    return Passage(item["name"], item["split"], item["origin"], tuple(item["ids"]), item["text"])


if __name__ == "__main__":
    main()
