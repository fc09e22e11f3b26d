"""The verb ``plan``: from a configuration to a sealed plan in a run directory.

Covers finding the model, choosing the texts, the run directory and its record. What a plan holds and how it
is sealed is in plan.py.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.durable import write_atomic
from twinscope.lab.errors import ConfigError, DataError, Stopped
from twinscope.lab.evidence import claim
from twinscope.lab.outcome import Findings, carry_out
from twinscope.lab.progress import Progress
from twinscope.lab.provenance import collect, utc_now
from twinscope.lab.run import Run
from twinscope.models.store.library import FETCHED, model_folder, models_root
from twinscope.models.store.origin import is_whole
from twinscope.models.streamed.model import StreamedLM, open_streamed
from twinscope.reuse.apart import call_apart, required
from twinscope.reuse.identity import identify
from twinscope.reuse.plan import (
    PLAN_FILE,
    Plan,
    choose_pairs,
    load_plan,
    make_content,
    neuron_layers,
    plan_bytes,
    seal,
)
from twinscope.reuse.reuse_config import ReuseConfig
from twinscope.reuse.scan import planned_mib
from twinscope.reuse.texts import Passage, bos_token_id, choose_texts, open_codec, overlap


def create_run(config: ReuseConfig, root: Path) -> Run:
    """Make the run directory with configuration and provenance; threads and paths are fixed in it."""
    reuse = config.reuse
    threads = reuse.threads or torch.get_num_threads()
    source = config.model.source
    if source not in FETCHED and Path(source).expanduser().is_dir():
        source = str(Path(source).expanduser().absolute())
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"source": source}),
            "reuse": reuse.model_copy(update={"threads": threads}),
        }
    )
    provenance = collect(
        seeds=[reuse.seed],
        data={},
        compute={"device": reuse.device, "threads": threads, "precision": "fp32"},
    )
    return Run.create(root, "plan", config.name, to_toml(config), provenance)


def plan(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Make and seal the plan that the configuration in ``run`` asks for; returns the record.

    No activation is read: of the weights, only hashes and, to tell what they are, norm gains.

    Raises:
        ConfigError, DataError: the model, a text or a pair cannot be used as configured.
        Stopped: a signal ended it.
    """
    config = saved_config(run)
    rows: list[dict[str, Any]] = []

    def work() -> Findings:
        with Progress(config.name, quiet) as progress:
            progress.update(0, 3, "model")
            folder = folder_of(config.model.source, quiet)
            identity = identify(folder, config.model.weights)
            _go_on(run)
            progress.update(1, 3, "texts")
            codec = open_codec(config.reuse.texts, folder, bos_token_id(folder))
            passages = choose_texts(config.reuse.texts, codec, config.reuse.seed)
            _go_on(run)
            progress.update(2, 3, "pairs")
            with open_streamed(folder, None, config.reuse.device) as lm:
                pairs, _, _ = choose_pairs(config, lm)
                peak = planned_mib(lm, pairs, passages) if pairs else _neurons_mib(config, lm, passages)
                content = make_content(config, lm, identity, passages, codec, peak)
        found = Plan(content, seal(content), utc_now(), folder, peak)
        write_atomic(run.path / PLAN_FILE, plan_bytes(found))
        for passage in passages:
            shares = [overlap(passage, other) for other in passages if other is not passage]
            rows.append(
                {
                    "key": f"text/{passage.name}",
                    "kind": "text",
                    "split": passage.split,
                    "origin": passage.origin,
                    "text": passage.text,
                    "tokens": len(passage.ids),
                    "sha256": passage.sha256,
                    "overlap": max(shares),
                }
            )
        rows.extend(
            {
                "key": f"pair/{pair.id}",
                "kind": "pair",
                "of": pair.kind,
                "left": pair.left,
                "right": pair.right,
                "others_left": list(pair.comparisons[0].others),
                "others_right": list(pair.comparisons[1].others),
            }
            for pair in pairs
        )
        return _summary(found, rows), [_claim(found)]

    return carry_out(run, config.model_dump(mode="json", exclude_none=True), work, rows)


