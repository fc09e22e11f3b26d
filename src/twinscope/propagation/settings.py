"""The configuration tables of the estimator and of the optimizer.

Values only: what is computed from them lives in the modules named after the thing. Symbols follow
docs/notation.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from twinscope.lab.config import Section

#: Displacement ratio of the default nudge. A cosine speaks of equilibrium propagation from 1e-3 on (METHOD
#: 1.2); bias and residual of a one-sided nudge grow with the ratio, so the default lies just above it.
DEFAULT_DISPLACEMENT = 1.1e-3

_NUMBERS_OF_PROFILE: dict[str, tuple[str, ...]] = {
    "uniform": ("value",),
    "top": ("value", "base"),
    "geometric": ("ratio", "cap"),
    "random": ("max", "base"),
}


class GainSettings(Section):
    """Displacement gain per block: one of four profiles and the numbers it takes.

    A number left out is 1 (``value``, ``base``), 2 (``ratio``, ``max``) or no limit (``cap``).
    """

    profile: Literal["uniform", "top", "geometric", "random"] = "uniform"
    value: float | None = Field(default=None, gt=0)
    base: float | None = Field(default=None, gt=0)
    ratio: float | None = Field(default=None, gt=0)
    cap: float | None = Field(default=None, gt=0)
    max: float | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _only_numbers_of_the_profile(self) -> Self:
        allowed = _NUMBERS_OF_PROFILE[self.profile]
        strange = sorted(self.model_fields_set - {"profile", *allowed})
        if strange:
            raise ValueError(
                f"the gain profile '{self.profile}' takes {' and '.join(allowed)}, not {', '.join(strange)}"
            )
        return self


class EPSettings(Section):
    """How one gradient is estimated by equilibrium propagation (METHOD 1.1 to 1.3).

    Exactly one of ``beta`` (the nudge strength itself) and ``displacement`` (the largest
    ``g_l * RMS(d_l) / RMS(z_l)`` over the blocks, from which beta follows) sets the nudge. ``recompute``
    keeps states without graphs and makes each block's graph again when its turn comes: less memory, more
    time, the same gradient.
    """

    beta: float | None = Field(default=None, gt=0, le=1e9)
    displacement: float | None = Field(default=None, gt=0, lt=1)
    rounds: int = Field(default=1, ge=0)
    fused: bool = True
    nudge: Literal["positive", "negative", "random", "symmetric"] = "random"
    read: Literal["linear", "energy"] = "linear"
    damping: float = Field(default=1.0, gt=0, le=1)
    top_refresh: int = Field(default=1, ge=1)
    precision: Literal["fp32", "fp64", "amp"] = "fp32"
    recompute: bool = False
    gain: GainSettings = Field(default_factory=GainSettings)

    @model_validator(mode="before")
    @classmethod
    def _nudge_by_displacement_unless_said(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("beta") is None and values.get("displacement") is None:
            return {**values, "displacement": DEFAULT_DISPLACEMENT}
        return values

    @model_validator(mode="after")
    def _refuse_what_is_wrong_by_construction(self) -> Self:
        if self.beta is not None and self.displacement is not None:
            raise ValueError("give either beta or displacement: the displacement determines beta")
        if self.read == "energy" and self.rounds == 0:
            raise ValueError("the energy read needs at least one round: free states hold no response to read")
        if self.read == "energy" and self.fused:
            raise ValueError(
                "the energy read cannot be fused: the refreshed force never reaches the states that the "
                "energy read takes it from (set fused = false, or read = 'linear')"
            )
        if self.read == "energy" and self.damping < 1:
            raise ValueError(
                "the energy read needs an undamped last round: at damping < 1 the stored states still hold "
                "part of the round before (set damping = 1, or read = 'linear')"
            )
        return self


#: A decay rate of a running mean.
Rate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Section):
    """Muon for the blocks' matrices with AdamW for the rest, or AdamW alone; warm-up, then cosine."""

    kind: Literal["muon", "adamw"] = "adamw"
    lr: float = Field(default=3e-3, gt=0)
    adamw_lr: float | None = Field(default=None, gt=0)
    warmup: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float | None = Field(default=1.0, gt=0)
    # Read as a list from TOML, which has no tuples.
    betas: tuple[Rate, Rate] = Field(default=(0.9, 0.95), strict=False)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    final_lr_fraction: float = Field(default=0.0, ge=0, le=1)
    horizon: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _adamw_lr_belongs_to_muon(self) -> Self:
        if self.kind == "adamw" and self.adamw_lr is not None:
            raise ValueError("adamw_lr goes with kind = 'muon'; with kind = 'adamw' set lr")
        return self
