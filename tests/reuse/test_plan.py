"""Plans: the rule that chooses pairs, the seal, and refusal of whatever changed after it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_llama import tiny_config, write_llama, write_text

from twinscope.cli import main
from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.record import load_record
from twinscope.models.store.origin import file_sha256, write_origin
from twinscope.reuse import plan_run
from twinscope.reuse.identity import identify
from twinscope.reuse.plan import (
    PLAN_FILE,
    choose_pairs,
    load_plan,
    neuron_layers,
    pair_of,
    require_same_model,
    seal,
    spread,
)
from twinscope.reuse.reuse_config import ReuseConfig, split_pair


@pytest.fixture(autouse=True)
def _places(tmp_path, monkeypatch):
    monkeypatch.setenv("TWINSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TWINSCOPE_RUNS", str(tmp_path / "runs"))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder with a model and a text, never changed by a test."""
    folder = tmp_path_factory.mktemp("source")
    write_llama(folder / "model")
    write_text(folder / "text.txt")
    return folder


def planned(tmp_path: Path, source: Path, **changes: Any) -> Path:
    """The run directory of a plan on a copy of the model."""
    if not (tmp_path / "model").exists():
        shutil.copytree(source / "model", tmp_path / "model")
    config = tiny_config(tmp_path / "model", source / "text.txt", **changes)
    with plan_run.create_run(config, tmp_path / "runs") as run:
        plan_run.plan(run, quiet=True)
    return run.path


def shape(layers: int, attention: list[int], norms: list[int], family: str = "made-up") -> Any:
    """What the rule looks at: sites by kind."""
    sites = {
        "attention": [f"layers.{n}.self_attn" for n in attention],
        "linear_attention": [f"layers.{n}.linear_attn" for n in range(layers) if n not in attention],
        "mlp": [f"layers.{n}.mlp" for n in range(layers)],
        "q_norm": [f"layers.{n}.self_attn.q_norm" for n in norms],
        "k_norm": [f"layers.{n}.self_attn.k_norm" for n in norms],
    }
    return cast(Any, SimpleNamespace(layers=layers, family=family, sites=lambda kind: sites[kind]))


def rule(**counts: int) -> ReuseConfig:
    reuse = {"rule": counts} if counts else {}
    return ReuseConfig.model_validate({"model": {"source": "x"}, "reuse": reuse})


def test_the_default_pairs_of_a_hybrid_are_three_two_and_six():
    full = [3, 7, 11, 15, 19, 23]
    pairs, words, notes = choose_pairs(rule(), shape(24, full, full))
    assert [pair.id for pair in pairs] == [
        "layers.3.self_attn=layers.7.self_attn",
        "layers.11.self_attn=layers.15.self_attn",
        "layers.19.self_attn=layers.23.self_attn",
        "layers.5.mlp=layers.6.mlp",
        "layers.17.mlp=layers.18.mlp",
        *(f"layers.{n}.self_attn.q_norm=layers.{n}.self_attn.k_norm" for n in full),
    ]
    assert notes == []
    assert words.startswith("neighbours in depth, evenly spaced: 3 attention pairs")
    assert [pair.kind for pair in pairs] == ["attention"] * 3 + ["mlp"] * 2 + ["q_norm"] * 6
    here, there = pairs[0].comparisons
    assert (here.reference, here.substitute) == ("layers.3.self_attn", "layers.7.self_attn")
    assert (there.reference, there.substitute) == ("layers.7.self_attn", "layers.3.self_attn")
    assert len(here.others) == len(there.others) == 2


def test_a_family_without_norms_gets_the_pairs_that_exist_and_the_plan_says_so():
    pairs, _, notes = choose_pairs(rule(), shape(30, list(range(30)), [], "llama"))
    assert [pair.kind for pair in pairs] == ["attention"] * 3 + ["mlp"] * 2
    assert notes == ["the family llama has no q and k norms, so there are no pairs of them"]
    pairs, _, notes = choose_pairs(rule(attention=3, mlp=2, norms=6), shape(2, [1], [1]))
    assert [pair.id for pair in pairs] == [
        "layers.0.mlp=layers.1.mlp", "layers.1.self_attn.q_norm=layers.1.self_attn.k_norm",
    ]  # fmt: skip
    assert notes == [
        "3 pairs of kind attention were asked for, the model gives 0",
        "2 pairs of kind mlp were asked for, the model gives 1",
        "6 pairs of q and k norms were asked for, the model gives 1",
    ]
    with pytest.raises(ConfigError, match=r"finds no pair in this model: name some in reuse\.pairs"):
        choose_pairs(rule(mlp=0), shape(4, [], []))


