"""The Python of the README runs as it stands, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_code_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    loss, cosines = capsys.readouterr().out.splitlines()
    assert float(loss.split()[0]) > 4
    assert min(eval(cosines).values()) > 0.99


def test_every_named_file_exists():
    names = set(re.findall(r"(?:tests|docs|experiments)/[\w./-]+\.(?:py|md|png|toml)", README))
    names |= {f"src/twinscope/{name}" for name in re.findall(r"^  (\w+\.py) ", README, re.MULTILINE)}
    assert len(names) > 6
    assert not [name for name in names if not (ROOT / name).exists()]
