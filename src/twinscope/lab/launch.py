"""Which of several processes of one job this one is, as torchrun tells it in the environment.

Covers reading and checking what it tells. How the processes meet and talk is in propagation/ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from twinscope.lab.errors import ConfigError

_HOW = "start all ranks with torchrun, or unset WORLD_SIZE to run alone"


@dataclass(frozen=True)
class Place:
    """Rank 0 … size − 1 of this process in the job, and its number on its machine."""

    rank: int
    size: int
    local_rank: int


def place() -> Place | None:
    """The place of this process among several, or None where it runs alone.

    Raises:
        ConfigError: the environment names several ranks but not which this is, or where they meet.
    """
    if os.environ.get("WORLD_SIZE", "1").strip() in ("", "1"):
        return None
    size, rank, port = _number("WORLD_SIZE"), _number("RANK"), _number("MASTER_PORT")
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError(f"WORLD_SIZE = {size} but MASTER_ADDR, where the ranks meet, is not set: {_HOW}")
    if size < 1 or rank >= size or port > 65535:
        raise ConfigError(f"RANK = {rank}, WORLD_SIZE = {size} and MASTER_PORT = {port} make no job: {_HOW}")
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    return Place(rank, size, local)


def _number(name: str) -> int:
    text = os.environ.get(name, "").strip()
    if not text.isdecimal():
        found = f"is '{text}'" if text else "is not set"
        raise ConfigError(f"WORLD_SIZE = '{os.environ.get('WORLD_SIZE')}', but {name} {found}: {_HOW}")
    return int(text)
