"""Fields of config.json and GGUF metadata: read, or refused instead of ignored."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from realengine.model.architecture import Architecture  # noqa: E402
from realengine.weights.gguf import GgufFile  # noqa: E402
from tests.realengine.checkpoints import (  # noqa: E402
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    as_gguf,
    gguf_metadata,
    random_checkpoint,
    write_config,
    write_gguf,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_llama_sizes_come_from_config_json(tmp_path):
    write_config(tmp_path, LLAMA)
    architecture = Architecture.from_path(tmp_path)
    assert architecture == Architecture(
        model_type="llama",
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        dtype=torch.float32,
        eos_token_ids=(2,),
    )


def test_old_llama_has_a_kv_head_for_each_head():
    config = {key: value for key, value in LLAMA.items() if key not in ("num_key_value_heads", "rope_theta")}
    architecture = Architecture.from_hf(config)
    assert (architecture.num_kv_heads, architecture.rope_theta) == (4, 10000.0)


def test_qwen2_has_biases_and_qwen3_norms_of_heads():
    qwen2, qwen3 = Architecture.from_hf(QWEN2), Architecture.from_hf(QWEN3)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tie_word_embeddings) == (True, False, True)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.tie_word_embeddings) == (False, True, False)
    assert qwen3.head_dim == 16


def test_experts_are_in_every_decoder_sparse_step_th_layer():
    config = {**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    architecture = Architecture.from_hf(config)
    assert [architecture.has_experts(i) for i in range(6)] == [False, True, False, False, False, True]
    assert architecture.norm_topk_prob
    assert not any(Architecture.from_hf(QWEN3).has_experts(i) for i in range(2))


def test_transformers_5_names_the_number_of_experts_otherwise():
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert Architecture.from_hf({**config, "num_local_experts": 3}) == Architecture.from_hf(QWEN3_MOE)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16, 16]),
        ({"model_type": "mistral", "sliding_window": None}, [None, None]),
        ({"model_type": "mistral"}, [4096, 4096]),
        ({"model_type": "llama", "sliding_window": 16}, [None, None]),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, [None, None]),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            [None, 16],
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            [16, None],
        ),
    ],
)
def test_windows_by_layer(fields, windows):
    architecture = Architecture.from_hf({**LLAMA, **fields})
    assert [architecture.window(i) for i in range(2)] == windows


def test_old_and_new_rope_fields_mean_the_same():
    old = Architecture.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE})
    config = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = Architecture.from_hf({**config, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}})
    assert old == new
    assert (new.rope_theta, new.rope_scaling) == (5e5, LLAMA3_ROPE)


def test_rope_of_type_default_is_unscaled_and_the_oldest_key_is_read():
    unscaled = Architecture.from_hf({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (unscaled.rope_theta, unscaled.rope_scaling) == (7.0, None)
    linear = Architecture.from_hf({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_yarn_without_an_original_context_takes_the_models():
    scaling = Architecture.from_hf(
        {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    ).rope_scaling
    assert scaling["original_max_position_embeddings"] == 128


def test_several_eos_tokens_and_the_newer_dtype_key():
    architecture = Architecture.from_hf({**LLAMA, "eos_token_id": [2, 5], "dtype": "float16"})
    assert (architecture.eos_token_ids, architecture.dtype) == ((2, 5), torch.float16)


@pytest.mark.parametrize("name", ["gpt2", "falcon", "gemma3"])
def test_rejects_unknown_architectures_with_those_supported(name):
    with pytest.raises(
        ValueError, match=f"model_type={name}.*supported: llama, mistral, qwen2, qwen3, qwen3_moe"
    ):
        Architecture.from_hf({**LLAMA, "model_type": name})


def test_rejects_missing_keys_by_name(tmp_path):
    config = {key: value for key, value in QWEN3_MOE.items() if key not in ("num_experts", "hidden_size")}
    file = write_config(tmp_path, config)
    with pytest.raises(ValueError, match=rf"{file}: hidden_size, num_experts: missing"):
        Architecture.from_path(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope.*supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "float8_e4m3fn"}, "dtype.*must be one of float32"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3: must divide num_heads=4"),
        ({"hidden_size": 33}, "hidden_size=33: must be a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"head_dim": 7}, "head_dim=7: must be even"),
    ],
)
def test_rejects_what_would_not_be_computed(fields, message):
    with pytest.raises(ValueError, match=message):
        Architecture.from_hf({**LLAMA, **fields})


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, {**QWEN3_MOE, "mlp_only_layers": []}])
def test_gguf_metadata_says_what_config_json_says(tmp_path, config):
    tensors = as_gguf(config, random_checkpoint(config))
    file = write_gguf(tmp_path / "model.gguf", gguf_metadata(config), tensors)
    parsed = Architecture.from_hf({key: value for key, value in config.items() if key != "torch_dtype"})
    assert Architecture.from_path(file) == parsed


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_rope_factors_are_recognised_as_llama3(tmp_path, factor):
    scaling = {**LLAMA3_ROPE, "factor": factor}
    config = {**LLAMA, "rope_theta": 5e5, "head_dim": 128, "hidden_size": 512}
    # The model card's rule, wavelength by wavelength.
    factors = []
    for i in range(64):
        wavelength = 2 * np.pi * 5e5 ** (2 * i / 128)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    assert 1.0 in factors
    assert factor in factors
    tensors = {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    file = GgufFile(write_gguf(tmp_path / "model.gguf", gguf_metadata(config), tensors))
    assert Architecture.from_gguf(file).rope_scaling == scaling
    tensors["rope_freqs.weight"][20] *= 1.5
    file = GgufFile(write_gguf(tmp_path / "other.gguf", gguf_metadata(config), tensors))
    with pytest.raises(ValueError, match="rope_freqs"):
        Architecture.from_gguf(file)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "falcon"}, "falcon: unknown architecture; supported: llama"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4: must be 8"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "original_context_length: missing"),
    ],
)
def test_rejects_gguf_metadata_that_is_not_computed(tmp_path, metadata, message):
    file = write_gguf(tmp_path / "model.gguf", {**gguf_metadata(LLAMA), **metadata}, {})
    with pytest.raises(ValueError, match=message):
        Architecture.from_path(file)


def test_rejects_missing_gguf_metadata_by_key(tmp_path):
    metadata = gguf_metadata(LLAMA)
    del metadata["llama.block_count"]
    with pytest.raises(ValueError, match=r"llama\.block_count: missing"):
        Architecture.from_path(write_gguf(tmp_path / "model.gguf", metadata, {}))
