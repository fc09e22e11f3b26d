"""Random draws that are a pure function of (seed, stream, index), never of what was drawn before."""

from __future__ import annotations

import hashlib

import numpy as np


def generator(seed: int, stream: str, index: int = 0) -> np.random.Generator:
    """A counter-based generator (Philox) for one use at one step.

    Two calls with the same arguments give the same draws in any process and any order, so a resumed
    or re-ordered run sees what the uninterrupted one saw. ``stream`` names the use ("nudge",
    "batch", …), so that two uses at one step are independent.

    Raises:
        ValueError: ``index`` is negative.
    """
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    digest = hashlib.sha256(f"{stream}\x00{seed}".encode()).digest()
    # Little-endian on every machine, so that a draw does not depend on the processor.
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    # The index goes into the highest counter word: each index owns 2^192 blocks of its own.
    counter = np.array([0, 0, 0, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