def test_spreading_is_even_from_the_first_to_the_last():
    assert spread(list(range(30)), 3) == [5, 15, 25]
    assert spread("abcde", 1) == ["c"]
    assert spread("ab", 5) == ["a", "b"]
    assert neuron_layers(None, 30) == [3, 11, 18, 26]
    assert neuron_layers([0, 1, 2, 3], 4) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="the model has the layers 0 … 3, not 9"):
        neuron_layers([0, 1, 2, 9], 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers.1.mlp", "is no pair: write two sites"),
        ("layers.1.mlp=layers.1.mlp", "pairs a site with itself"),
        ("layers.1.mlp=layers.9.mlp", "the model has no site 'layers.9.mlp'"),
        ("layers.1.mlp=layers.2.mpl", r"no site 'layers\.2\.mpl' \(did you mean 'layers\.2\.mlp'\?\)"),
        ("layers.1.mlp=layers.2.self_attn", "of kind 'mlp' and layers.2.self_attn of 'attention'"),
    ],
)
def test_pairs_that_are_none_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        pair_of(shape(4, [0, 1, 2, 3], []), text, 0, 2)
    assert split_pair(" layers.0.mlp = layers.1.mlp ") == ("layers.0.mlp", "layers.1.mlp")


def test_a_configuration_survives_toml_and_refuses_both_pairs_and_rule():
    values = {"model": {"source": "x"}, "reuse": {"pairs": ["layers.0.mlp=layers.1.mlp"]}}
    config = ReuseConfig.model_validate(values)
    assert "layers.0.mlp=layers.1.mlp" in to_toml(config)
    values["reuse"]["rule"] = {"mlp": 1}
    with pytest.raises(ValidationError, match="pairs and rule: give one of the two"):
        ReuseConfig.model_validate(values)
    with pytest.raises(ConfigError, match=r"unknown key 'reuse\.tresholds' \(did you mean 'thresholds'\?\)"):
        parse_config({"model": {"source": "x"}, "reuse": {"tresholds": {}}}, ReuseConfig, "here")


def test_the_seal_is_the_hash_of_the_content_whatever_the_order_of_keys(tmp_path, source):
    path = planned(tmp_path, source)
    stored = json.loads((path / PLAN_FILE).read_text())
    canonical = json.dumps(stored["content"], sort_keys=True, separators=(",", ":"))
    assert stored["sealed"] == hashlib.sha256(canonical.encode()).hexdigest()
    record = load_record(path)
    assert record.summary["sealed"] == stored["sealed"]
    assert record.summary["pairs"] == [item["id"] for item in stored["content"]["pairs"]["list"]]
    shuffled = dict(reversed(stored["content"].items()))
    assert seal(shuffled) == stored["sealed"]
    content = stored["content"]
    assert content["model"]["files"]["model.safetensors"] == file_sha256(tmp_path / "model/model.safetensors")
    assert [len(item["ids"]) for item in content["texts"]["passages"]] == [12] * 5
    assert content["thresholds"]["error"] > 0
    assert content["budgets"]["minutes"] == 120
    # The same configuration gives the same plan, and another seed another one.
    again = json.loads((planned(tmp_path, source) / PLAN_FILE).read_text())
    other = json.loads((planned(tmp_path, source, seed=1) / PLAN_FILE).read_text())
    assert again["sealed"] == stored["sealed"] != other["sealed"]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("thresholds", lambda content: content["thresholds"].update(error=0.5)),
        ("texts", lambda content: content["texts"]["passages"][0]["ids"].reverse()),
        ("pairs", lambda content: content["pairs"]["list"].pop()),
        ("budgets", lambda content: content["budgets"].update(minutes=1e9)),
        ("model", lambda content: content["model"].update(weights="trained")),
        ("extra", lambda content: content.update(extra=1)),
        ("seed", lambda content: content.pop("seed")),
    ],
)
def test_a_plan_that_changed_is_refused_and_the_sentence_says_what(tmp_path, source, part, change):
    path = planned(tmp_path, source)
    stored = json.loads((path / PLAN_FILE).read_text())
    change(stored["content"])
    (path / PLAN_FILE).write_text(json.dumps(stored))
    with pytest.raises(DataError, match=f"not the plan that was sealed: its {part} changed since"):
        plan_run.plan_of_run(path)
    # Sealed again by hand, it is still not what the run's result says; alone it would be another plan.
    stored["sealed"] = seal(stored["content"])
    stored["parts"] = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        for name, value in stored["content"].items()
    }
    (path / PLAN_FILE).write_text(json.dumps(stored))
    with pytest.raises(DataError, match="not the plan that was sealed: another content was put in since"):
        plan_run.plan_of_run(path)


