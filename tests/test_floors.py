"""The floors of the house: every import in the source is read, and any arrow but the allowed ones fails.

Imports inside functions and under ``TYPE_CHECKING`` count like any other, and so does
``import_module("name")``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "twinscope"

#: Package -> the packages of the house it may import from. The root module and the command line may use all.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "lab": frozenset(),
    "text": frozenset({"lab"}),
    "models": frozenset({"lab"}),
    "report": frozenset({"lab"}),
    "propagation": frozenset({"lab", "text", "models"}),
    "reuse": frozenset({"lab", "text", "models"}),
}
ROOF = {"__init__", "__main__", "cli"}
#: Records are opened where no framework is installed.
WITHOUT_FRAMEWORK = {"lab", "report"}
FRAMEWORKS = {"torch", "transformers", "safetensors", "tokenizers", "gguf"}


def violations(source: Path) -> list[str]:
    """A sentence for each import under ``source`` that the floors forbid."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        floor = relative.parts[0].removesuffix(".py")
        if floor not in MAY_IMPORT and floor not in ROOF:
            found.append(f"{relative}: '{floor}' has no floor")
            continue
        for line, name in imports(path):
            reason = forbidden(floor, name)
            if reason:
                found.append(f"{relative}:{line}: {reason}")
    return found


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import; a relative one begins with a dot."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def forbidden(floor: str, name: str) -> str | None:
    if name.startswith("."):
        return f"relative import of '{name}'"
    top, _, rest = name.partition(".")
    if top in FRAMEWORKS and floor in WITHOUT_FRAMEWORK:
        return f"'{floor}' imports {top}"
    if top != "twinscope" or floor in ROOF:
        return None
    package = rest.partition(".")[0]
    if package not in MAY_IMPORT:
        return f"'{floor}' imports the roof: '{name}'"
    if package != floor and package not in MAY_IMPORT[floor]:
        return f"'{floor}' imports '{package}'"
    return None


def test_the_source_keeps_to_the_floors() -> None:
    assert (SOURCE / "lab" / "run.py").exists()
    assert violations(SOURCE) == []


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("lab/x.py", "import torch", "'lab' imports torch"),
        ("lab/x.py", "def f():\n    from torch.nn import functional", "x.py:2: 'lab' imports torch"),
        ("lab/x.py", "if TYPE_CHECKING:\n    import transformers.models", "'lab' imports transformers"),
        ("lab/x.py", "import importlib\nimportlib.import_module('torch.nn')", "'lab' imports torch"),
        ("report/x.py", "import torch as t", "'report' imports torch"),
        ("report/deep/x.py", "from safetensors import safe_open", "'report' imports safetensors"),
        ("lab/x.py", "from twinscope.text import datasets", "'lab' imports 'text'"),
        ("lab/x.py", "from twinscope import models", "'lab' imports 'models'"),
        ("lab/x.py", "import twinscope", "'lab' imports the roof"),
        ("models/x.py", "from twinscope import build_gpt", "'models' imports the roof"),
        ("models/x.py", "from twinscope.text.batches import train_batch", "'models' imports 'text'"),
        ("text/x.py", "import twinscope.propagation.phases", "'text' imports 'propagation'"),
        ("report/x.py", "from twinscope.models import gpt", "'report' imports 'models'"),
        ("propagation/x.py", "from twinscope.reuse.plan import seal", "'propagation' imports 'reuse'"),
        ("reuse/x.py", "from twinscope.propagation import phases", "'reuse' imports 'propagation'"),
        ("reuse/x.py", "from twinscope.report.page import render", "'reuse' imports 'report'"),
        ("propagation/x.py", "from twinscope.cli import main", "'propagation' imports the roof"),
        ("propagation/x.py", "from .phases import rebuild", "relative import"),
        ("propagation/x.py", "from .. import reuse", "relative import"),
        ("helpers/x.py", "", "'helpers' has no floor"),
        ("helpers.py", "", "'helpers' has no floor"),
    ],
)
def test_a_planted_arrow_is_found(tmp_path: Path, file: str, text: str, words: str) -> None:
    allowed = {
        "__init__.py": "from twinscope.models.gpt import build_gpt\nimport torch",
        "cli.py": "from twinscope.report import page\nfrom twinscope.reuse import plan\nimport twinscope",
        "propagation/y.py": "import torch\nfrom twinscope.propagation import a\nfrom twinscope.text import b",
        "models/y.py": "import twinscope.lab.run\nimport transformers",
        "report/y.py": "from twinscope.lab.record import load_record\nimport matplotlib",
    }
    for name, content in allowed.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert violations(tmp_path) == []
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert len(violations(tmp_path)) == 1
    assert words in violations(tmp_path)[0]


BARE = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {frameworks!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_lab_and_report_import_where_no_framework_is_installed() -> None:
    modules = [
        ".".join(("twinscope", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for floor in sorted(WITHOUT_FRAMEWORK)
        for path in sorted((SOURCE / floor).rglob("*.py"))
    ]
    assert "twinscope.lab.run" in modules
    script = BARE.format(frameworks=sorted(FRAMEWORKS), modules=modules)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
