"""The record of the verb ``check``: parity of the streamed forward with the library's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinscope.lab.schemas.parts import Strict, Text


class CheckSummary(Strict):
    """Summary of the verb ``check``.

    ``hidden_difference`` is the worst text's ‖streamed − library‖ / ‖library‖ of the final states,
    ``nll_difference`` the largest difference of a token's loss in nats. ``method``: the library ran as a
    ``whole``, or layer by layer on the streamed residuals. ``peak_rss_mib`` is that of the streaming process.
    """

    model: Text
    weights: Literal["random", "released", "trained", "planted", "unstated"]
    weights_sha256: Text
    passed: bool
    first_part: Text | None
    bit_equal: bool
    method: Literal["whole", "layers"]
    tokens: int
    hidden_difference: float
    hidden_tolerance: float
    nll_difference: float
    nll_tolerance: float
    peak_rss_mib: float
    notes: list[Text]
    versions: dict[str, str]


class CheckText(Strict):
    """One text: losses are means in nats per token, ``nll_difference`` is the largest over tokens."""

    key: Text
    kind: Literal["text"]
    source: Literal["real", "random"]
    hidden_difference: float
    nll_difference: float
    nll_streamed: float
    nll_library: float


class CheckLayer(Strict):
    """Relative difference of what enters one layer, layer 0 being fed by the embedding."""

    key: Text
    kind: Literal["layer"]
    layer: int
    difference: float


#: One row of a ``check`` record.
CheckRow = Annotated[CheckText | CheckLayer, Field(discriminator="kind")]
