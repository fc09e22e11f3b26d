"""The real thing once: torchrun starts two ranks, which train and check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forked import free_port

from twinscope.lab.record import load_record


def test_torchrun_trains_on_two_ranks(tmp_path):
    (tmp_path / "text.txt").write_text("a state of the union " * 300)
    (tmp_path / "tiny.toml").write_text(
        f"""
        name = "tiny"
        [model]
        layers = 1
        width = 8
        heads = 2
        context = 8
        [data]
        corpus = "{tmp_path / "text.txt"}"
        batch = 3
        [train]
        steps = 2
        eval_every = 2
        eval_batches = 2
        gate_every = 2
        """
    )
    # By number, as a machine need not know its own name.
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", "2"]
    command += ["-m", "twinscope", "train", str(tmp_path / "tiny.toml")]
    command += ["--runs", str(tmp_path / "runs"), "--json"]
    places = {"TWINSCOPE_CACHE": str(tmp_path / "cache"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | places, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    record = load_record(Path(line["run"]))
    assert record.status == "complete"
    assert Path(line["report"]).stat().st_size > 10_000
    assert record.provenance["ranks"] == [2]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [Path(line["run"]).name]
