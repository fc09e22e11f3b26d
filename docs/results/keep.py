"""Copy what is kept of a run into docs/results/NAME: its record and its figures.

    python docs/results/keep.py RUN[=NAME]...

NAME is that of the run's configuration, unless another is given: a replacement has the name of its plan.
The record is the run's result.json, except that the command line is shortened to what one types, the cache
folder is written as CACHE and the folder of runs as runs, so that no folder of the machine is published.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from twinscope.lab.run import cache_root

HERE = Path(__file__).parent


def keep(run: Path, name: str = "") -> Path:
    """Replace docs/results/NAME by the record and the figures of a complete run."""
    record = json.loads((run / "result.json").read_text())
    assert record["status"] == "complete", f"{run} is not complete"
    command = record["provenance"]["command"]
    verb = command.index(record["provenance"]["verb"])
    record["provenance"]["command"] = ["twinscope", *command[verb:]]
    folder = HERE / (name or record["provenance"]["name"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = json.dumps(record).replace(str(cache_root()), "CACHE").replace(str(run.resolve().parent), "runs")
    (folder / "result.json").write_text(text + "\n")
    for figure in sorted((run / "figures").glob("*.png")):
        shutil.copy(figure, folder / figure.name)
    return folder


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        place, _, called = argument.partition("=")
        print(keep(Path(place), called))
