"""The configuration of ``twinscope ranks``: that of a training, and what to compare on it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinscope.lab.config import Section
from twinscope.propagation.config import TrainConfig


class RanksSettings(Section):
    """``[ranks]``: the first ``batches`` of training are compared, in each of ``precisions``.

    Left out, these are fp64, which shows a wrong sum however small, and the precision of ``[train]``.
    """

    batches: int = Field(default=2, ge=1)
    precisions: list[Literal["fp32", "fp64", "amp"]] | None = Field(default=None, min_length=1)


class RanksConfig(TrainConfig):
    """A whole configuration of ``twinscope train``, of which nothing is trained, and ``[ranks]``."""

    ranks: RanksSettings = Field(default_factory=RanksSettings)

    @property
    def precisions(self) -> list[str]:
        """The precisions to compare in, each once."""
        chosen = self.ranks.precisions or ["fp64", self.train.precision]
        return list(dict.fromkeys(chosen))
