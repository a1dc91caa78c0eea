"""The models of configs/model that the engine runs, and those whose operators cannot be watched yet."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from experiments.calibrate.engine.served import architecture_of, serve

MODELS = Path(__file__).parents[3] / "configs" / "model"
SIMULATED_ONLY = {
    "glm_5": "does not support GlmMoeDsaForCausalLM",
    "kimi_k2_5": "supported: type float with num_bits 8",
    "llama4_scout": "does not support Llama4ForCausalLM",
    "minimax_m2_5": "does not support MiniMaxM2ForCausalLM",
    "qwen3_5_397b_a17b": "does not support Qwen3_5MoeForCausalLM",
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


def test_operators_of_other_families_are_refused_by_name():
    node = yaml.safe_load((MODELS / "gpt_oss_20b.yaml").read_text())
    with pytest.raises(
        ValueError, match="model_type=gpt_oss: the operators of this family are not watched yet"
    ):
        serve(
            None,
            architecture_of(node),
            torch.device("cpu"),
            max_num_seqs=1,
            max_model_len=64,
            block_size=16,
        )
