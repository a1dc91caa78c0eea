"""Reading config.json files as the Hugging Face hub holds them."""

import json
import re
from dataclasses import replace

import pytest

from hwmodels.hf.config import from_hf_config
from tests.hwmodels.hf.published import LLAMA


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
    from_folder = from_hf_config(folder)
    preset = models["llama3_1_8b"]
    assert from_folder == from_hf_config(f"{folder}/config.json")
    assert replace(from_folder, name=preset.name, source=preset.source) == preset


def attention_of(folder):
    """Returns the attention of a model whose layers are all alike."""
    [block] = from_hf_config(folder).blocks
    return block.attention


def test_qwen2_has_qkv_biases_and_a_window_that_is_switched_off(written):
    attention = attention_of(
        written(architectures=["Qwen2ForCausalLM"], sliding_window=8192, use_sliding_window=False)
    )
    assert (attention.qkv_bias, attention.qk_norm, attention.window) == (True, False, None)


def test_qwen2_leaves_its_first_layers_without_the_window(written):
    model = from_hf_config(
        written(
            architectures=["Qwen2ForCausalLM"],
            sliding_window=8192,
            use_sliding_window=True,
            max_window_layers=20,
        )
    )
    assert [(block.count, block.attention.window) for block in model.blocks] == [(20, None), (12, 8192)]


def test_qwen3_normalises_queries_and_keys_and_states_its_head_dim(written):
    attention = attention_of(written(architectures=["Qwen3ForCausalLM"], head_dim=64))
    assert (attention.qkv_bias, attention.qk_norm, attention.head_dim) == (False, True, 64)


def test_llama_may_have_biases_everywhere(written):
    [block] = from_hf_config(written(attention_bias=True, mlp_bias=True)).blocks
    assert (block.attention.qkv_bias, block.attention.o_bias, block.mlp.bias) == (True, True, True)


def test_mistral_has_a_window(written):
    assert attention_of(written(architectures=["MistralForCausalLM"], sliding_window=4096)).window == 4096


def test_a_window_may_be_called_sliding_window_size(written):
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window_size": 4096}
    assert attention_of(written(**mistral)).window == 4096
    assert attention_of(written(**mistral, sliding_window=4096)).window == 4096
    with pytest.raises(ValueError, match="sliding_window_size=4096: must be the same as sliding_window=512"):
        from_hf_config(written(**mistral, sliding_window=512))


def test_a_window_as_long_as_the_context_is_none(written):
    folder = written(architectures=["MistralForCausalLM"], sliding_window=131072)
    assert attention_of(folder).window is None


def test_layer_types_say_which_layers_have_the_window(written):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    model = from_hf_config(
        written(
            architectures=["MistralForCausalLM"],
            sliding_window=4096,
            layer_types=kinds,
            num_hidden_layers=4,
        )
    )
    assert [(block.count, block.attention.window) for block in model.blocks] == [(3, 4096), (1, None)]


def test_without_kv_heads_every_head_has_its_own(written):
    assert attention_of(written(remove=["num_key_value_heads"])).num_kv_heads == 32


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float32"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
    ],
)
def test_dtype_is_the_checkpoints_and_fp32_is_served_in_bf16(written, changes, dtype):
    assert from_hf_config(written(**changes)).dtype == dtype


def test_the_user_may_ask_for_another_dtype(written):
    assert from_hf_config(written(), dtype="fp16").dtype == "fp16"


def test_rejects_missing_fields_by_name(written):
    with pytest.raises(
        ValueError, match="json: num_hidden_layers, vocab_size: missing; LlamaForCausalLM needs them"
    ):
        from_hf_config(written(remove=["num_hidden_layers", "vocab_size"]))
    with pytest.raises(ValueError, match="json: num_local_experts, num_experts_per_tok: missing; Mixtral"):
        from_hf_config(written(architectures=["MixtralForCausalLM"]))


