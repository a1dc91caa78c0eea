"""Hugging Face ids and the choices of models that they mean."""

import re

import pytest

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.renamed import _CHECKPOINTS, EQUAL, model_named, note
from sim.settings.build import build

FILES = sorted(file for file in (CONFIG_DIR / "model").glob("*.yaml") if file.stem != "hf")


def choice_and_weights(name):
    found = model_named(name, [CONFIG_DIR])
    return None if found is None else (found.choice, found.weights)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_model_is_found_by_its_choice_its_name_and_its_source(file):
    text = file.read_text()
    for key in ("name", "source"):
        name = re.search(rf"^{key}: (\S+)", text, re.M)[1]
        assert choice_and_weights(name) == (file.stem, None)
        assert choice_and_weights(name.upper()) == (file.stem, None)
    assert choice_and_weights(file.stem) == (file.stem, None)


@pytest.mark.parametrize(
    ("name", "choice", "weights"),
    [
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral_8x22b", None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_30b_a3b_2507", None),  # has a longer context
        ("Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", "qwen3_30b_a3b_2507", "fp8_block"),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3_30b_a3b", "fp8_block"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_30b_a3b_2507", None),
        ("nvidia/Kimi-K2-Thinking-NVFP4", "kimi_k2_thinking", "nvfp4"),
        ("Eco-Tech/Qwen3.5-27B-w8a8-mtp", "qwen3_5_27b", "int8"),
        ("Eco-Tech/Kimi-K2.6-W4A8", "kimi_k2_5", "int4_int8"),
        ("amd/MiniMax-M3-MXFP4", "minimax_m3", "mxfp4"),
        ("nytopop/Qwen3-30B-A3B.w4a16", "qwen3_30b_a3b", "int4_wo"),
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "deepseek_r1", "nvfp4"),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", "gemma3_27b", "int4_wo"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama3_1_8b", "int4_wo"),
        (
            "OPEA/Mistral-Small-3.1-24B-Instruct-2503-int4-AutoRound-awq-sym",
            "mistral_small_3_1_24b",
            "int4_wo",
        ),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama3_1_70b", None),
        ("RedHatAI/DeepSeek-R1-Distill-Qwen-32B-quantized.w4a16", "deepseek_r1_distill_qwen_32b", "int4_wo"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "nemotron_3_nano_30b_a3b", "fp8"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral_7b_v0_1", None),  # has a sliding window
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral_7b_v0_2", None),  # has another vocabulary than v0.3
        ("meta-llama/Llama-3.1-70B-Instruct", "llama3_1_70b", None),
        ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", "llama3_1_405b", "fp8"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2_7b", None),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral_nemo_12b", None),
        ("google/gemma-3-27b-pt", "gemma3_27b", None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek_r1", None),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_r1", None),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek_r1", "nvfp4"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3_235b_a22b", "fp8_block"),
        ("RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic", "llama4_scout", "fp8"),
        ("RedHatAI/Qwen3-8B-FP8-block", "qwen3_8b", "fp8_block"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama3_1_8b", "int4_wo"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2_5_7b", "int8_wo"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2_5_7b", "int4_wo"),
        ("llama2-70b", "llama2_70b", None),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3_8b", None),
        ("stepfun-ai/Step-3.7-Flash-FP8", "step_3_7_flash", "fp8_block"),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "qwen3_32b", "fp8"),
        ("unsloth/gpt-oss-20b-BF16", "gpt_oss_20b", "bf16"),
        ("unsloth/Qwen3-8B-BF16", "qwen3_8b", None),
        ("google/gemma-4-E2B-it", "gemma4_e2b", None),
        ("google/gemma-4-E2B", "gemma4_e2b", None),
        ("RedHatAI/gemma-4-E2B-it-FP8-dynamic", "gemma4_e2b", "fp8"),
        ("google/gemma-4-12B-it", "gemma4_12b", None),
        ("Qwen/Qwen3.5-4B-FP8", "qwen3_5_4b", "fp8_block"),
        ("Qwen/Qwen3.5-0.8B-Base", "qwen3_5_0_8b", None),
        ("Qwen/Qwen3.8-27B-FP8", "qwen3_5_27b", "fp8_block"),
        ("Inferact/Qwen3.8-27B-NVFP4", "qwen3_5_27b", "nvfp4"),
        ("LiquidAI/LFM2.5-1.2B-JP-202606", "lfm2_5_1_2b", None),
        ("LiquidAI/LFM2-350M", "lfm2_5_350m", None),
        ("mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4", "mistral_large_3_675b", "nvfp4"),
        ("mistralai/Mistral-Small-4-119B-2603-NVFP4", "mistral_small_4_119b", "nvfp4"),
        ("tencent/Hy3-preview", "hy3", None),
        ("tencent/Hy3-FP8", "hy3", "fp8"),
        ("inclusionAI/Ring-1T-FP8", "ring_1t", "fp8"),
        ("arcee-ai/Trinity-Large-Preview", "trinity_large", None),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2-FP8", "nemotron_nano_9b_v2", "fp8"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-4B-FP8", "nemotron_3_nano_4b", "fp8"),
        ("ibm-granite/granite-3.2-2b-instruct", "granite_3_1_2b", None),
        ("OpenGVLab/InternVL3_5-8B-HF", "internvl3_5_8b", None),
        ("internlm/Intern-S1-FP8", "intern_s1", "fp8"),
        ("zai-org/GLM-4.6V-FP8", "glm_4_6v", "fp8_block"),
        ("zai-org/Glyph", "glm_4_1v_9b", None),
        ("microsoft/Phi-4-reasoning-plus", "phi_4_reasoning", None),
        ("JetBrains/Mellum2-12B-A2.5B-Thinking", "mellum2_12b_a2_5b", None),
        ("XiaomiMiMo/MiMo-V2.5-Pro", "mimo_v2_5_pro", None),
        ("poolside/Laguna-S-2.1-INT4", "laguna_s_2_1", "int4_wo"),
        ("poolside/Laguna-M.1", "laguna_m_1", None),
        ("poolside/Laguna-XS.2", "laguna_xs_2_1", None),
        ("poolside/Laguna-XS-2.1-FP8", "laguna_xs_2_1", "fp8_block"),
    ],
)
def test_training_dates_and_formats_are_no_part_of_the_architecture(name, choice, weights):
    assert choice_and_weights(name) == (choice, weights)


