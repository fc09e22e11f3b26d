"""Identities of the weights in a few words each, as a record lists them.

Covers grouping what ``analytic.py`` files, neuron by neuron, into one entry for a kind and the layers that it
relates.
"""

from __future__ import annotations

from typing import Any

from twinscope.reuse.neurons.analytic import Analytic, Identities

#: Neurons that an entry names.
_SHOWN = 5


def described(found: Identities) -> list[dict[str, Any]]:
    """One entry per kind and layers: how many neurons, some of them by name, and what relates them."""
    groups: dict[tuple[str, int, int | None], list[Analytic]] = {}
    for item in found.filed:
        groups.setdefault((item.kind, item.layer, item.other_layer), []).append(item)
    entries = []
    for (kind, layer, other), items in groups.items():
        neurons = {(item.layer, item.neuron) for item in items}
        layers = [layer] if other is None or other == layer else [layer, other]
        if other == layer:
            neurons |= {(layer, item.other_neuron) for item in items if item.other_neuron is not None}
        reason = items[0].reason
        exact = sum(item.exact for item in items)
        if 0 < exact < len(items):
            reason = f"{reason}; of {len(items)} identities {exact} are exact up to a factor"
        entries.append(
            {
                "kind": kind,
                "layers": layers,
                "neurons": len(neurons),
                "examples": [_named(item) for item in items[:_SHOWN]],
                "detail": reason,
            }
        )
    for copy in found.copies:
        multiple = (
            "no one multiple of the update holds for most"
            if copy.update_scale is None
            else f"{copy.same_update:.0%} of them give {copy.update_scale:.3g} times its update"
        )
        folded = " once the gains of the norms are folded in" if copy.folded else ""
        for entry in entries:
            if entry["kind"] == "module_copy" and entry["layers"] == [copy.layer, copy.other_layer]:
                entry["detail"] = (
                    f"{copy.share:.0%} of the live neurons of layer {copy.layer} are parallel, one to one, "
                    f"to those of layer {copy.other_layer}{folded}; {multiple}"
                )
    return entries


def _named(item: Analytic) -> str:
    one = f"layers.{item.layer}.mlp.{item.neuron}"
    if item.other_layer is None or item.other_neuron is None:
        return one
    return f"{one} and layers.{item.other_layer}.mlp.{item.other_neuron}"
