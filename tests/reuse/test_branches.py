"""One comparison: the right tensors per kind, every null in its place, texts apart, JSON without NaN."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from plain_model import PlainModel, attend, normed

from twinscope.lab.errors import DataError
from twinscope.lab.record import encode
from twinscope.reuse import branches, measures
from twinscope.reuse.branches import MEASURES, aggregate, both_ways, calibrate, compare


def residuals(texts: int = 3, length: int = 9, width: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(texts, length, width))).float()


@pytest.fixture
def model():
    return PlainModel()


def rows_of(model, kind, left="layers.1.{}", right="layers.4.{}", z=None):
    suffix = {"attention": "self_attn", "mlp": "mlp"}.get(kind, kind)
    one, _ = both_ways(model, kind, left.format(suffix), right.format(suffix), seed=5)
    z = residuals() if z is None else z
    return one, compare(model, one, z, calibrate(model, one, residuals(seed=1)), seed=5)


def null(row, name):
    return next(part for part in row["nulls"] if part["null"] == name)


def relative(substitute, reference):
    return float((substitute - reference).double().norm() / reference.double().norm())


class TestBothWays:
    def test_each_site_is_once_the_reference(self, model):
        one, other = both_ways(model, "mlp", "layers.1.mlp", "layers.4.mlp", seed=0)
        assert (one.reference, one.substitute) == ("layers.1.mlp", "layers.4.mlp")
        assert (other.reference, other.substitute) == ("layers.4.mlp", "layers.1.mlp")
        assert one.residual == "layers.1.mlp"
        assert len(one.others) == len(other.others) == 2
        assert not set(one.others) & {one.reference, one.substitute}

    def test_norms_of_a_layer(self, model):
        names = "layers.2.self_attn.q_norm", "layers.2.self_attn.k_norm"
        one, other = both_ways(model, "q_norm", *names, seed=0)
        assert (one.kind, other.kind) == ("q_norm", "k_norm")
        assert one.residual == other.residual == "layers.2.self_attn"
        assert all(site.endswith("k_norm") for site in one.others)
        assert all(site.endswith("q_norm") for site in other.others)


class TestMlp:
    def test_the_substitute_sees_the_inputs_of_the_reference(self, model):
        z = residuals()
        _, rows = rows_of(model, "mlp", z=z)
        for text, row in enumerate(rows):
            one, other = (torch.tanh(z[text] @ model.weights[f"layers.{n}.mlp"].T) for n in (1, 4))
            assert row["branch_error"] == pytest.approx(relative(other, one), rel=1e-6)
            assert row["reference_norm"] == pytest.approx(float(one.double().norm()), rel=1e-6)
            assert row["tokens"] == 9
            p, q = ((z[text] + part) @ model.head.T for part in (one, other))
            p, q = p.double().softmax(-1), q.double().softmax(-1)
            m = (p + q) / 2
            js = 0.5 * ((p * (p / m).log2()).sum(-1) + (q * (q / m).log2()).sum(-1))
            assert row["logit_js"] == pytest.approx(float(js.mean()), rel=1e-6)
            same = (p.argmax(-1) == q.argmax(-1)).double().mean()
            assert row["logit_topk_1"] == pytest.approx(float(same))

    def test_attention_measures_are_null_with_a_reason(self, model):
        _, rows = rows_of(model, "mlp")
        for key in ("attention_js", "attention_topk_worst", "attention_js_heads"):
            assert rows[0][key] is None
            assert rows[0][f"{key}_reason"] == "an MLP has no attention probabilities"
        assert rows[0]["norm_error_reason"].startswith("only a q or k norm")

    def test_nulls(self, model):
        z = residuals()
        one, rows = rows_of(model, "mlp", z=z)
        calibration = torch.tanh(residuals(seed=1) @ model.weights["layers.1.mlp"].T)
        for text, row in enumerate(rows):
            names = [part["null"] for part in row["nulls"]]
            assert names == ["zero", "mean", "permuted", "self", *(f"other.{site}" for site in one.others)]
            assert null(row, "zero")["branch_error"] == 1.0
            itself = null(row, "self")
            assert itself["branch_error"] == itself["branch_error_trimmed"] == itself["logit_js"] == 0.0
            assert [itself[f"logit_topk_{k}"] for k in (1, 5, 10)] == [1.0] * 3
            reference = torch.tanh(z[text] @ model.weights["layers.1.mlp"].T)
            mean = calibration.mean(dim=(0, 1)).expand_as(reference)
            assert null(row, "mean")["branch_error"] == pytest.approx(relative(mean, reference), rel=1e-5)
            for site in one.others:
                other = torch.tanh(z[text] @ model.weights[site].T)
                found = null(row, f"other.{site}")["branch_error"]
                assert found == pytest.approx(relative(other, reference), rel=1e-6)

    def test_an_exact_copy_is_exactly_0_and_its_nulls_are_not(self, model):
        model.weights["layers.4.mlp"] = model.weights["layers.1.mlp"].clone()
        _, rows = rows_of(model, "mlp")
        for row in rows:
            assert row["branch_error"] == row["logit_js"] == 0.0
            assert null(row, "permuted")["branch_error"] > 0.5
            assert min(part["branch_error"] for part in row["nulls"] if part["null"] != "self") > 0.5

    def test_massive_channels_of_calibration_are_left_out(self, model):
        model.weights["layers.1.mlp"][:] *= 0.01
        model.weights["layers.1.mlp"][3] *= 4000
        one, rows = rows_of(model, "mlp")
        z = residuals()
        calibration = calibrate(model, one, residuals(seed=1))
        assert calibration.massive == (3,)
        keep = torch.arange(8) != 3
        parts = [torch.tanh(z[0] @ model.weights[f"layers.{n}.mlp"].T)[:, keep] for n in (1, 4)]
        assert rows[0]["branch_error_trimmed"] == pytest.approx(relative(parts[1], parts[0]), rel=1e-6)

    def test_a_reference_that_writes_nothing_is_null_with_a_reason(self, model):
        model.weights["layers.1.mlp"][:] = 0
        _, rows = rows_of(model, "mlp")
        assert rows[0]["branch_error"] is None
        assert "exactly zero" in rows[0]["branch_error_reason"]
        encode(rows)

    def test_values_that_are_not_finite_name_the_site(self, model):
        model.weights["layers.4.mlp"][0, 0] = torch.nan
        with pytest.raises(DataError, match=r"layers\.4\.mlp gives NaN .* inputs of layers\.1\.mlp"):
            rows_of(model, "mlp")


class TestAttention:
    def test_probabilities_of_both_modules(self, model):
        z = residuals()
        one, rows = rows_of(model, "attention", z=z)
        parts = [model.branch(f"layers.{n}.self_attn", z, probabilities=True) for n in (1, 4)]
        calibration = [
            model.branch(f"layers.{n}.self_attn", residuals(seed=1), probabilities=True).probabilities
            for n in (1, 4)
        ]
        order = measures.match_heads(*calibration)
        js = measures.attention_js(parts[0].probabilities, parts[1].probabilities[:, order])
        topk = measures.attention_topk(parts[0].probabilities, parts[1].probabilities[:, order])
        for text, row in enumerate(rows):
            assert row["attention_js_heads"] == pytest.approx(js[text].tolist())
            assert row["attention_js"] == pytest.approx(float(js[text].mean()))
            assert row["attention_js_worst"] == pytest.approx(float(js[text].max()))
            assert row["attention_topk"] == pytest.approx(float(topk[text].mean()))
            assert row["attention_topk_worst"] == pytest.approx(float(topk[text].min()))
            assert null(row, "self")["attention_js_worst"] == 0.0
            assert null(row, "zero")["attention_js"] is None
            assert "no attention of its own" in null(row, "permuted")["attention_js_reason"]
            assert null(row, f"other.{one.others[0]}")["attention_js"] > 0.001

    def test_a_short_text_has_no_agreement(self, model):
        _, rows = rows_of(model, "attention", z=residuals(length=4))
        assert rows[0]["attention_topk"] is None
        assert "a text of 4 positions" in rows[0]["attention_topk_reason"]
        assert rows[0]["attention_js"] > 0


class TestNorms:
    def test_the_gain_is_swapped_in_its_own_layer_alone(self, model):
        z = residuals()
        names = ["layers.2.self_attn.q_norm", "layers.2.self_attn.k_norm"]
        _, rows = rows_of(model, "q_norm", *names, z=z)
        gains = [model.weights[name] for name in names]
        inputs = [model.norm_input(name, z) for name in names]
        assert model.mapping == {}
        k = normed(inputs[1], gains[1])
        attentions = [attend(normed(inputs[0], gain), k) for gain in gains]
        values = (z @ model.weights["layers.2.self_attn"].T).view(3, 9, 2, 4)
        updates = [torch.einsum("bhts,bshd->bthd", part, values).reshape(3, 9, 8) for part in attentions]
        js = measures.attention_js(*attentions)
        for text, row in enumerate(rows):
            outputs = [normed(inputs[0][text], gain) for gain in gains]
            assert row["norm_error"] == pytest.approx(relative(outputs[1], outputs[0]), rel=1e-6)
            assert row["branch_error"] == pytest.approx(
                relative(updates[1][text], updates[0][text]), rel=1e-5
            )
            assert row["attention_js_heads"] == pytest.approx(js[text].tolist(), rel=1e-6)
            assert null(row, "zero")["norm_error"] == 1.0
            assert null(row, "self")["norm_error"] == null(row, "self")["attention_js_worst"] == 0.0

    def test_equal_gains_are_exactly_0(self, model):
        names = ["layers.2.self_attn.q_norm", "layers.2.self_attn.k_norm"]
        model.weights[names[1]] = model.weights[names[0]].clone()
        for one in both_ways(model, "q_norm", *names, seed=0):
            (row, *_) = compare(model, one, residuals(), calibrate(model, one, residuals(seed=1)), seed=0)
            assert [row[key] for key in ("norm_error", "branch_error", "attention_js", "logit_js")] == [
                0.0
            ] * 4


class TestRows:
    @pytest.mark.parametrize("kind", ["mlp", "attention"])
    def test_plain_json_with_every_measure_and_reason(self, model, kind):
        _, rows = rows_of(model, kind)
        encode(rows)
        for part in (rows[0], *rows[0]["nulls"]):
            for key in MEASURES:
                assert isinstance(part[key], float) or part[f"{key}_reason"]
        assert "attention_js_heads" not in rows[0]["nulls"][0]
        assert json.loads(encode(rows)) == rows

    def test_texts_do_not_depend_on_each_other(self, model, monkeypatch):
        z = residuals(texts=5)
        _, together = rows_of(model, "attention", z=z)
        monkeypatch.setattr(branches, "HEAD_ROWS", 1)
        _, apart = rows_of(model, "attention", z=z)
        for text in range(5):
            _, (alone,) = rows_of(model, "attention", z=z[text : text + 1])
            for found in (apart[text], alone):
                for key in set(MEASURES) - {"norm_error"}:
                    assert found[key] == pytest.approx(together[text][key], rel=1e-5, abs=1e-9)

    def test_aggregate_pools_by_tokens(self, model):
        z = residuals(texts=2)
        _, rows = rows_of(model, "attention", z=z)
        found = aggregate(rows)
        parts = [model.branch(f"layers.{n}.self_attn", z).update for n in (1, 4)]
        assert found["branch_error"] == pytest.approx(relative(parts[1], parts[0]), rel=1e-6)
        rows[1]["tokens"] = 27
        assert aggregate(rows)["logit_js"] == pytest.approx(
            0.25 * rows[0]["logit_js"] + 0.75 * rows[1]["logit_js"]
        )
        assert found["attention_topk_worst"] == min(row["attention_topk_worst"] for row in rows)
        assert found["attention_js_worst"] == max(row["attention_js_worst"] for row in rows)
        assert found["norm_error"] is None
        assert found["norm_error_reason"]

    def test_calibration_orders_the_heads_of_the_substitute_and_of_every_other(self, model):
        one, _ = both_ways(model, "attention", "layers.1.self_attn", "layers.4.self_attn", seed=0)
        heads = calibrate(model, one, residuals(seed=1)).heads
        assert set(heads) == {"layers.4.self_attn", *one.others}
        assert all(sorted(order) == [0, 1] for order in heads.values())
