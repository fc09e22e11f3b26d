"""The streamed model against the library in memory, family by family, and everything that it refuses.

The reference is the library's own class with the same weights in float32, opened by ``from_pretrained``:
hidden states bit by bit where a matrix is one block, to 1e-5 relative where it is several. Branches are
compared with what hooks see inside the library's forward pass.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from twinscope import open_streamed
from twinscope.lab.errors import BudgetExceeded, ConfigError, DataError
from twinscope.models.streamed import budget as streamed_budget
from twinscope.models.streamed import build as streamed_build
from twinscope.models.streamed import reading
from twinscope.models.streamed.model import StreamedLM

# The reference models must come from the installed package alone: no kernels or files from a hub.
os.environ.setdefault("USE_HUB_KERNELS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

TOLERANCE = 1e-5
VOCAB, TEXTS, LENGTH = 131, 3, 11
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GEMMA = {**COMMON, "head_dim": 10, "sliding_window": 4}
BY_LAYER = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}

#: Class of the library, its configuration, whether its layers are known.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": (
        "GPT2LMHead",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "scale_attn_by_inverse_layer_idx": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        True,
    ),
    "llama": ("LlamaForCausalLM", {**COMMON, "attention_bias": True, "mlp_bias": True}, True),
    "llama scaled": (
        "LlamaForCausalLM",
        {
            **COMMON,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        True,
    ),
    "mistral": ("MistralForCausalLM", {**COMMON, "sliding_window": 4}, True),
    "qwen2": (
        "Qwen2ForCausalLM",
        {**COMMON, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        True,
    ),
    "qwen3": ("Qwen3ForCausalLM", {**COMMON, "head_dim": 10, "tie_word_embeddings": True}, True),
    "gemma": ("GemmaForCausalLM", {**COMMON, "head_dim": 10}, True),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**GEMMA, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
        True,
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "layer_types": BY_LAYER, "final_logit_softcapping": 3.0}, True),
    "phi3": ("Phi3ForCausalLM", COMMON, True),
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        {**COMMON, **LINEAR, "head_dim": 16, "rope_parameters": ROTARY, "tie_word_embeddings": True},
        True,
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {**COMMON, **LINEAR, **EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
        True,
    ),
    "granite": (
        "GraniteForCausalLM",
        {**COMMON, "residual_multiplier": 0.3, "logits_scaling": 5.0, "embedding_multiplier": 2.0},
        False,
    ),
    "cohere": ("CohereForCausalLM", {**COMMON, "logit_scale": 0.2}, False),
    "olmo2": ("Olmo2ForCausalLM", COMMON, False),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**COMMON, **EXPERTS, "head_dim": 8}, False),
}
KNOWN = [name for name, (_, _, known) in CASES.items() if known]


def build(case: str) -> Any:
    """The model of a case with weights that are large enough for every part to matter."""
    name, values, _ = CASES[case]
    name = "GPT2LMHeadModel" if name == "GPT2LMHead" else name
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(case: str) -> Path:
        if case not in made:
            made[case] = tmp_path_factory.mktemp("models") / case
            build(case).save_pretrained(made[case])
        return made[case]

    return folder


def reference(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def texts(seed: int = 0, length: int = LENGTH, count: int = TEXTS) -> Tensor:
    return torch.randint(0, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def states(model: Any, ids: Tensor) -> Tensor:
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


@torch.no_grad()
def losses(model: Any, ids: Tensor) -> Tensor:
    """Nats of every predicted token from the library's logits, in float64."""
    logits = model(input_ids=ids, use_cache=False).logits.double()
    flat = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="none")
    return flat.view(len(ids), -1)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the forward pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_states_and_losses_are_the_librarys(folders: Callable[[str], Path], case: str) -> None:
    folder, ids = folders(case), texts()
    model = reference(folder)
    with open_streamed(folder, budget_mib=None) as lm:
        assert (lm.layers, lm.width, lm.vocab, lm.notes) == (3, 32, VOCAB, ())
        assert torch.equal(lm.hidden(ids), states(model, ids))
        nll = lm.nll(ids)
        assert nll.shape == (TEXTS, LENGTH - 1)
        assert close(nll.double(), losses(model, ids))
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        assert float(nll.mean()) == pytest.approx(float(loss), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "count"),
    [*((case, 1) for case in CASES), *((case, 2) for case in ("gpt2", "gemma3", "qwen3.5"))],
)
def test_many_small_blocks_change_the_last_bits_at_most(
    folders: Callable[[str], Path], threads: Callable[[int], None], case: str, count: int
) -> None:
    folder, ids = folders(case), texts()
    model = reference(folder)
    threads(count)
    with open_streamed(folder, budget_mib=None) as lm:
        lm._built.reader.block_bytes = 1024  # eight rows of 32 values
        for _ in range(2):  # in the order of definition, then of the calls
            assert close(lm.hidden(ids), states(model, ids))
            assert close(lm.nll(ids).double(), losses(model, ids))
        if CASES[case][2]:
            *_, last = lm.walk(ids)
            assert close(normed(lm, last.z), states(model, ids))
    assert torch.get_num_threads() == count


