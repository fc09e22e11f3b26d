"""Configurations: what reads back equal, and the sentence for everything that is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator

from twinscope.lab.config import Section, parse_config, read_config, suggestion, to_toml, with_overrides
from twinscope.lab.errors import ConfigError


class Arm(Section):
    name: str
    rounds: int = 1


class Optimizer(Section):
    kind: Literal["muon", "adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    clip: float | None = None
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)


class Whole(Section):
    name: str
    optimizer: Optimizer = Optimizer()
    arms: list[Arm] = Field(default_factory=list)
    extra: Arm | None = None

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if name == "bad":
            raise ValueError("a name must not be 'bad'")
        return name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text('name = "x"\n[optimizer]\nlr = 0.5\n[[arms]]\nname = "ep"\n[[arms]]\nname = "bp"\n')
    return file


def test_a_file_with_overrides_becomes_a_section(path: Path) -> None:
    overrides = [
        "optimizer.kind=muon",
        "optimizer.lr=2e-3",
        "arms.1.rounds=4",
        "extra.name=more=less",
        "name=a b",
    ]
    assert read_config(path, Whole, overrides) == Whole(
        name="a b",
        optimizer=Optimizer(kind="muon", lr=2e-3),
        arms=[Arm(name="ep"), Arm(name="bp", rounds=4)],
        extra=Arm(name="more=less"),
    )


def test_sections_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Arm(name="x").rounds = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3e-4", 3e-4),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("runs/x.bin", "runs/x.bin"),
        ("", ""),
        (" 3", 3),
        ("1\nname = 2", "1\nname = 2"),
        ("9" * 5000, "9" * 5000),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_override_values_are_toml_or_else_text(text: str, value: object) -> None:
    assert with_overrides({"a": {}}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_leave_the_given_mapping_alone() -> None:
    given_mapping = {"a": {"b": 1}, "list": [{"c": 1}]}
    changed = with_overrides(given_mapping, ["a.b=2", "list.0.c=2", "list.0.d.e=3", "new.deep=4"])
    assert given_mapping == {"a": {"b": 1}, "list": [{"c": 1}]}
    assert changed == {"a": {"b": 2}, "list": [{"c": 2, "d": {"e": 3}}], "new": {"deep": 4}}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.lr", "not of the form key.subkey=value"),
        ("=3", "not of the form key.subkey=value"),
        ("name.first=3", "there is nothing at 'first' to set"),
        ("name.first.second=3", "there is nothing at 'first' to set"),
        ("arms.2.rounds=1", "there is nothing at '2' to set"),
        ("arms.-1.rounds=1", "there is nothing at '-1' to set"),
        ("arms.²=1", "there is nothing at '²' to set"),
        ("arms.ep.rounds=1", "there is nothing at 'ep' to set"),
        ("optimiser.lr=1", "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        ("optimizer.rate=1", "unknown key 'optimizer.rate' (known: betas, clip, kind, lr)"),
        ("arms.0.round=1", "unknown key 'arms.0.round' (did you mean 'rounds'?)"),
        ("extra.nam=1", "unknown key 'extra.nam' (did you mean 'name'?)"),
        ("optimizer.lr=-1", "'optimizer.lr' = -1 is refused: input should be greater than 0"),
        ("optimizer.lr=nan", "'optimizer.lr' = nan is refused: input should be a finite number"),
        ("optimizer.lr=fast", "'optimizer.lr' = 'fast' is refused: input should be a valid number"),
        ("optimizer.kind=sgd", "'optimizer.kind' = 'sgd' is refused: input should be 'muon' or 'adamw'"),
        ("name=bad", "name: a name must not be 'bad'"),
        ("extra.rounds=1", "'extra.name' is missing"),
    ],
)
def test_refusals_name_the_key_and_fit_a_line(path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(path, Whole, [override])
    assert caught.value.exit_code == 2
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_refused_key_is_listed_and_long_values_are_cut(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(path, Whole, ["optimizer.lr=-1", "colour=1", f"optimizer.kind={'x' * 10_000}"])
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "'optimizer.lr' = -1" in message
    assert "unknown key 'colour'" in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"name = ", "is not valid TOML"),
        (b'name = "x"\nname = "y"', "is not valid TOML"),
        (b'name = "\xff"', "cannot read the config"),
        (b"name = " + b"9" * 5000, "is not valid TOML"),
        (b"name = " + b"[" * 5000, "is not valid TOML"),
    ],
)
def test_files_that_are_no_toml_are_refused(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_config(file, Whole)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config file at"):
        read_config(tmp_path / "none.toml", Whole)
    with pytest.raises(ConfigError, match="cannot read the config"):
        read_config(tmp_path, Whole)


def test_a_mapping_is_checked_under_the_name_of_its_origin() -> None:
    assert parse_config({"name": "x"}, Whole, "the defaults") == Whole(name="x")
    with pytest.raises(ConfigError, match="the defaults: 'name' is missing"):
        parse_config({}, Whole, "the defaults")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    name=st.text(max_size=20).filter(lambda text: text != "bad"),
    lr=st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
    clip=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    rounds=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
)
def test_toml_reads_back_equal(name: str, lr: float, clip: float | None, rounds: list[int]) -> None:
    whole = Whole(
        name=name,
        optimizer=Optimizer(lr=lr, clip=clip, betas=(lr, 0.5)),
        arms=[Arm(name=f"{index}", rounds=value) for index, value in enumerate(rounds)],
    )
    assert parse_config(tomllib.loads(to_toml(whole)), Whole, "here") == whole


def test_what_toml_cannot_say_is_refused_and_not_changed_quietly() -> None:
    class Clipped(Section):
        clip: float | None = 1.0

    class Picky(Section):
        value: float = 1.0

        @field_validator("value")
        @classmethod
        def _never(cls, value: float) -> float:
            raise ValueError("leave me out")

    assert to_toml(Clipped(clip=2.0)) == "clip = 2.0\n"
    with pytest.raises(ValueError, match="Clipped holds None where TOML would read its default"):
        to_toml(Clipped(clip=None))
    with pytest.raises(ValueError, match="Picky cannot be read back from TOML"):
        to_toml(Picky())


def test_suggestions() -> None:
    assert suggestion("widht", ["width", "heads"]) == " (did you mean 'width'?)"
    assert suggestion("zzz", ["width", "heads"]) == " (known: heads, width)"
    assert suggestion("zzz", []) == ""
