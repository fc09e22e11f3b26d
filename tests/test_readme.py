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


def test_the_streamed_example_runs(tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **sizes)).save_pretrained(tmp_path)
    (block,) = re.findall(r"```python streamed\n(.*?)```", README, re.DOTALL)
    names = {"folder": tmp_path, "ids": torch.arange(10)[None]}
    exec(compile(block, "README.md", "exec"), names)
    lm = names["lm"]
    plain = lm.nll(names["ids"])
    with lm.remapped({"layers.7.mlp": "layers.3.mlp"}):
        assert not torch.equal(lm.nll(names["ids"]), plain)
    assert torch.equal(lm.nll(names["ids"]), plain)


def test_every_named_file_exists():
    names = set(re.findall(r"(?:tests|docs|experiments)/[\w./-]+\.(?:py|md|png|toml)", README))
    names |= {f"src/twinscope/{name}" for name in re.findall(r"^  (\w+\.py) ", README, re.MULTILINE)}
    assert len(names) > 6
    assert not [name for name in names if not (ROOT / name).exists()]