def resume(run: Run, quiet: bool = False) -> dict[str, Any]:
    """Make the plan again, from the start, under the configuration of the run."""
    return plan(run, quiet)


def plan_of_run(path: Path) -> Plan:
    """The sealed plan in the directory of a finished ``plan`` run, or in a ``plan.json`` given by its path.

    Raises:
        ConfigError: the run is of another verb or not finished; DataError: the plan changed since.
    """
    file = path / PLAN_FILE if path.is_dir() else path
    result = file.parent / "result.json"
    if path.is_dir() and not file.is_file():
        raise ConfigError(f"{path} holds no {PLAN_FILE}: give the directory of a finished plan run")
    sealed = None
    if result.is_file():
        # Beside a plan.json, the run's own result is a second witness of the seal.
        try:
            sealed = json.loads(result.read_bytes())["summary"]["sealed"]
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(f"{result} is damaged: make the plan again") from None
    return load_plan(file, sealed)


def folder_of(source: str, quiet: bool) -> Path:
    """The folder of a model by name or path; one that has to be fetched is, in a process of its own.

    A conversion holds whole tensors, which must not count as the memory of a scan.

    Raises:
        ConfigError, DataError, Stopped: as for ``models.library.model_folder``.
    """
    if source not in FETCHED:
        return model_folder(source, quiet)
    place = models_root() / source
    if not is_whole(place):
        required(call_apart("model", "fetch", source, *(["--quiet"] if quiet else [])))
    return place


def saved_config(run: Run) -> ReuseConfig:
    """The configuration stored in the run directory.

    Raises:
        ConfigError: it is not valid, for example because it was edited.
    """
    try:
        mapping = tomllib.loads(run.config_toml)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{run.path / 'config.toml'} is not valid TOML: {error}") from None
    return parse_config(mapping, ReuseConfig, origin=str(run.path / "config.toml"))


def _neurons_mib(config: ReuseConfig, lm: StreamedLM, passages: Sequence[Passage]) -> float:
    """The planned peak of a comparison of neurons, where a plan is for nothing else.

    It is that of another process than this one, which holds a corpus and a tokenizer.
    """
    from twinscope.models.streamed.budget import LIBRARY_MIB
    from twinscope.reuse.neurons.activations import gated_layer
    from twinscope.reuse.neurons.sizes import planned_mib

    layers = {number: gated_layer(lm, number) for number in neuron_layers(config.reuse.layers, lm.layers)}
    return planned_mib(lm, layers, config.reuse.neurons, passages, LIBRARY_MIB)


def _summary(plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any]:
    content = plan.content
    model, texts = content["model"], content["texts"]
    passages = plan.texts
    return {
        "sealed": plan.sealed,
        "sealed_at": plan.sealed_at,
        "file": PLAN_FILE,
        "model": {
            key: model[key]
            for key in ("family", "layers", "width", "vocab", "sha256", "weights", "planted", "told_by")
        },
        "rule": content["pairs"]["rule"],
        "notes": content["pairs"]["notes"],
        "pairs": [pair.id for pair in plan.pairs],
        "texts": len(passages),
        "tokens": texts["tokens"],
        "bos": texts["bos"]["policy"],
        "largest_overlap": max(overlap(one, two) for one, two in combinations(passages, 2)),
        "planned_peak_mib": plan.planned_peak_mib,
    }


def _claim(plan: Plan) -> dict[str, str]:
    return claim(
        f"{len(plan.pairs)} pairs, {len(plan.texts)} texts and every threshold are fixed under the seal "
        f"{plan.sealed[:12]}",
        "none",
        "that they were chosen before any activation of this model was read by this plan",
        "any statement about the model",
    )


def _go_on(run: Run) -> None:
    if run.stop_requested:
        raise Stopped(f"stopped by {run.stop_requested} before the plan was sealed")
