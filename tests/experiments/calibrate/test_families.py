"""The models of configs/model that the engine runs, and those whose operators are not measured."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from experiments.calibrate.engine.served import architecture_of, serve
from experiments.calibrate.engine.steps import REFERENCE
from hwmodels.hf.config import from_hf_fields

MODELS = Path(__file__).parents[3] / "configs" / "model"
SIMULATED_ONLY = {
    "character_ai_like_8b": "does not support transformed models",
    "deepseek_v4_flash": "does not support DeepseekV4ForCausalLM",
    "deepseek_v4_pro": "does not support DeepseekV4ForCausalLM",
    "gemma3n_e4b": "does not support Gemma3nForCausalLM",
    "gemma4_26b_a4b": "does not support Gemma4ForCausalLM",
    "gemma4_31b": "does not support Gemma4ForCausalLM",
    "glm_5": "does not support GlmMoeDsaForCausalLM",
    "glm_5_2": "does not support GlmMoeDsaForCausalLM",
    "kimi_k2_5": "supported: type float with num_bits 8",
    "kimi_k3": "does not support KimiLinearForCausalLM",
    "llama4_scout": "does not support Llama4ForCausalLM",
    "mimo_v2_flash": "does not support MiMoV2FlashForCausalLM",
    "minimax_m2_5": "does not support MiniMaxM2ForCausalLM",
    "minimax_m3": "does not support MiniMaxM3ForCausalLM",
    "nemotron_3_nano_30b_a3b": "does not support NemotronHForCausalLM",
    "nemotron_3_super_120b_a12b": "does not support NemotronHForCausalLM",
    "nemotron_super_49b": "does not support DeciLMForCausalLM",
    "qwen3_5_27b": "does not support Qwen3_5ForCausalLM",
    "qwen3_5_35b_a3b": "does not support Qwen3_5MoeForCausalLM",
    "qwen3_5_397b_a17b": "does not support Qwen3_5MoeForCausalLM",
    "qwen3_next_80b_a3b": "does not support Qwen3NextForCausalLM",
    "qwen3_vl_8b": "head_dim: missing",
    "step_3_7_flash": "does not support Step3p7FlashForCausalLM",
}


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_engine_runs_the_simulator_s_models_except_those_named_here(file):
    node = yaml.safe_load(file.read_text())
    if "config" not in node:
        pytest.skip("read from a file that the user names")
    if file.stem in SIMULATED_ONLY:
        with pytest.raises(ValueError, match=SIMULATED_ONLY[file.stem]):
            architecture_of(node)
        return
    assert architecture_of(node).num_layers == node["config"]["num_hidden_layers"]


def served(model, **changes):
    node = yaml.safe_load((MODELS / f"{model}.yaml").read_text())
    config = node["config"] | changes
    architecture = architecture_of({"config": config})
    spec = from_hf_fields(config, model)
    return serve(spec, architecture, torch.device("cpu"), max_num_seqs=2, max_model_len=64, block_size=16)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt_oss_20b", "model_type=gpt_oss: its attention has sinks"),
        ("gemma3_27b", "model_type=gemma3_text: it normalises after attention and MLP"),
        ("deepseek_v2_lite", "model_type=deepseek_v2: latent attention"),
    ],
)
def test_operators_of_other_families_are_refused_by_name(model, reason):
    with pytest.raises(ValueError, match=f"{reason}.*choose a model with Llama's layers.*phi3"):
        served(model)


def test_phi3_is_measured_as_llama_is():
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 200}
    found = served("phi3_mini", **sizes, num_attention_heads=4, num_key_value_heads=2)
    drawn = found.plain.run(found.work(REFERENCE))
    watched = found.executor.run(found.work(REFERENCE))
    assert torch.equal(drawn.tokens_IS, watched.tokens_IS)
