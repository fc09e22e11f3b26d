"""Numerics every test shares: one thread, deterministic kernels, no network."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _strict_numerics() -> None:
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
