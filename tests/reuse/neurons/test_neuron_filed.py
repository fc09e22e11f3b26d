"""Identities of the weights in the record: one entry per kind and layers, with counts and names."""

from __future__ import annotations

from twinscope.lab.schemas.neurons import NeuronAnalytic
from twinscope.reuse.neurons.analytic import Analytic, Identities, ModuleCopy
from twinscope.reuse.neurons.filed import described


def one(kind, layer, neuron, other=None, of=None, exact=True, reason="because") -> Analytic:
    return Analytic(kind, layer, neuron, other, of, 1.0, 2.0, None, exact, reason)


def test_entries_count_neurons_once_and_name_some():
    filed = (
        one("parallel", 3, 0, 3, 1),
        one("parallel", 3, 0, 3, 2, exact=False),
        *(one("module_copy", 3, number, 7, number + 1) for number in range(9)),
        one("folded", 3, 20, 9, 4),
        one("dead", 7, 11, reason="its up row is zero"),
    )
    copies = (ModuleCopy(3, 7, True, 0.9, 1.0, -2.0),)
    entries = described(Identities(filed, copies, {}))
    for entry in entries:
        NeuronAnalytic.model_validate(entry)
    assert [(entry["kind"], entry["layers"], entry["neurons"]) for entry in entries] == [
        ("parallel", [3], 3),
        ("module_copy", [3, 7], 9),
        ("folded", [3, 9], 1),
        ("dead", [7], 1),
    ]
    assert entries[0]["detail"] == "because; of 2 identities 1 are exact up to a factor"
    assert entries[0]["examples"] == [
        "layers.3.mlp.0 and layers.3.mlp.1",
        "layers.3.mlp.0 and layers.3.mlp.2",
    ]
    assert len(entries[1]["examples"]) == 5
    assert entries[1]["detail"] == (
        "90% of the live neurons of layer 3 are parallel, one to one, to those of layer 7 once the gains of "
        "the norms are folded in; 100% of them give -2 times its update"
    )
    assert (entries[3]["examples"], entries[3]["detail"]) == (["layers.7.mlp.11"], "its up row is zero")
    same = ModuleCopy(3, 7, False, 0.5, 0.1, None)
    (entry,) = described(Identities((one("module_copy", 3, 1, 7, 2),), (same,), {}))
    assert entry["detail"].endswith("layer 7; no one multiple of the update holds for most")