@pytest.mark.parametrize(
    "name",
    [
        "mistralai/Mistral-7B-v0.4",
        "Qwen/Qwen2-VL-2B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "Qwen/Qwen2.5-Omni-7B",
        "Qwen/Qwen3-Embedding-8B",
        "Qwen/Qwen2.5-Math-PRM-7B",
        "nvidia/Llama-3.1-Nemotron-51B-Instruct",
        "NousResearch/Yarn-Llama-2-13b-128k",
        "gradientai/Llama-3-8B-Instruct-Gradient-1048k",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        "google/gemma-4-31B-it-assistant",
        "google/gemma-4-E4B-it-qat-mobile-ct",
        "LiquidAI/LFM2.5-ColBERT-350M",
        "LiquidAI/LFM2.5-Audio-1.5B",
        "microsoft/Phi-4-multimodal-instruct",
        "acme/Model-8B",
        "acme/Llama-3.1-8B-and-Qwen3-8B",
        "meta-llama/Llama-3.5-8B",
        "llama3",
        "hf",
        "",
    ],
)
def test_other_architectures_are_not_found(name):
    assert choice_and_weights(name) is None


@pytest.mark.parametrize(
    ("name", "choice", "weights"),
    [
        ("allenai/Llama-3.1-Tulu-3-8B", "llama3_1_8b", None),
        ("NousResearch/DeepHermes-3-Llama-3-8B-Preview", "llama3_8b", None),
        ("tokyotech-llm/Llama-3.3-Swallow-70B-Instruct-v0.4", "llama3_1_70b", None),
        ("cognitivecomputations/Dolphin3.0-Llama3.1-8B", "llama3_1_8b", None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3_8b", None),
        ("acme/DeepSeek-R1-0528-Qwen3-8B-FP8", "qwen3_8b", "fp8"),
        ("nvidia/Llama-3.1-Nemotron-Nano-8B-v1", "llama3_1_8b", None),
        ("RedHatAI/gemma-2-9b-it-SimPO-quantized.w8a8", "gemma_2_9b", "int8"),
    ],
)
def test_a_fine_tuned_model_is_its_base_and_a_note_says_so(name, choice, weights, capsys):
    note.cache_clear()
    assert choice_and_weights(name) == (choice, weights)
    assert f"{name} is taken for a fine-tuned {choice}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "choice"),
    [
        (
            "/root/.cache/huggingface/hub/models--Qwen--QwQ-32B/snapshots/976055f8c83f394f35dbd3ab09a285a984907bd0",
            "qwq_32b",
        ),
        ("/data/QwQ-32B/Qwen__QwQ-32B/", "qwq_32b"),
        ("/data/nytopop_Qwen3-30B-A3B.w4a16", "qwen3_30b_a3b"),
        ("./models/Qwen/Qwen1.5-32B-Chat-GPTQ-Int4", "qwen1_5_32b"),
    ],
)
def test_the_folder_of_a_download_names_its_repository(folder, choice):
    assert choice_and_weights(folder)[0] == choice


def test_every_equal_architecture_has_a_preset():
    assert all(choice_and_weights(name) for name in EQUAL.values())


def test_a_choice_of_the_users_folder_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine\nsource: acme/Rocket-5B  # a comment\n")
    found = model_named("acme/rocket-5b-instruct", [CONFIG_DIR, tmp_path])
    assert found == ("mine", None, "Mine", {})
    assert model_named("acme/rocket-5b", [CONFIG_DIR]) is None