def test_rejects_a_size_that_is_no_whole_number(written):
    with pytest.raises(ValueError, match='hidden_size="4096": must be a whole number'):
        from_hf_config(written(hidden_size="4096"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 5}, "architectures=5: must be a list of one name, such as LlamaForCausalLM"),
        ({"architectures": None}, "architectures=null: must be a list of one name"),
        ({"architectures": []}, "architectures=[]: must be a list of one name"),
        (
            {"architectures": "LlamaForCausalLM"},
            'architectures="LlamaForCausalLM": must be a list of one name',
        ),
        ({"architectures": [["LlamaForCausalLM"]]}, "must be a list of one name"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: must be a whole number >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=true: must be a whole number >= 1"),
        ({"vocab_size": float("nan")}, "vocab_size=NaN: must be a whole number >= 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: must be a whole number >= 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=32"),
        ({"head_dim": 0}, "head_dim=0: must be a whole number >= 1"),
        (
            {"hidden_size": 66, "num_attention_heads": 4, "num_key_value_heads": 4},
            "hidden_size=66: must be a multiple of num_attention_heads=4, or give head_dim",
        ),
        ({"sliding_window": "x"}, 'sliding_window="x": must be a whole number >= 1'),
        ({"sliding_window": -1}, "sliding_window=-1: must be a whole number >= 1"),
        ({"use_sliding_window": "no"}, 'use_sliding_window="no": must be true or false'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false": must be true or false'),
        ({"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ({"torch_dtype": ["a"]}, 'torch_dtype=["a"]: must be one of float16, bfloat16, float32'),
        ({"dtype": 16}, "dtype=16: must be one of float16, bfloat16, float32"),
        ({"layer_types": ["linear_attention"] * 32}, 'layer_types=["linear_attention", '),
        ({"layer_types": 32}, "layer_types=32: must be a list of full_attention and sliding_attention"),
        ({"layer_types": ["full_attention"]}, 'layer_types=["full_attention"]: must name 32 layers, names 1'),
        ({"quantization_config": 8}, "quantization_config=8: must be an object with a quant_method"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rejects_a_wrong_value_with_file_field_value_and_rule(written, changes, message):
    folder = written(**changes)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        from_hf_config(folder)
    assert str(error.value).startswith(f"{folder}/config.json: ")


def test_heads_need_not_share_the_hidden_size_out_where_head_dim_is_given(written):
    model = from_hf_config(written(hidden_size=66, num_attention_heads=4, num_key_value_heads=4, head_dim=16))
    assert (model.hidden_size, model.blocks[0].attention.head_dim) == (66, 16)


def test_rejects_fields_of_a_known_architecture_that_it_does_not_understand(written):
    with pytest.raises(ValueError, match="num_experts_per_tok=2, num_local_experts=8: not understood"):
        from_hf_config(written(num_local_experts=8, num_experts_per_tok=2))


@pytest.mark.parametrize("nothing", [None, False, 0, {}])
def test_fields_that_switch_nothing_on_are_let_through(written, nothing):
    assert from_hf_config(written(num_local_experts=nothing)) == from_hf_config(written())


def test_rejects_an_unknown_dtype(written):
    with pytest.raises(ValueError, match='torch_dtype="float64": must be one of float16, bfloat16, float32'):
        from_hf_config(written(torch_dtype="float64"))


def test_rejects_malformed_json_with_line_and_column(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "hidden_size": ,\n}')
    with pytest.raises(ValueError, match=r"config.json:2:18: not JSON"):
        from_hf_config(str(tmp_path))


def test_rejects_a_file_that_is_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(ValueError, match=r"config.json: not UTF-8 at byte 1"):
        from_hf_config(str(tmp_path))


def test_rejects_json_that_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold one JSON object, holds a list"):
        from_hf_config(str(tmp_path))


def test_rejects_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        from_hf_config(str(tmp_path / "nowhere.json"))