def test_reading_ahead_gives_the_same_bits_as_reading_when_asked(
    folders: Callable[[str], Path], threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    found = []
    for cores in (1, 4):
        monkeypatch.setattr(reading, "_cores", lambda cores=cores: cores)
        with open_streamed(folders("phi3"), budget_mib=None) as lm:
            lm._built.reader.block_bytes = 2048
            found.append([lm.nll(texts()) for _ in range(3)])
    assert all(torch.equal(nll, found[0][0]) for nlls in found for nll in nlls)


def test_the_order_of_the_calls_is_learned(folders: Callable[[str], Path]) -> None:
    with open_streamed(folders("phi3"), budget_mib=None) as lm:
        lm.hidden(texts())
        lm.hidden(texts())
        (order,) = lm._built.reader._learned.values()
    # The class defines o_proj before qkv_proj and calls it after.
    assert [key.split(".")[-2] for key in order[:4]] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert len(order) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "mixed"])
@pytest.mark.parametrize("layout", ["single", "sharded", "one in the index"])
def test_formats(folders: Callable[[str], Path], tmp_path: Path, dtype: Any, layout: str) -> None:
    source, ids = folders("qwen3"), texts()
    tensors = load_file(source / "model.safetensors")
    kinds = [torch.bfloat16, torch.float16, torch.float32]
    for number, name in enumerate(tensors):
        tensors[name] = tensors[name].to(kinds[number % 3] if dtype == "mixed" else dtype)
    shutil.copy(source / "config.json", tmp_path)
    write(tmp_path, tensors, layout)
    with open_streamed(tmp_path, budget_mib=None) as lm:
        assert torch.equal(lm.hidden(ids), states(reference(tmp_path), ids))