def model_of(*settings):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build(resolved(source.compose(list(settings)))["model"], "model")


def formats(model):
    blocks = [(block.count, block.formats) for block in model.blocks]
    return model.weights, model.moe_weights, model.lm_head_weights, model.kv_cache_dtype, blocks


def modelopt(algorithm, *left_out, **more):
    """Returns a quantization_config as Model Optimizer writes it: one entry for each module."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "exclude_modules": list(left_out), **more}


def in_layers(numbers, *modules):
    return [f"model.layers.{number}.{module}" for number in numbers for module in modules]


LATENT = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")]
PUBLISHED = {
    "nvidia/Kimi-K2.6-NVFP4": modelopt(
        "NVFP4",
        *in_layers(range(61), "self_attn*"),
        *in_layers(range(1, 61), "mlp.shared_experts*"),
        "model.layers.0*",
        "lm_head",
        kv_cache_scheme={"dynamic": False, "num_bits": 8, "type": "float"},
    ),
    "nvidia/DeepSeek-V3.1-FP4": modelopt(
        "NVFP4", *in_layers(range(61), *LATENT), "model.layers.61*", "lm_head", kv_cache_quant_algo="FP8"
    ),
    "nvidia/GLM-5.1-NVFP4": modelopt(
        "NVFP4",
        *in_layers(range(3, 78), "self_attn*", "mlp.shared_experts*"),
        *("model.layers.0*", "model.layers.1.*", "model.layers.2.*", "model.layers.78*", "lm_head"),
        kv_cache_quant_algo="FP8",
    ),
    "nvidia/Qwen3-32B-NVFP4": modelopt("NVFP4", "lm_head", kv_cache_quant_algo="FP8"),
    "nvidia/Llama-3.1-70B-Instruct-FP8": modelopt("FP8", "lm_head", kv_cache_quant_algo="FP8"),
    "nvidia/MiniMax-M2.7-NVFP4": modelopt(
        "NVFP4", *in_layers(range(62), "self_attn*", "block_sparse_moe.gate"), kv_cache_quant_algo="FP8"
    ),
}
"""The quantization of these checkpoints' files, in their own words."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_name_of_a_published_checkpoint_means_the_formats_of_its_files(name):
    found = model_of(f"model={name}")
    expected = quantised(model_named(name, [CONFIG_DIR]).choice, PUBLISHED[name])
    assert formats(found) == formats(expected)
    assert found.weight_bytes_per_rank() == expected.weight_bytes_per_rank()


def quantised(choice, quantization_config):
    """Returns the preset with another quantization_config, read as a file's."""
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    config = dict(resolved(source.compose([f"model={choice}"]))["model"])
    fields = {**config["config"], "quantization_config": quantization_config}
    return build({**config, "config": fields}, "model")


def test_sizes_of_published_checkpoints():
    """The repository of DeepSeek-R1-0528-NVFP4-v2 has 413.3 GB; its MTP layer takes 23.6 GB in bf16."""
    model = model_of("model=nvidia/DeepSeek-R1-0528-NVFP4-v2")
    assert model.weight_bytes_per_rank() / 1e9 == pytest.approx(413.3 - 23.6, rel=0.01)
    assert model.kv_bytes_per_token() == 61 * (512 + 64)
    model = model_of("model=mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4")
    assert model.weight_bytes_per_rank() / 1e9 == pytest.approx(403.1, rel=0.01)
    model = model_of("model=mistralai/Ministral-3-14B-Reasoning-2512")
    assert model.weight_bytes_per_rank() / 1e9 == pytest.approx(27.9, rel=0.01)
    model = model_of("model=RedHatAI/Hy3-NVFP4-FP8")
    assert model.weight_bytes_per_rank() / 1e9 == pytest.approx(178.3 - 7.6, rel=0.01)


def test_every_checkpoint_of_the_table_has_a_preset():
    for name in read_yaml(_CHECKPOINTS):
        found = model_named(name, [CONFIG_DIR])
        assert found, name
        assert found.formats, name


def test_settings_beside_a_checkpoint_count_instead_of_its_own():
    model = model_of("model=nvidia/Qwen3-32B-NVFP4", "model.kv_cache_dtype=bf16")
    assert (model.weights, model.kv_cache_dtype) == ("nvfp4", "bf16")
    model = model_of("model=nvidia/Kimi-K2.6-NVFP4", "model.kv_cache_dtype=bf16")
    assert (model.moe_weights, model.kv_cache_dtype) == ("nvfp4", "bf16")
    plain = model_of("model=nvidia/Qwen3-32B-NVFP4", "model.weights=fp8")
    assert (plain.weights, plain.kv_cache_dtype) == ("fp8", "auto")
    bf16 = model_of("model=unsloth/gpt-oss-20b-BF16")
    assert bf16.weight_bytes_per_rank() == pytest.approx(2 * 20.9e9, rel=0.01)
