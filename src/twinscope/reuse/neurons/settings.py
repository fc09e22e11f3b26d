"""``[reuse.neurons]``: what a plan fixes of the comparison of neurons.

Covers the numbers. The layers are ``reuse.layers``, the margin ``reuse.margin``, the texts those of the plan.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from twinscope.lab.config import Section

#: Family-wise level of the search; the null's threshold is exact for it (``null.py``).
FAMILY_WISE = 0.05
#: Fewer tokens than this of either split weaken what a search says, and the record warns.
ENOUGH_TOKENS = 2048


class NeuronMinutes(Section):
    """Minutes for the parts that a scan does not have; a resume gives each its minutes anew."""

    search: float = Field(default=20.0, gt=0)
    null: float = Field(default=60.0, gt=0)
    replacement: float = Field(default=60.0, gt=0)


class NeuronSettings(Section):
    """``[reuse.neurons]``: the null and its draws, the least R² of a match, and how many pairs are replaced.

    ``null`` is a way of redrawing donors (``null.py``). ``skip`` tokens at the start of every text take no
    part in search, null and confirmation: the first one attends to itself alone, and in many models the
    activations there dwarf all others, so that any two neurons which read them look alike. The loss counts
    all tokens. ``replaced`` are numbers of best pairs that are replaced at once.
    """

    null: Literal["signs", "isotropic"] = "signs"
    draws: int = Field(default=19, ge=1, le=999)
    skip: int = Field(default=1, ge=0)
    r2_floor: float = Field(default=0.5, gt=0, lt=1)
    replaced: list[int] = Field(default_factory=lambda: [1, 10, 100], min_length=1, max_length=8)
    minutes: NeuronMinutes = Field(default_factory=NeuronMinutes)

    @model_validator(mode="after")
    def _can_judge(self) -> Self:
        if FAMILY_WISE * (self.draws + 1) < 1:
            raise ValueError(
                f"draws = {self.draws}: a family-wise level of {FAMILY_WISE:.0%} needs "
                f"{round(1 / FAMILY_WISE) - 1} draws or more"
            )
        if self.replaced != sorted(set(self.replaced)) or self.replaced[0] < 1:
            raise ValueError(f"replaced = {self.replaced}: give rising numbers of pairs, from 1")
        return self
