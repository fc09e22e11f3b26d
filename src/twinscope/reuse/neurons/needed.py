"""How many texts each replacement needs, from the spread of its change over calibration texts.

Covers the numbers and where they are computed: the library of distributions takes 20 MiB that a process does
not give back, so a process that does not hold it has them computed in another one, ``python -m
twinscope.reuse.neurons.needed``, which reads a request as JSON on standard input and answers with a line of
JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

from twinscope.reuse.apart import compute_apart, required


def needed_texts(spreads: Mapping[str, float], margin: float) -> dict[str, int | None]:
    """Texts with which a change of 0 is found within ``margin`` with a power of 0.8; None beyond any number.

    ``spreads`` are standard deviations over texts, in nats per token as ``margin``.
    """
    if "scipy.stats" in sys.modules:
        return _counted(spreads, margin)
    request = {"spreads": dict(spreads), "margin": margin}
    return required(compute_apart("twinscope.reuse.neurons.needed", request))["needed"]


def _counted(spreads: Mapping[str, float], margin: float) -> dict[str, int | None]:
    from twinscope.lab.statistics import texts_needed

    found: dict[str, int | None] = {}
    for place, spread in spreads.items():
        try:
            found[place] = texts_needed(spread, margin)
        except ValueError:  # more than any corpus has
            found[place] = None
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps({"status": "complete", "needed": _counted(asked["spreads"], asked["margin"])}))
