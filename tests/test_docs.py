"""The documentation holds: Python blocks run, commands and links exist, the reference is up to date."""

from __future__ import annotations

import os
import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("decisions/*.md")) + [ROOT / "README.md"]
RUNNABLE = [page for page in sorted(DOCS.glob("*.md")) if "```python\n" in page.read_text()]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for of, text in found if of == language]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.stem)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {"folder": tmp_path / "model"}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def test_there_are_pages_to_run():
    assert {page.stem for page in RUNNABLE} >= {"tutorial-ep", "tutorial-reuse", "how-to"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page):
    """Every verb, option and configuration that a shell block names."""
    from typer.main import get_command

    from twinscope.cli import app

    root = get_command(app)
    for line in "\n".join(blocks(page, "")).splitlines():
        words = re.split(r" #| //", line)[0].split()
        if "twinscope" not in words:
            continue
        words = words[words.index("twinscope") + 1 :]
        command = root.commands[words.pop(0)]
        if hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for item in command.params for option in item.opts}
        for word in words:
            if word.startswith("--"):
                assert word.partition("=")[0] in known, f"{page.name}: {line}"
            if word.startswith("experiments/"):
                assert (ROOT / word).is_file(), f"{page.name}: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_toml_blocks_parse(page):
    for block in blocks(page, "toml"):
        tomllib.loads(block)


def test_the_reference_is_what_schemas_and_commands_say():
    pages = runpy.run_path(os.fspath(DOCS / "reference.py"))["pages"]()
    for name, text in pages.items():
        assert (DOCS / name).read_text() == text, f"run docs/reference.py: {name} is out of date"
