"""Every named experiment is a valid configuration of its verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinscope.lab.config import read_config
from twinscope.propagation.collapse.config import CollapseConfig
from twinscope.propagation.config import TrainConfig
from twinscope.propagation.cost.config import CostConfig
from twinscope.propagation.leak.config import LeakConfig
from twinscope.reuse.reuse_config import ReuseConfig

FILES = sorted((Path(__file__).parents[1] / "experiments").glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_reads(path):
    schemas = {
        "leak": LeakConfig, "collapse": CollapseConfig, "cost": CostConfig, "frontier": CostConfig,
        "reuse": ReuseConfig, "neurons": ReuseConfig,
    }  # fmt: skip
    config = read_config(path, schemas.get(path.stem.partition("-")[0], TrainConfig))
    assert config.name == path.stem
