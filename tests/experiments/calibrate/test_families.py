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
RUNS = {
    *("BaichuanForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Gemma2ForCausalLM"),
    *(
        "Gemma3ForCausalLM",
        "GptOssForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
    ),
    *("Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
}
"""Architectures that the engine runs; presets of all others are simulated only."""
SIMULATED_ONLY = {
    "character_ai_like_8b": "does not support transformed models",
    "kimi_k2_5": "supported: type float with num_bits 8",
    "kimi_k2_thinking": "supported: type float with num_bits 8",
    "intern_s1": "intermediate_size: missing",
    "internvl3_5_241b_a28b": "intermediate_size: missing",
    "qwen3_vl_2b": "head_dim: missing",
    "qwen3_vl_8b": "head_dim: missing",
    "qwen3_vl_235b_a22b": "intermediate_size: missing",
}
"""Presets of these architectures that it does not run all the same -> the reason."""


@pytest.mark.parametrize("file", sorted(MODELS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_engine_runs_the_simulator_s_models_except_those_named_here(file):
    node = yaml.safe_load(file.read_text())
    if "config" not in node:
        pytest.skip("read from a file that the user names")
    architecture = node["config"]["architectures"][0]
    reason = SIMULATED_ONLY.get(file.stem)
    if reason is None and architecture not in RUNS:
        reason = f"does not support {architecture}"
    if reason is not None:
        with pytest.raises(ValueError, match=reason):
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
