"""Architectures that are not known: read by the usual meanings of their fields, or refused."""

import json
import re

import pytest

from hwmodels.hf.config import from_hf_config, from_hf_fields
from hwmodels.model import LatentAttention, MixtureOfExperts
from tests.hwmodels.hf.published import DEEPSEEK_V3, LLAMA, QWEN2_MOE, read

NEW = {"architectures": ["NeverSeenForCausalLM"]}


def figures(model):
    return model.num_parameters, model.num_active_parameters, model.kv_bytes_per_token(), model.blocks


@pytest.mark.parametrize("known", [LLAMA, DEEPSEEK_V3], ids=["dense", "latent with experts"])
def test_is_read_like_the_known_one_with_the_same_fields(known):
    model = read(known, **NEW)
    assert figures(model) == figures(read(known))
    assert model.read_by_fields


def test_one_line_says_what_was_assumed():
    [note] = read(LLAMA, **NEW).notes
    assert note == (
        "architectures=NeverSeenForCausalLM: not known, read by the usual meanings of its fields: 32 layers, "
        "attention of 32 heads and 8 KV heads of 128 in 32, MLPs of 3 matrices (hidden_act=silu), "
        "two tables of 128,256 tokens; 8.03 B parameters. Errors may be larger than those of known ones"
    )


OTHER_NAMES = {
    "architectures": ["NeverSeenForCausalLM"],
    "n_layer": 32,
    "n_embd": 4096,
    "n_head": 32,
    "n_head_kv": 8,
    "ffn_dim": 14336,
    "padded_vocab_size": 128256,
    "max_seq_len": 131072,
    "activation_function": "silu",
}


def test_fields_have_several_usual_names():
    assert figures(from_hf_fields(OTHER_NAMES, "new")) == figures(read(LLAMA))


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_the_language_model_may_be_nested(key):
    inner = {name: value for name, value in LLAMA.items() if name != "architectures"}
    model = from_hf_fields({"architectures": ["SomeVLForConditionalGeneration"], key: inner}, "new")
    assert figures(model) == figures(read(LLAMA))


def test_a_nested_language_model_that_names_its_architecture_is_read_as_that():
    model = from_hf_fields({"architectures": ["SomeVLForConditionalGeneration"], "llm_config": LLAMA}, "new")
    assert not model.read_by_fields
    [note] = model.notes
    assert "its language model is read as LlamaForCausalLM" in note
    by_type = {**LLAMA, "architectures": None, "model_type": "llama"}
    again = from_hf_fields(
        {"architectures": ["SomeVLForConditionalGeneration"], "llm_config": by_type}, "new"
    )
    assert figures(again) == figures(model)


def test_experts_are_read_by_their_counts():
    fields = {**LLAMA, **NEW, "num_experts": 64, "moe_k": 6, "expert_ffn_hidden_size": 1408}
    fields |= {"num_shared_experts": 2, "first_k_dense_replace": 1}
    dense, sparse = from_hf_fields(fields, "new").blocks
    assert (dense.count, sparse.count) == (1, 31)
    assert sparse.mlp == MixtureOfExperts(
        num_experts=64, top_k=6, intermediate_size=1408, shared_intermediate_size=2 * 1408
    )


def test_activations_without_a_gate_mean_two_matrices():
    gated, plain = (read(LLAMA, **NEW, hidden_act=act).blocks[0].mlp for act in ("silu", "relu2"))
    assert (gated.gated, plain.gated) == (True, False)