def write(folder: Path, tensors: dict[str, Tensor], layout: str) -> None:
    if layout == "single":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    shards = 3 if layout == "sharded" else 1
    where = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {
            key: tensor for place, (key, tensor) in enumerate(tensors.items()) if place % shards == number
        }
        save_file(part, folder / name, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def test_a_released_multimodal_layout_is_read_as_its_text_model(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source, ids = folders("qwen3.5"), texts()
    tensors = load_file(source / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {"model.visual.blocks.0.weight": torch.ones(4), "mtp.layers.0.weight": torch.ones(4)}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with open_streamed(tmp_path, budget_mib=None) as lm, open_streamed(source, budget_mib=None) as plain:
        assert lm.family == "qwen3_5_text"
        assert torch.equal(lm.nll(ids), plain.nll(ids))


@pytest.mark.parametrize(("count", "delta_bytes"), [(1, 1 << 17), (2, 1 << 20)])
def test_texts_go_through_in_groups_that_fit_the_budget(
    folders: Callable[[str], Path],
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    delta_bytes: int,
) -> None:
    threads(count)
    ids = texts(count=5)
    for case in ("gemma3", "qwen3.5"):
        with open_streamed(folders(case), budget_mib=None) as lm:
            whole = lm.hidden(ids), lm.nll(ids), [point.z for point in lm.walk(ids)]
            monkeypatch.setattr(streamed_build, "DELTA_BYTES", delta_bytes)
            assert close(lm.hidden(ids), whole[0])
            monkeypatch.setattr(type(lm._sizes()), "together", lambda *_: 2)
            assert [len(part) for part in lm._together(ids)] == [2, 2, 1]
            parts = lm.hidden(ids), lm.nll(ids), [point.z for point in lm.walk(ids)]
            monkeypatch.undo()
        for one, other in zip([*whole[:2], *whole[2]], [*parts[:2], *parts[2]], strict=True):
            assert close(one, other)


# --- heads -----------------------------------------------------------------------------------------------

TIES: dict[str, tuple[bool, str, str]] = {
    "tied, head stored and equal": (True, "equal", ""),
    "tied, head stored and different": (True, "different", r"lm_head\.weight differs from"),
    "tied, only the head stored": (True, "no embedding", "hold no token embedding"),
    "untied, no head stored": (False, "no head", "a head of its own, but the files hold none"),
}


@pytest.mark.parametrize("case", TIES)
def test_the_files_decide_where_flag_and_files_disagree(
    folders: Callable[[str], Path], tmp_path: Path, case: str
) -> None:
    flag, stored, note = TIES[case]
    tensors = load_file(folders("llama") / "model.safetensors")
    config = json.loads((folders("llama") / "config.json").read_text())
    config["tie_word_embeddings"] = flag
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if stored == "equal":
        tensors["lm_head.weight"] = head = embedding.clone()
    if stored == "no embedding":
        del tensors["model.embed_tokens.weight"]
        embedding = head
    if stored == "no head":
        del tensors["lm_head.weight"]
        head = embedding
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model, ids = reference(folders("llama")), texts()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    with open_streamed(tmp_path, budget_mib=None) as lm:
        assert close(lm.nll(ids).double(), losses(model, ids))
        assert len(lm.notes) == bool(note)
        assert all(re.search(note, each) for each in lm.notes)
        if stored != "no head":  # the library draws a random head there
            assert close(lm.nll(ids).double(), losses(reference(tmp_path), ids))


@pytest.mark.parametrize("case", KNOWN)
def test_head_blocks_are_the_logits(folders: Callable[[str], Path], case: str) -> None:
    folder, ids = folders(case), texts()
    with torch.no_grad():
        logits = reference(folder)(input_ids=ids, use_cache=False).logits
    with open_streamed(folder, budget_mib=None) as lm:
        lm._built.reader.block_bytes = 4096
        *_, last = lm.walk(ids)
        assert last.site == "head"
        blocks = list(lm.head_blocks(last.z))
        assert [start for start, _ in blocks] == list(range(0, VOCAB, 32))
        assert close(torch.cat([block for _, block in blocks], 1), logits.reshape(-1, VOCAB))


# --- sites -----------------------------------------------------------------------------------------------


def normed(lm: StreamedLM, z: Tensor) -> Tensor:
    assert lm._layout is not None
    with torch.no_grad():
        return getattr(lm._built.base, lm._layout.norm)(z)


def library_branches(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What enters the pre-norm and what is added, per site, seen by hooks inside the library's forward."""
    base = model.base_model
    gpt2 = model.config.model_type == "gpt2"
    between = model.config.model_type in ("gemma2", "gemma3_text")
    inputs: dict[str, Tensor] = {}
    added: dict[str, Tensor] = {}

    def hook(store: dict[str, Tensor], site: str, before: bool) -> Callable[..., None]:
        def see(_: nn.Module, args: Any, out: Any = None) -> None:
            value = args[0] if before else out
            store[site] = (value[0] if isinstance(value, tuple) else value).clone()

        return see

    hooks = []
    for number, layer in enumerate(base.h if gpt2 else base.layers):
        linear = hasattr(layer, "linear_attn")
        mixer = layer.attn if gpt2 else layer.linear_attn if linear else layer.self_attn
        for site, module, pre, post in (
            (
                "linear_attn" if linear else "self_attn",
                mixer,
                layer.ln_1 if gpt2 else layer.input_layernorm,
                layer.post_attention_layernorm if between else None,
            ),
            (
                "mlp",
                layer.mlp,
                layer.ln_2
                if gpt2
                else layer.pre_feedforward_layernorm
                if between
                else layer.post_attention_layernorm,
                layer.post_feedforward_layernorm if between else None,
            ),
        ):
            name = f"layers.{number}.{site}"
            hooks.append(pre.register_forward_pre_hook(hook(inputs, name, True)))
            hooks.append((post or module).register_forward_hook(hook(added, name, False)))
        for norm in ("q_norm", "k_norm"):
            if hasattr(mixer, norm):
                name = f"layers.{number}.self_attn.{norm}"
                module = getattr(mixer, norm)
                hooks.append(module.register_forward_pre_hook(hook(inputs, name, True)))
                hooks.append(module.register_forward_hook(hook(added, name, False)))
    states(model, ids)
    for each in hooks:
        each.remove()
    return inputs, added


@pytest.mark.parametrize("case", KNOWN)
def test_walk_and_branches_are_what_the_forward_pass_does(folders: Callable[[str], Path], case: str) -> None:
    folder, ids = folders(case), texts()
    inputs, added = library_branches(reference(folder), ids)
    norms = [site for site in inputs if site.endswith("_norm")]
    with open_streamed(folder, budget_mib=None) as lm:
        points = {point.site: point.z for point in lm.walk(ids)}
        assert list(points) == [site for site in inputs if site not in norms] + ["head"]
        for site in points.keys() - {"head"}:
            assert torch.equal(points[site], inputs[site]), site
            assert torch.equal(lm.branch(site, points[site]).update, added[site]), site
        assert torch.equal(normed(lm, points["head"]), lm.hidden(ids))
        for site in norms:
            entered = lm.norm_input(site, points[site.rpartition(".")[0]])
            assert torch.equal(entered, inputs[site]), site
            assert torch.equal(lm.branch(site, entered).update, added[site]), site
        assert sorted(norms) == sorted(lm.sites("q_norm") + lm.sites("k_norm"))
        kinds = ("attention", "linear_attention", "mlp")
        assert sorted(site for kind in kinds for site in lm.sites(kind)) == sorted(points.keys() - {"head"})


@pytest.mark.parametrize("case", ["gpt2", "gemma3", "qwen3.5"])
def test_a_pass_goes_on_from_any_site(folders: Callable[[str], Path], case: str) -> None:
    folder, ids = folders(case), texts()
    with open_streamed(folder, budget_mib=None) as lm:
        points = {point.site: point.z for point in lm.walk(ids)}
        assert list(points) == [*lm.branches(), "head"]
        for site in lm.branches():
            leaves = points[site] + lm.branch(site, points[site]).update
            assert torch.equal(lm.onward(leaves, site), points["head"]), site
            for to in list(points)[list(points).index(site) + 1 :]:
                assert torch.equal(lm.onward(leaves, site, to), points[to]), (site, to)
        assert torch.equal(lm.nll_at(points["head"], ids), lm.nll(ids))
        first = lm.branches()[0]
        with pytest.raises(ConfigError, match=f"{first} does not come behind {first}"):
            lm.onward(points[first], first, first)
        with pytest.raises(ConfigError, match=r"'head' does not|does not come behind head"):
            lm.onward(points[first], "head", first)
        with pytest.raises(ConfigError, match="adds nothing to the residual stream"):
            lm.onward(points[first], "layers.0.norm")


@pytest.mark.parametrize("case", ["gpt2", "mistral", "gemma2", "gemma3", "qwen3.5"])
def test_a_branch_is_a_function_of_any_residual(folders: Callable[[str], Path], case: str) -> None:
    """Another site's residual, another length: the library's module on it, masked by its kind."""
    folder = folders(case)
    model = reference(folder)
    torch.manual_seed(3)
    with open_streamed(folder, budget_mib=None) as lm:
        for site in lm.sites("attention") + lm.sites("linear_attention") + lm.sites("mlp"):
            z = 2.0 * torch.randn(2, 9, 32)
            # The library's own layer loop, with this layer alone between z and the norm.
            inputs, added = at_layer(model, int(site.split(".")[1]), z)
            if site.endswith("attn"):
                assert torch.equal(inputs[site], z)
            assert torch.equal(lm.branch(site, inputs[site]).update, added[site]), site


@pytest.mark.parametrize("case", ["gpt2", "llama", "gemma3", "qwen3.5"])
def test_what_is_added_to_a_module_goes_through_the_norm_behind_it(
    folders: Callable[[str], Path], case: str
) -> None:
    folder = folders(case)
    model = reference(folder)
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers
    torch.manual_seed(4)
    z, more = 2.0 * torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    with open_streamed(folder, budget_mib=None) as lm:
        for site in lm.branches():
            plain = lm.branch(site, z).update
            assert torch.equal(lm.branch(site, z, added=torch.zeros_like(z)).update, plain), site
            layer = layers[int(site.split(".")[1])]
            if case != "gemma3":
                assert torch.equal(lm.branch(site, z, added=more).update, plain + more), site
            elif site.endswith("mlp"):
                with torch.no_grad():
                    expected = layer.post_feedforward_layernorm(
                        layer.mlp(layer.pre_feedforward_layernorm(z)) + more
                    )
                assert torch.equal(lm.branch(site, z, added=more).update, expected), site
            else:
                assert not torch.equal(lm.branch(site, z, added=more).update, plain + more), site
        for site in lm.sites("q_norm"):
            with pytest.raises(ConfigError, match=f"{site} is a gain: nothing is added"):
                lm.branch(site, torch.randn(1, 2, 4, 10), added=torch.randn(1, 2, 4, 10))


def at_layer(model: Any, number: int, z: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """As ``library_branches``, but with ``z`` entering one layer, by a hook in front of it."""
    base = model.base_model
    layer = (base.h if hasattr(base, "h") else base.layers)[number]
    hook = layer.register_forward_pre_hook(lambda _, args: (z, *args[1:]))
    try:
        return library_branches(model, texts(length=z.shape[1], count=len(z)))
    finally:
        hook.remove()


@pytest.mark.parametrize("case", ["gpt2", "llama", "mistral", "gemma3", "qwen3.5", "qwen3-next"])
def test_probabilities_are_those_of_eager_attention(folders: Callable[[str], Path], case: str) -> None:
    folder, ids = folders(case), texts()
    model = reference(folder, attn_implementation="eager")
    with torch.no_grad():
        found = model.base_model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    expected = [each for each in found if each is not None]
    with open_streamed(folder, budget_mib=None) as lm:
        points = {point.site: point.z for point in lm.walk(ids, lm.sites("attention"))}
        for site, theirs in zip(lm.sites("attention"), expected, strict=True):
            plain = lm.branch(site, points[site])
            assert plain.probabilities is None
            eager = lm.branch(site, points[site], probabilities=True)
            assert eager.probabilities is not None
            assert close(eager.probabilities, theirs)
            assert close(eager.update, plain.update)
            assert torch.equal(lm.branch(site, points[site]).update, plain.update)
        with pytest.raises(ConfigError, match="no attention probabilities"):
            lm.branch("layers.0.mlp", points[site], probabilities=True)


def test_a_walk_stops_after_the_last_site_it_was_asked_for(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_streamed(folders("qwen3"), budget_mib=None) as lm:
        read: list[str] = []
        whole = type(lm._built.reader).each
        monkeypatch.setattr(
            type(lm._built.reader), "each", lambda self, key, work: read.append(key) or whole(self, key, work)
        )
        points = list(lm.walk(texts(), ["layers.1.self_attn.k_norm", "layers.0.mlp"]))
        assert [point.site for point in points] == ["layers.0.mlp", "layers.1.self_attn.k_norm"]
        assert {key.split(".")[2] for key in read} == {"0"}


@pytest.mark.parametrize("case", [name for name in CASES if not CASES[name][2]])
def test_a_family_whose_layers_are_not_known_has_no_sites(folders: Callable[[str], Path], case: str) -> None:
    with open_streamed(folders(case), budget_mib=None) as lm:
        for call in (
            lambda: list(lm.walk(texts())),
            lambda: lm.branch("layers.0.mlp", torch.zeros(1, 2, 32)),
            lambda: lm.sites("mlp"),
            lambda: lm.remap({"layers.0.mlp": "layers.1.mlp"}),
        ):
            with pytest.raises(ConfigError, match=f"'{lm.family}' model are not known to be pre-norm"):
                call()


def test_wrong_sites_are_refused(folders: Callable[[str], Path]) -> None:
    z = torch.zeros(1, 2, 32)
    with open_streamed(folders("qwen3.5"), budget_mib=None) as lm:
        for site in (
            "layers.3.mlp",
            "layers.0.self_attn",
            "layers.1.linear_attn",
            "model.layers.0.mlp",
            "mlp",
        ):
            with pytest.raises(ConfigError, match=f"no site '{site}': it has layers.0 … layers.2 with"):
                lm.branch(site, z)
        with pytest.raises(ConfigError, match="no kind of site 'attn'"):
            lm.sites("attn")
        with pytest.raises(ConfigError, match="is no q or k norm"):
            lm.norm_input("layers.0.mlp", z)


# --- pointing tensors elsewhere --------------------------------------------------------------------------


def swapped(folder: Path, moves: dict[str, str]) -> Any:
    """The library's model with modules (by name in the base) replaced by others' weights."""
    model = reference(folder)
    with torch.no_grad():
        for target, source in moves.items():
            own = dict(model.base_model.get_submodule(target).named_parameters())
            for name, parameter in reference(folder).base_model.get_submodule(source).named_parameters():
                own[name].copy_(parameter)
    return model


REMAPS: dict[str, tuple[str, dict[str, str], bool, dict[str, str]]] = {
    "mlp": ("qwen3", {"layers.2.mlp": "layers.0.mlp"}, False, {"layers.2.mlp": "layers.0.mlp"}),
    "mlp with its norm": (
        "qwen3",
        {"layers.2.mlp": "layers.0.mlp"},
        True,
        {
            "layers.2.mlp": "layers.0.mlp",
            "layers.2.post_attention_layernorm": "layers.0.post_attention_layernorm",
        },
    ),
    "two attentions exchanged": (
        "gemma3",
        {"layers.2.self_attn": "layers.0.self_attn", "layers.0.self_attn": "layers.2.self_attn"},
        True,
        {
            f"layers.{a}.{part}": f"layers.{b}.{part}"
            for a, b in ((0, 2), (2, 0))
            for part in ("self_attn", "input_layernorm", "post_attention_layernorm")
        },
    ),
    "q norm": (
        "qwen3",
        {"layers.1.self_attn.q_norm": "layers.2.self_attn.q_norm"},
        True,
        {"layers.1.self_attn.q_norm": "layers.2.self_attn.q_norm"},
    ),
    "q norm from k norm": (
        "qwen3",
        {"layers.1.self_attn.q_norm": "layers.1.self_attn.k_norm"},
        True,
        {"layers.1.self_attn.q_norm": "layers.1.self_attn.k_norm"},
    ),
    "linear attention": (
        "qwen3.5",
        {"layers.2.linear_attn": "layers.0.linear_attn"},
        False,
        {"layers.2.linear_attn": "layers.0.linear_attn"},
    ),
    "experts": ("qwen3-next", {"layers.1.mlp": "layers.2.mlp"}, False, {"layers.1.mlp": "layers.2.mlp"}),
    "gpt2": (
        "gpt2",
        {"layers.1.self_attn": "layers.0.self_attn"},
        True,
        {"h.1.attn": "h.0.attn", "h.1.ln_1": "h.0.ln_1"},
    ),
}


@pytest.mark.parametrize("name", REMAPS)
def test_a_remapped_model_is_the_model_with_those_weights(folders: Callable[[str], Path], name: str) -> None:
    case, mapping, with_norm, moves = REMAPS[name]
    folder, ids = folders(case), texts()
    model = swapped(folder, moves)
    expected, own = states(model, ids), states(reference(folder), ids)
    assert not close(expected, own)
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids, use_cache=False).loss)
    with open_streamed(folder, budget_mib=None) as lm:
        lm.hidden(ids)
        with lm.remapped(mapping, with_norm=with_norm):
            assert torch.equal(lm.hidden(ids), expected)
            assert float(lm.nll(ids).mean()) == pytest.approx(loss, rel=TOLERANCE)
        assert torch.equal(lm.hidden(ids), own)
        lm.remap(mapping, with_norm=with_norm)
        assert torch.equal(lm.hidden(ids), expected)
        with lm.remapped({}):
            assert torch.equal(lm.hidden(ids), own)
        assert torch.equal(lm.hidden(ids), expected)
        lm.remap({})
        assert torch.equal(lm.hidden(ids), own)


def test_what_cannot_be_remapped_is_refused(folders: Callable[[str], Path]) -> None:
    with open_streamed(folders("qwen3-next"), budget_mib=None) as lm:
        before = lm.hidden(texts())
        for mapping, words in (
            ({"layers.0.linear_attn": "layers.1.self_attn"}, "two kinds"),
            ({"layers.1.mlp": "layers.0.mlp"}, "their shapes differ"),  # experts and a plain one
            ({"layers.1.mlp": "layers.9.mlp"}, "no site"),
            ({"layers.1.self_attn.q_norm": "layers.1.mlp"}, "two kinds"),
        ):
            with pytest.raises(ConfigError, match=words):
                lm.remap(mapping)
        assert torch.equal(lm.hidden(texts()), before)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.fixture
def damaged(folders: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a case with changes in its configuration and tensors."""

    def change(
        case: str = "qwen3",
        config: Callable[[dict[str, Any]], object] = lambda _: None,
        tensors: Callable[[dict[str, Tensor]], object] = lambda _: None,
    ) -> Path:
        values = json.loads((folders(case) / "config.json").read_text())
        config(values)
        (tmp_path / "config.json").write_text(json.dumps(values))
        held = load_file(folders(case) / "model.safetensors")
        tensors(held)
        save_file(held, tmp_path / "model.safetensors", {"format": "pt"})
        return tmp_path

    return change


def refusal(folder: Path, error: type[Exception] = DataError) -> str:
    with pytest.raises(error) as caught:
        open_streamed(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_configuration_that_disagrees_with_the_tensors(damaged: Callable[..., Path]) -> None:
    assert "config.json asks for (48, 32)" in refusal(
        damaged(tensors=lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(40, 32)}))
    )
    assert "no tensor 'model.layers.3." in refusal(
        damaged(config=lambda c: c.update(num_hidden_layers=4, layer_types=None))
    )
    assert "without a place in this model, model.layers.2." in refusal(
        damaged(config=lambda c: c.update(num_hidden_layers=2, layer_types=None))
    )
    assert "holds no tensor 'model.norm.weight'" in refusal(
        damaged(tensors=lambda t: t.pop("model.norm.weight"))
    )
    assert "holds no token embedding" in refusal(
        damaged(tensors=lambda t: t.pop("model.embed_tokens.weight"))
    )
    assert "hidden_size" in refusal(damaged(config=lambda c: c.update(hidden_size="wide")))
    assert "that can be built" in refusal(damaged(config=lambda c: c.update(hidden_act="rot13")))


def test_configurations_that_are_never_opened(damaged: Callable[..., Path], tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    assert "auto_map), which is never run" in refusal(damaged(config=lambda c: c.update(auto_map=code)))
    assert "quantised" in refusal(damaged(config=lambda c: c.update(quantization_config={"bits": 4})))
    assert "does not know" in refusal(damaged(config=lambda c: c.update(model_type="evil")), ConfigError)
    assert "no causal language model" in refusal(
        damaged(config=lambda c: c.update(model_type="vit")), ConfigError
    )
    assert "names no model_type" in refusal(damaged(config=lambda c: c.pop("model_type")))
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "is no Hugging Face folder" in refusal(tmp_path)


def test_pickled_weights_are_refused(damaged: Callable[..., Path], tmp_path: Path) -> None:
    damaged()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "pickles (pytorch_model.bin), which run code when opened" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_norm.weight"]
)
@pytest.mark.parametrize(("value", "count"), [(float("nan"), 1), (float("-inf"), 2)])
def test_a_weight_that_is_not_finite_is_named(
    damaged: Callable[..., Path], threads: Callable[[int], None], name: str, value: float, count: int
) -> None:
    threads(count)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    folder = damaged(tensors=spoil)
    with pytest.raises(DataError, match=f"NaN or infinite values in {name}"):  # noqa: PT012
        lm = open_streamed(folder, budget_mib=None)
        lm.hidden(texts())
    assert [thread.name for thread in threading.enumerate() if thread.name == "weights-ahead"] == []


def test_a_file_that_shrinks_between_two_passes(damaged: Callable[..., Path]) -> None:
    folder = damaged()
    with open_streamed(folder, budget_mib=None) as lm:
        lm.hidden(texts())
        path = folder / "model.safetensors"
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DataError, match="while it was open"):
            lm.hidden(texts())


def test_texts_that_do_not_fit(folders: Callable[[str], Path]) -> None:
    with open_streamed(folders("gpt2"), budget_mib=None) as lm:
        for ids, words in (
            (texts(length=65), "65 tokens does not fit this model, which reads 1 to 64"),
            (torch.tensor([[VOCAB]]), f"outside 0 … {VOCAB - 1}"),
            (torch.tensor([[-1]]), "outside"),
            (torch.tensor([3]), "shape"),
            (torch.ones(1, 3), "whole numbers"),
            (torch.empty((0, 3), dtype=torch.long), "shape"),
        ):
            for call in (lm.hidden, lm.nll, lambda ids: list(lm.walk(ids))):
                with pytest.raises(DataError, match=words):
                    call(ids)
        with pytest.raises(DataError, match="predicts no other"):
            lm.nll(torch.tensor([[3]]))


# --- memory and threads ----------------------------------------------------------------------------------


def test_no_matrix_stays_in_memory(folders: Callable[[str], Path]) -> None:
    for case in ("gemma3", "qwen3-next"):
        with open_streamed(folders(case), budget_mib=None) as lm:
            lm.nll(texts())
            held = {name: parameter.shape for name, parameter in lm._built.base.named_parameters()}
        large = {name for name, shape in held.items() if shape.numel() > 200}
        # The convolution of 4 values a channel is small, and a router of this size is.
        assert {name.split(".", 2)[-1] for name in large} <= {"linear_attn.conv1d.weight"}


def test_a_large_parameter_of_another_kind_is_there_only_while_its_module_runs(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_build, "_RESIDENT", 100)
    folder, ids = folders("qwen3-moe"), texts()
    with open_streamed(folder, budget_mib=None) as lm:
        router = lm._built.base.layers[1].mlp.gate
        assert router.weight.is_meta
        assert torch.equal(lm.hidden(ids), states(reference(folder), ids))
        assert router.weight.is_meta


def test_a_process_that_outgrows_the_budget_is_stopped_and_can_go_on(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_streamed(folders("qwen3"), budget_mib=512) as lm:
        before = lm.hidden(texts())
        sizes = iter([400.0, 400.0, *[450.0] * 6, *[700.0] * 2])
        monkeypatch.setattr(streamed_budget, "rss_mib", lambda: next(sizes))
        with pytest.raises(BudgetExceeded, match="holds 700 MiB in the middle of a pass") as caught:
            lm.hidden(texts())
        assert (caught.value.kind, caught.value.limit) == ("process_memory", 528.0)
        monkeypatch.undo()
        assert torch.equal(lm.hidden(texts()), before)
        # What others hold does not stop a pass.
        monkeypatch.setattr(streamed_budget, "rss_mib", lambda: 3000.0)
        assert torch.equal(lm.hidden(texts()), before)


def test_the_plan_grows_with_the_texts_until_they_go_in_groups(folders: Callable[[str], Path]) -> None:
    with open_streamed(folders("llama"), budget_mib=None) as free, open_streamed(folders("llama")) as bound:
        # 4 C + 4 × the widest of q, k, v, o, gate, up, down, and three residual streams, in float32.
        grown = free.plan_mib(1001, 32) - free.plan_mib(1, 32)
        assert grown == pytest.approx(1000 * 32 * 4 * (4 * 32 + 4 * 48 + 3 * 32) / 2**20)
        assert bound.plan_mib(10**6, 64) - bound.plan_mib(5 * 10**5, 64) == pytest.approx(
            5 * 10**5 * 64 * 4 * 3 * 32 / 2**20
        )


def test_nothing_is_left_when_a_model_is_closed_or_dropped(
    folders: Callable[[str], Path], threads: Callable[[int], None]
) -> None:
    threads(2)
    files, alive = len(os.listdir("/proc/self/fd")), threading.active_count()
    for close_it in (True, False):
        lm = open_streamed(folders("llama"), budget_mib=None)
        lm.nll(texts())
        if close_it:
            lm.close()
            with pytest.raises(ValueError, match="closed"):
                lm.hidden(texts())
        del lm
        gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("weights"):
            thread.join(5)
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == alive


def test_the_library_is_told_to_stay_offline_when_a_model_is_opened(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_HUB_KERNELS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    open_streamed(folders("llama"), budget_mib=None).close()
    assert (os.environ["USE_HUB_KERNELS"], os.environ["HF_HUB_OFFLINE"]) == ("0", "1")
