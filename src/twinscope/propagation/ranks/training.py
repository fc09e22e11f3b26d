"""A verb over several ranks: rank 0 begins or opens the run, the others learn what it works on.

Covers preparing together, and training as the verb ``train`` does. No rank but 0 sees the run directory, the
configuration file or a checkpoint; all read the text, which must be the same one.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from twinscope.lab.config import parse_config, to_toml
from twinscope.lab.errors import ConfigError, DataError
from twinscope.lab.progress import Progress
from twinscope.lab.run import Run, stop_signals
from twinscope.models.gpt import GPTConfig
from twinscope.models.source import Initial
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.ranks.follower import Follower
from twinscope.propagation.ranks.group import Ranks
from twinscope.propagation.train import Prepared, prepare, set_numerics, train
from twinscope.propagation.twin import train_arms
from twinscope.text.datasets import open_dataset

#: What is worked on, and what opens the run once the other ranks are ready.
Started = tuple[Prepared, Callable[[], Run]]
#: Called on rank 0 alone.
Begin = Callable[[Ranks], Started]


def prepare_over(ranks: Ranks, config: TrainConfig, quiet: bool) -> Prepared:
    """``prepare`` on rank 0, after what several ranks cannot do is refused.

    Raises:
        ConfigError, DataError: as for ``prepare``; or the batch, the device or the ranks do not fit together.
    """
    _require_fitting(ranks, config)
    return prepare(config, quiet)


@contextmanager
def begun(
    ranks: Ranks, begin: Begin, schemas: Sequence[type[TrainConfig]]
) -> Iterator[tuple[Prepared, Run | Follower]]:
    """What every rank works on, and the run on rank 0; an error of any rank ends all before the run begins.

    ``schemas`` are the models of configuration that ``begin`` may come back with.

    Raises:
        ConfigError, DataError: those of ``begin``, or another rank reads another text.
    """
    with ExitStack() as stack:
        mine: list[Started] = []

        def start() -> str:
            mine.append(begin(ranks))
            return _words(mine[0][0])

        told = json.loads(ranks.lead(start))
        prepared = ranks.together(lambda: mine[0][0] if ranks.leads else _learned(ranks, told, schemas))
        opened: list[Run] = []

        def open_run() -> str:
            opened.append(stack.enter_context(mine[0][1]()))
            return json.dumps([str(opened[0].path), opened[0].verb])

        path, verb = json.loads(ranks.lead(open_run))
        yield prepared, opened[0] if ranks.leads else Follower(Path(path), verb)


def train_over(
    ranks: Ranks, prepared: Prepared, run: Run | Follower, quiet: bool = False
) -> dict[str, Any] | None:
    """Train, or continue, on all ranks; returns the record on rank 0 and None on the others.

    Raises:
        RankLost: another rank is gone. Else as for ``train``.
    """
    if not isinstance(run, Follower):
        return train(prepared, run, quiet, ranks)
    with stop_signals(run), Progress(prepared.config.name, quiet=True) as silent:
        train_arms(prepared.config, run, prepared.data, prepared.initial, silent, ranks)
    return None


def _words(prepared: Prepared) -> str:
    """What rank 0 tells the others: all but weights, text and tokenizer."""
    return json.dumps(
        {
            "schema": type(prepared.config).__name__,
            "config": to_toml(prepared.config),
            "shape": prepared.initial.config.model_dump(mode="json"),
            "origin": prepared.initial.origin,
            "hashes": prepared.data.hashes,
        }
    )


def _learned(ranks: Ranks, told: dict[str, Any], schemas: Sequence[type[TrainConfig]]) -> Prepared:
    """The same on another rank; its weights come from rank 0 when arms are built."""
    schema = next(schema for schema in schemas if schema.__name__ == told["schema"])
    config = parse_config(tomllib.loads(told["config"]), schema, origin="the configuration of rank 0")
    _require_fitting(ranks, config)
    assert config.train.threads is not None
    set_numerics(config.train.device, config.train.threads, "train.device")
    data = open_dataset(config.data)
    differing = [name for name, digest in told["hashes"].items() if data.hashes.get(name) != digest]
    if differing:
        raise DataError(
            f"the {' and '.join(differing)} data of this rank are not those of rank 0: "
            "give every machine the same files under the same paths"
        )
    return Prepared(config, data, Initial(GPTConfig.model_validate(told["shape"]), None, told["origin"]))


def _require_fitting(ranks: Ranks, config: TrainConfig) -> None:
    """Raise ConfigError unless the batch can be split, and every rank has a device of its own."""
    ranks.rows(config.data.batch)
    device = config.train.device
    if device.startswith("cuda:"):
        raise ConfigError(
            f"train.device = '{device}' puts {ranks.size} ranks on one GPU: set 'cuda', each takes its own"
        )
    if device == "cuda" and ranks.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has {torch.cuda.device_count()} GPUs for more ranks: "
            "lower --nproc-per-node to the number of GPUs"
        )
