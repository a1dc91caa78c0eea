"""Two measured runs of vLLM 0.19, request by request: the same order, and as many running in each second.

Prefix caching is on, arrivals are those of the run, prices are interpolated between layer latencies that were
measured on the same machines: what is left is scheduling. The RTX 4090 run is short of KV (2,588 blocks).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kendalltau

from experiments.score import per_request
from experiments.study.measured_requests import scenario_of
from hwmodels.levels import Spec
from hwmodels.levels.files import TableLevel
from policies.caching.prefix import PrefixCaching
from policies.core.request import Segment

RUNS = Path(__file__).resolve().parents[4] / "shared" / "data" / "vllm_requests"

needs_runs = pytest.mark.skipif(not RUNS.exists(), reason="the measured runs of vLLM are not here")


def measured_runs() -> dict[str, dict]:
    path = RUNS / "requests.csv.gz"
    return {row["run"]: dict(row) for _, row in per_request.by_run(pd.read_csv(path), path).iterrows()}


@needs_runs
@pytest.mark.parametrize("run", ["rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b"])
def test_first_tokens_come_in_the_order_of_the_engine_and_as_many_run(run):
    row = measured_runs()[run]
    measured = row["requests"].reset_index(drop=True)
    scenario = scenario_of(row, TableLevel(path=RUNS))
    records = scenario.simulate(scenario.source()).in_pandas()
    assert (records.requests["status"] == "finished").all()
    tau = kendalltau(records.requests["first_token_s"], measured["first_token_s"])[0]
    assert tau >= 0.97

    logged = pd.read_csv(RUNS / "timeseries.csv.gz").query("run == @run")
    times_s = logged["t"].to_numpy() + measured["arrival_s"].min()  # the log's clock: 0 at the first request
    iterations = records.iterations
    at = np.searchsorted(iterations["start_s"].to_numpy(), times_s, side="right") - 1
    running = np.where(times_s < records.end_s, iterations["running"].to_numpy()[at], 0)
    assert running.mean() == pytest.approx(logged["running"].mean(), rel=0.03)
    print(
        f"{run}: tau {tau:.4f}, running {running.mean():.1f} of {logged['running'].mean():.1f}, "
        f"each second {np.abs(running - logged['running']).mean() / logged['running'].mean():.1%} apart"
    )


def test_prompts_are_identified_by_their_blocks():
    requests = pd.DataFrame(
        {
            "arrival_s": [0.0, 1.0, 2.0],
            "input_tokens": [40, 35, 9],
            "output_tokens": [2, 2, 2],
            "prefix_block_ids": ["4 5", "4 6", np.nan],
        }
    )
    row = {
        "run": "night",
        "gpu": "L4",
        "model": "HuggingFaceTB/SmolLM2-135M",
        "tp": 1,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "max_model_len": np.nan,
        "block_size": 16,
        "num_gpu_blocks": np.nan,
        "gpu_memory_utilization": 0.9,
        "requests": requests,
    }
    scenario = scenario_of(row, Spec())
    assert scenario.caching == PrefixCaching(block_size=16)
    prompts = [arrival.request.prompt.segments for arrival in scenario.source().arrivals()]
    assert prompts == [(Segment(4, 16), Segment(5, 16)), (Segment(4, 16), Segment(6, 16)), ()]
    found = scenario.simulate(scenario.source()).requests["cached_tokens"].tolist()
    assert found == [0, 16, 0]
    broken = {**row, "requests": requests.assign(prefix_block_ids="4 x")}
    with pytest.raises(ValueError, match="prefix_block_ids=4 x: must be whole numbers separated by spaces"):
        scenario_of(broken, Spec())
    plain = scenario_of({**row, "requests": requests.drop(columns="prefix_block_ids")}, Spec())
    assert plain.simulate(plain.source()).requests["cached_tokens"].tolist() == [0, 0, 0]
