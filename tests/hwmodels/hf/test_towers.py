"""Vision and audio towers: their weights by the fields of their configuration."""

import pytest

from hwmodels.hf.config import from_hf_fields
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import weight_bytes

TEXT = {
    "hidden_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
QWEN3_VL = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
    "hidden_act": "gelu_pytorch_tanh",
}
VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": TEXT, "vision_config": QWEN3_VL}


def test_qwen3_vl_2b_has_a_tower_of_0_4_billion():
    """24 (4 x 1,024^2 + 2 x 1,024 x 4,096), patches, positions, and 4 mergers of 4,096 x (4,096 + 2,048)."""
    model = from_hf_fields(VL, "vl")
    tower = 24 * 12 * 1024**2 + 3 * 2 * 256 * 1024 + 2304 * 1024 + 4 * 4096 * (4096 + 2048)
    assert model.other_elements == tower
    assert model.num_parameters == pytest.approx(2.127e9, rel=2e-3)
    assert (
        "vision tower of 0.407 B parameters by vision_config counted in memory, not in time" in model.notes[0]
    )


def test_the_tower_costs_memory_and_no_flops():
    with_tower, without = from_hf_fields(VL, "vl"), from_hf_fields({**VL, "vision_config": None}, "vl")
    difference = with_tower.weight_bytes_per_rank() - without.weight_bytes_per_rank()
    assert difference == 2 * with_tower.other_elements
    assert with_tower.flops_per_token == without.flops_per_token
    assert with_tower.num_active_parameters == without.num_active_parameters


def test_the_tower_is_sharded_over_ranks_and_on_the_first_stage_of_a_pipeline():
    model = from_hf_fields(VL, "vl")
    bare = from_hf_fields({**VL, "vision_config": None}, "vl")
    for sizes in ({"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}):
        layout = ParallelLayout(**sizes)
        share = 4 if "tensor_parallel_size" in sizes else 1
        added = weight_bytes(model, layout) - weight_bytes(bare, layout)
        assert added == pytest.approx(2 * model.other_elements / share, rel=1e-6)


def test_a_quantised_checkpoint_keeps_its_tower_in_16_bits():
    quantised = {**VL, "quantization_config": {"quant_method": "fp8"}}
    model, bare = (from_hf_fields(c, "vl") for c in (quantised, {**quantised, "vision_config": None}))
    assert model.weight_bytes_per_rank() - bare.weight_bytes_per_rank() == 2 * model.other_elements


def test_language_model_only_leaves_the_tower_out_and_says_so():
    model = from_hf_fields(VL, "vl", language_model_only=True)
    assert model.other_elements == 0
    assert model.notes == ("vision tower not loaded (model.language_model_only=true): text in, text out",)


def test_a_tower_without_its_sizes_is_said_to_be_uncounted():
    model = from_hf_fields({**VL, "vision_config": {"model_type": "mystery"}}, "vl")
    assert model.other_elements == 0
    assert model.notes[0].startswith("vision tower not counted, as vision_config does not state its layers")


@pytest.mark.parametrize(
    ("vision", "hidden_size", "billion"),
    [
        # SigLIP so400m/14 of Gemma 3, whose makers state 417 million.
        (
            {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
            2560,
            0.417,
        ),
        # Qwen2.5-VL's, with a gate: 0.67 billion.
        (
            {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            3584,
            0.676,
        ),
    ],
    ids=["SigLIP", "Qwen2.5-VL"],
)
def test_towers_have_the_weights_that_are_published(vision, hidden_size, billion):
    text = {**TEXT, "hidden_size": hidden_size}
    model = from_hf_fields({**VL, "text_config": text, "vision_config": vision}, "vl")
    assert model.other_elements / 1e9 == pytest.approx(billion, rel=0.02)


def test_towers_may_be_nested_beside_the_language_model():
    """Qwen-Omni keeps both in thinker_config."""
    parts = {"text_config": {**TEXT, "model_type": "qwen3"}, "vision_config": QWEN3_VL}
    nested = from_hf_fields(
        {"architectures": ["SomeOmniForConditionalGeneration"], "thinker_config": parts}, "omni"
    )
    assert nested.other_elements == from_hf_fields(VL, "vl").other_elements


def test_audio_towers_count_too():
    audio = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_mel_bins": 128}
    model = from_hf_fields({**VL, "vision_config": None, "audio_config": audio}, "vl")
    assert model.other_elements / 1e9 == pytest.approx(0.637, rel=0.02)
    assert model.notes[0].startswith("audio tower of 0.637 B parameters")


QWEN2_7B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
GLM_4_9B = {
    "model_type": "glm4v_text",
    "hidden_size": 4096,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 13696,
    "vocab_size": 151552,
    "max_position_embeddings": 65536,
    "attention_bias": True,
}


def test_qwen2_vl_states_the_language_model_s_width_in_its_tower():
    """The checkpoint of Qwen2-VL-7B has 8,291,375,616 parameters; its vision_config.hidden_size is 3,584."""
    tower = {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
    }
    tower |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    model = from_hf_fields(
        {"architectures": ["Qwen2VLForConditionalGeneration"], **QWEN2_7B, "vision_config": tower}, "vl"
    )
    assert model.num_parameters == pytest.approx(8_291_375_616, rel=1e-3)


def test_glm_4_1v_has_a_projector_of_the_width_that_it_calls_intermediate():
    """The checkpoint of GLM-4.1V-9B has 10.29e9 parameters, 9.4e9 of them in the language model."""
    tower = {"depth": 24, "hidden_size": 1536, "intermediate_size": 13696, "num_heads": 12, "image_size": 336}
    tower |= {"out_hidden_size": 4096, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tower |= {"hidden_act": "silu", "model_type": "glm4v"}
    model = from_hf_fields(
        {
            "architectures": ["Glm4vForConditionalGeneration"],
            "text_config": GLM_4_9B,
            "vision_config": tower,
            "tie_word_embeddings": False,
        },
        "vl",
    )
    assert model.num_parameters == pytest.approx(10.29e9, rel=2e-3)