def test_windows_are_read_where_the_layers_that_have_them_are_stated():
    kinds = ["sliding_attention", "full_attention"] * 16
    windowed, full = read(LLAMA, **NEW, sliding_window=4096, layer_types=kinds).blocks
    assert (windowed.attention.window, full.attention.window) == (4096, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window=4096: is of an unknown architecture; say in layer_types"),
        ({"layer_types": ["mamba"] * 32}, 'layer_types=["mamba", '),
        ({"ssm_state_size": 16}, "ssm_state_size=16: not understood, and may change what"),
        ({"index_topk": 2048}, "index_topk=2048: not understood"),
        ({"conv_kernel": 4, "compress_ratio": 8}, "compress_ratio=8, conv_kernel=4: not understood"),
        ({"mtp_depth": 2}, "mtp_depth=2: not understood"),
        ({"total_ut_steps": 4}, "total_ut_steps=4: not understood"),
        ({"num_hidden_layers": None}, "num_hidden_layers: missing; NeverSeenForCausalLM needs them"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_fields_that_may_change_a_price_are_named_in_the_refusal(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(LLAMA, **NEW, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BertForMaskedLM", "is not a decoder that generates text"),
        ("T5ForConditionalGeneration", "is not a decoder that generates text"),
        ("MambaForCausalLM", "has no attention and keeps no KV"),
    ],
)
def test_models_of_another_kind_are_refused_with_the_reason(name, message):
    with pytest.raises(ValueError, match=message):
        read(LLAMA, architectures=[name])


def folder_with(tmp_path, size, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    index = {"metadata": {"total_size": size}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(tmp_path)


def test_is_refused_if_the_size_of_the_checkpoint_contradicts_the_count(tmp_path):
    folder = folder_with(tmp_path, size=24_000_000_000, **NEW)
    with pytest.raises(ValueError, match=r"its weights take 16.06 GB, but 24 GB by model.safetensors.index"):
        from_hf_config(folder)


def test_is_read_if_the_size_of_the_checkpoint_agrees(tmp_path):
    model = from_hf_config(folder_with(tmp_path, size=16_060_000_000, **NEW))
    assert model.read_by_fields
    assert len(model.notes) == 1


NO_EFFECT = [
    {"use_qk_norm": True},
    {"router_aux_loss_coef": 0.001, "output_router_logits": True, "moe_router_dtype": "float32"},
    {"initializer_range": 0.02, "init_std": 0.1, "embedding_init_std": 0.02},
    {"attention_dropout": 0.1, "resid_pdrop": 0.1, "hidden_dropout_prob": 0.1},
    {"rope_theta": 1e6, "rope_scaling": {"factor": 4}, "rotary_pct": 0.5, "mrope_section": [1]},
    {"num_shared_experts": 0, "index_topk": None, "use_mla": False, "sliding_window": None},
    {"router_scaling_factor": 2.5, "router_jitter_noise": 0.01, "routed_scaling_factor": 2.5},
    {"embedding_multiplier": 12, "logits_scaling": 16, "residual_multiplier": 0.2},
]


@pytest.mark.parametrize("fields", NO_EFFECT, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("known", [QWEN2_MOE | {"architectures": ["Qwen3MoeForCausalLM"]}, LLAMA | NEW])
def test_fields_without_effect_on_a_price_are_let_through(known, fields):
    given, bare = read(known, **fields), read(known)
    assert given.num_parameters == pytest.approx(bare.num_parameters, rel=1e-5)  # norms of queries and keys
    assert given.kv_bytes_per_token() == bare.kv_bytes_per_token()
    assert given.notes == bare.notes


def test_other_fields_that_are_not_understood_are_named_in_one_note():
    [note] = read(LLAMA, vibe="good", is_nice=True).notes
    assert note == "fields taken to be without effect on time and memory: is_nice, vibe"


def test_latent_attention_is_recognised_by_its_rank():
    assert isinstance(read(DEEPSEEK_V3, **NEW).blocks[0].attention, LatentAttention)


HYBRID = {
    "architectures": ["NemotronHForCausalLM"],
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*-M",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
DECI = {**LLAMA, "architectures": ["DeciLMForCausalLM"], "num_hidden_layers": 1, "intermediate_size": None}


def deci(attention=None, ffn=None):
    block = {"attention": attention or {"n_heads_in_group": 4}, "ffn": ffn or {"ffn_mult": 2.625}}
    return {**DECI, "block_configs": [block]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**HYBRID, "hybrid_override_pattern": "M*"}, 'hybrid_override_pattern="M*": must name 4 layers'),
        ({**HYBRID, "hybrid_override_pattern": "M*X-"}, 'hybrid_override_pattern="M*X-": must name 4 layers'),
        ({**HYBRID, "mamba_ssm_cache_dtype": "fp8"}, 'mamba_ssm_cache_dtype="fp8": must be one of float32'),
        ({**HYBRID, "mamba_num_heads": 7}, "num_groups=2: must divide num_heads=7"),
        ({**HYBRID, "hybrid_override_pattern": "M-M-"}, "no layer keeps KV, and such models have no price"),
        (deci(attention={"replace_with_linear": True}), "block_configs[0].attention="),
        (deci(ffn={"ffn_mult": "wide"}), 'ffn_mult="wide": must be a number > 0'),
        ({**DECI, "block_configs": []}, "block_configs=[]: must be a list of 1 objects"),
        ({**LLAMA, **NEW, "hidden_act": ["silu"]}, 'hidden_act=["silu"]: must be a text'),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_wrong_values_of_layers_that_differ_are_named(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hf_fields(config, "wrong")


def test_layers_may_be_left_out_and_differ_in_their_heads():
    """DeciLM: 2 x 2.625 x 4,096 / 3 = 7,168 is a multiple of 256."""
    [whole], [without] = deci()["block_configs"], deci(attention={"no_op": True})["block_configs"]
    [nothing] = deci(attention={"no_op": True}, ffn={"no_op": True})["block_configs"]
    config = {**DECI, "num_hidden_layers": 3, "block_configs": [whole, without, nothing]}
    model = from_hf_fields(config, "deci")
    first, second = model.blocks
    assert (first.attention.num_kv_heads, first.mlp.intermediate_size) == (8, 7168)
    assert second.attention.kv_bytes_per_token("bf16") == 0
    assert model.num_layers == 2
