"""Hugging Face ids and the choices of models that they mean."""

import re

import pytest

from sim.settings.config_groups import CONFIG_DIR
from sim.settings.model_names import EQUAL, model_named

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
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_30b_a3b", None),
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
    ],
)
def test_training_dates_and_formats_are_no_part_of_the_architecture(name, choice, weights):
    assert choice_and_weights(name) == (choice, weights)


@pytest.mark.parametrize(
    "name",
    [
        "mistralai/Mistral-7B-v0.1",  # has a sliding window, v0.3 has none
        "mistralai/Mistral-7B-Instruct-v0.2",  # has another vocabulary
        "microsoft/Phi-3-mini-128k-instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen2.5-7B-Instruct-1M",
        "deepseek-ai/DeepSeek-V3.2-Exp",  # has sparse attention
        "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        "meta-llama/Llama-3.5-8B",
        "llama3",
        "hf",
        "",
    ],
)
def test_other_architectures_are_not_found(name):
    assert choice_and_weights(name) is None


def test_every_equal_architecture_has_a_preset():
    assert all(choice_and_weights(name) for name in EQUAL.values())


def test_a_choice_of_the_users_folder_is_found(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("# Mine\nsource: acme/Rocket-5B  # a comment\n")
    found = model_named("acme/rocket-5b-instruct", [CONFIG_DIR, tmp_path])
    assert found == ("mine", None, "Mine")
    assert model_named("acme/rocket-5b", [CONFIG_DIR]) is None