NO_PLANS = ["", "{", "[]", '{"format": "twinscope.plan/2"}', '{"format": "twinscope.plan/1"}']


@pytest.mark.parametrize("text", NO_PLANS)
def test_what_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(DataError, match="is no plan"):
        load_plan(tmp_path / "plan.json")
    with pytest.raises(DataError, match="cannot read the plan"):
        load_plan(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match=r"holds no plan\.json: give the directory of a finished plan run"):
        plan_run.plan_of_run(tmp_path / "..")


def test_a_model_that_changed_is_refused(tmp_path, source):
    plan = plan_run.plan_of_run(planned(tmp_path, source))
    require_same_model(plan, identify(tmp_path / "model"))
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"model changed since the plan was sealed \(model\.safetensors\)"):
        require_same_model(plan, identify(tmp_path / "model"))


def test_what_the_weights_are(tmp_path, source):
    folder = tmp_path / "model"
    shutil.copytree(source / "model", folder)
    assert (identify(folder).weights, identify(folder).planted) == ("released", False)
    assert identify(folder, "trained").told_by == "the configuration"
    tensors = load_file(folder / "model.safetensors")
    flat = {name: torch.ones_like(t) if "norm" in name else t for name, t in tensors.items()}
    save_file(flat, folder / "model.safetensors", metadata={"format": "pt"})
    fresh = identify(folder)
    assert (fresh.weights, fresh.told_by) == ("random", "norm gains that are all as initialised")

    def tell(kind: Any) -> None:
        files = {path.name: file_sha256(path) for path in folder.iterdir() if path.name != "twinscope.json"}
        write_origin(folder, kind, "a test", files)

    tell("planted")
    found = identify(folder)
    assert (found.weights, found.planted, found.told_by) == ("trained", True, "twinscope.json")
    with pytest.raises(ConfigError, match=r"model\.weights = 'random', but .* its weights are planted"):
        identify(folder, "random")
    # A folder that was altered since is not what its twinscope.json says.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert identify(folder).told_by == "nobody; norm gains are not as initialised"
    with pytest.raises(DataError, match=r"holds no \.safetensors file"):
        identify(tmp_path)


def test_what_does_not_fit_is_refused_before_anything_is_sealed(tmp_path, source):
    with pytest.raises(ConfigError, match=r"over reuse\.budgets\.process_mib = 20: raise it"):
        planned(tmp_path, source, budgets={"process_mib": 20.0})
    assert not list((tmp_path / "runs").glob(f"*/{PLAN_FILE}"))
    text = tmp_path / "many.txt"
    characters = np.random.default_rng(0).integers(0x4E00, 0x4E00 + 100, (60, 60))
    text.write_text("\n\n".join("".join(map(chr, row)) for row in characters))
    texts = {"corpus": str(text), "tokenizer": "char", "tokens": 12, "calibration": 2, "heldout": 2}
    with pytest.raises(ConfigError, match=r"but the model reads 0 … 47: use its tokenizer"):
        planned(tmp_path, source, texts=texts)


def test_the_command(tmp_path, source, capsys):
    config = tmp_path / "tiny.toml"
    config.write_text(to_toml(tiny_config(source / "model", source / "text.txt")))
    with pytest.raises(SystemExit) as left:
        main(["plan", str(config), "--json"])
    answer = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (left.value.code, answer["status"]) == (0, "complete")
    assert load_plan(Path(answer["run"]) / PLAN_FILE).content["name"] == "tiny"
    with pytest.raises(SystemExit) as left:
        main(["plan", str(config), "--set", "model.source=nowhere", "--json"])
    assert left.value.code == 2
    assert "'nowhere' is neither a model in the cache nor a folder" in capsys.readouterr().err
