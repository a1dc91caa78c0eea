"""Reading config.json files as the Hugging Face hub holds them."""

import json
from dataclasses import replace

import pytest

from hwmodels.model_spec import ModelSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


@pytest.fixture
def written(tmp_path):
    """Writes a config.json with changes to Llama-3.1-8B's, returns its folder."""

    def write(remove=(), **changes):
        config = {key: value for key, value in {**LLAMA, **changes}.items() if key not in remove}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def test_a_folder_and_its_file_give_the_preset(written, models):
    folder = written()
    from_folder = ModelSpec.from_hf_config(folder)
    preset = models["llama3_1_8b"]
    assert from_folder == ModelSpec.from_hf_config(f"{folder}/config.json")
    assert replace(from_folder, name=preset.name, source=preset.source) == preset


def test_qwen2_has_qkv_biases_and_a_window_that_is_switched_off(written):
    model = ModelSpec.from_hf_config(
        written(architectures=["Qwen2ForCausalLM"], sliding_window=131072, use_sliding_window=False)
    )
    assert (model.qkv_bias, model.qk_norm, model.sliding_window) == (True, False, None)


def test_qwen3_normalises_queries_and_keys_and_states_its_head_dim(written):
    model = ModelSpec.from_hf_config(written(architectures=["Qwen3ForCausalLM"], head_dim=64))
    assert (model.qkv_bias, model.qk_norm, model.head_dim) == (False, True, 64)


def test_mistral_has_a_window(written):
    model = ModelSpec.from_hf_config(written(architectures=["MistralForCausalLM"], sliding_window=4096))
    assert model.sliding_window == 4096


def test_without_kv_heads_every_head_has_its_own(written):
    assert ModelSpec.from_hf_config(written(remove=["num_key_value_heads"])).num_kv_heads == 32


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float32"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
    ],
)
def test_dtype_is_the_checkpoints_and_fp32_is_served_in_bf16(written, changes, dtype):
    assert ModelSpec.from_hf_config(written(**changes)).dtype == dtype


def test_the_user_may_ask_for_another_dtype(written):
    assert ModelSpec.from_hf_config(written(), dtype="fp16").dtype == "fp16"


def test_rejects_an_unknown_architecture_with_the_known_ones_and_the_fields_not_understood(written):
    with pytest.raises(ValueError, match="architectures=MixtralForCausalLM: unknown") as error:
        ModelSpec.from_hf_config(written(architectures=["MixtralForCausalLM"], num_local_experts=8))
    assert "known: LlamaForCausalLM, MistralForCausalLM" in str(error.value)
    assert str(error.value).endswith("fields not understood: num_local_experts")


def test_rejects_missing_fields_by_name(written):
    with pytest.raises(ValueError, match="missing num_hidden_layers, vocab_size: LlamaForCausalLM needs"):
        ModelSpec.from_hf_config(written(remove=["num_hidden_layers", "vocab_size"]))


def test_rejects_a_size_that_is_no_whole_number(written):
    with pytest.raises(ValueError, match="hidden_size='4096': must be a whole number"):
        ModelSpec.from_hf_config(written(hidden_size="4096"))


def test_rejects_quantised_weights(written):
    with pytest.raises(ValueError, match="quantization_config"):
        ModelSpec.from_hf_config(written(quantization_config={"quant_method": "awq"}))


def test_rejects_an_unknown_dtype(written):
    with pytest.raises(ValueError, match="dtype=float64: must be one of float16, bfloat16, float32"):
        ModelSpec.from_hf_config(written(torch_dtype="float64"))


def test_rejects_malformed_json_with_line_and_column(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "hidden_size": ,\n}')
    with pytest.raises(ValueError, match=r"config.json:2:18: not JSON"):
        ModelSpec.from_hf_config(str(tmp_path))


def test_rejects_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold one JSON object, holds a list"):
        ModelSpec.from_hf_config(str(tmp_path))


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        ModelSpec.from_hf_config(str(tmp_path / "nowhere.json"))
