"""Settings of runs.csv that differ from the simulated ones, as overrides."""

import pandas as pd
import pytest

from experiments.study.presets import base_scenario
from experiments.validate.fidelity.recorded_settings import differences


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("Qwen/Qwen3-8B", ["replicas=2", "tensor_parallel_size=2", "pipeline_parallel_size=2"]),
        (
            "Qwen/Qwen3-30B-A3B",
            [
                "tensor_parallel_size=2",
                "pipeline_parallel_size=2",
                "attention_data_parallel_size=2",
                "expert_parallel_size=4",
            ],
        ),
    ],
)
def test_a_layout_that_differs_is_named(tmp_path, model, overrides):
    scenario = base_scenario(model, "H100", "vllm")
    engine = scenario.engine
    share = 1 if "replicas=2" in overrides else 2
    run = {
        "run": "a",
        "gpu": "H100",
        "model": model,
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "ep": 1 if share == 1 else 4,
        "max_num_seqs": engine.max_num_seqs // share,
        "max_num_batched_tokens": engine.max_num_batched_tokens // share,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_model_len": None,
    }
    pd.DataFrame([run]).to_csv(tmp_path / "runs.csv", index=False)
    (tmp_path / "requests.csv").write_text("id\n")
    assert differences(tmp_path / "requests.csv", "a", scenario, {}) == overrides
