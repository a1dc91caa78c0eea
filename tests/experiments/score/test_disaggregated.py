"""Rows with prefill and decode workers: what their columns mean, and what is assumed where they are empty."""

import numpy as np
import pytest

from experiments.score.disaggregated import engine_in_dynamo
from experiments.score.modes import predict, scenario_of
from experiments.score.predictions import predict_row
from experiments.study.presets import NotSimulatedError
from hwmodels.levels import Spec
from tests.experiments.score.measured_rows import SILICON

SIDE = {"num_workers": 1, "tp_size": 1, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 1}
SIDE |= {"moe_ep_size": 1, "batch_size": 4}
ROW = {
    **{name: value for name, value in SILICON.items() if not name.endswith("_size")},
    **{f"{side}_{name}": value for side in ("prefill", "decode") for name, value in SIDE.items()},
    "mode": "disagg",
    "gpu": "h100_sxm",
    "model": "qwen3-30b-a3b",
    "gpus": np.nan,
}
NONE = {f"{side}_num_workers": np.nan for side in ("prefill", "decode")}


def scenario(**given):
    return scenario_of({**ROW, **given}, Spec())


def workers(**given):
    pools = scenario(**given).pools
    return pools["prefill"].replicas, pools["decode"].replicas


def test_each_side_has_its_layout_and_its_workers():
    layouts = {"prefill_tp_size": 2, "prefill_moe_tp_size": 2, "decode_attention_dp_size": 4}
    pools = scenario(**layouts, decode_moe_ep_size=4, prefill_num_workers=3, decode_num_workers=2).pools
    assert (pools["prefill"].role, pools["decode"].role) == ("prefill", "decode")
    assert (pools["prefill"].replicas, pools["decode"].replicas) == (3, 2)
    assert (pools["prefill"].layout.num_devices, pools["decode"].layout.num_devices) == (2, 4)
    assert pools["decode"].layout.expert_parallel_size == 4
    assert pools["decode"].engine.max_num_seqs == 4 * pools["prefill"].engine.max_num_seqs


def test_the_first_token_waits_for_the_decode_worker():
    assert scenario().kv_transfer.first_token_at == "decode"


def test_requests_pass_dynamo_or_what_the_load_generator_adds_to_an_engine():
    assert scenario(backend="trtllm").client.name == "dynamo"
    assert scenario(backend="sglang").client.name == "inferencex"


def test_versions_of_the_runtime_are_none_of_the_engine():
    row = {"backend": "trtllm", "backend_version": "0.8.1.post1", "measured_date": "2026-01-29"}
    assert engine_in_dynamo(row) == "tensorrt_llm"
    assert engine_in_dynamo({**row, "backend_version": "1.0.0"}) == "tensorrt_llm_1_0"
    assert engine_in_dynamo({"backend": "vllm", "backend_version": "0.12.0"}) == "vllm_sync"


def test_workers_follow_from_the_gpus():
    assert workers(prefill_num_workers=2, decode_num_workers=np.nan, gpus=6) == (2, 4)
    assert workers(prefill_num_workers=np.nan, decode_num_workers=2, gpus=6) == (4, 2)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (NONE, "prefill_num_workers and decode_num_workers: missing"),
        ({**NONE, "gpus": 6}, "prefill_num_workers and decode_num_workers: missing"),
        ({"prefill_num_workers": np.nan}, "prefill_num_workers: missing"),
        ({"decode_num_workers": np.nan}, "decode_num_workers: missing"),
    ],
)
def test_unknown_numbers_of_workers_are_not_assumed(given, missing):
    row = predict_row("silicon", Spec(), {**ROW, **given})
    assert set(row) == {"id", "status"}
    assert row["status"].startswith(missing)
    assert row["status"].endswith("nothing is assumed; give both, or gpus and one of them")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"decode_num_workers": np.nan, "gpus": 1},
            "gpus=1: must be those of 1 x 1 for prefill and 0 x 1 for decode",
        ),
        ({"gpus": 3}, "gpus=3: must be those of 1 x 1 for prefill and 1 x 1 for decode"),
        ({"decode_moe_ep_size": 4}, "decode_moe_tp_size=1 x decode_moe_ep_size=4: must be decode_tp_size=1"),
        ({"concurrency": np.nan, "decode_batch_size": np.nan}, "concurrency and decode_batch_size are mis"),
        ({"prefill_tp_size": 1.5}, "prefill_tp_size=1.5: must be a whole number >= 1"),
        ({"prefill_tp_size": np.nan}, "prefill_tp_size is missing"),
        ({"isl": 60_000}, "60,000 prompt tokens plus 9 output tokens"),
    ],
)
def test_rows_that_contradict_themselves_get_a_reason(given, reason):
    row = predict_row("silicon", Spec(), {**ROW, **given})
    assert set(row) == {"id", "status"}
    assert row["status"].startswith(reason)


def test_a_table_without_the_columns_of_the_sides_gives_a_reason():
    with pytest.raises(NotSimulatedError, match="prefill_tp_size is missing"):
        scenario_of({**SILICON, "mode": "disagg"}, Spec())


def test_experts_without_sizes_are_distributed_with_data_parallel_attention():
    unknown = {"decode_moe_tp_size": 0, "decode_moe_ep_size": 0}
    layout = scenario(**unknown, decode_attention_dp_size=4).pools["decode"].layout
    assert (layout.expert_parallel_size, layout.num_devices) == (4, 4)
    assert scenario(**unknown, decode_tp_size=4).pools["decode"].layout.expert_parallel_size == 1
    dense = {"model": "llama-3.1-8b", "decode_moe_ep_size": 8}
    assert scenario(**dense).pools["decode"].layout.expert_parallel_size == 1


def test_a_tp_size_that_counts_gpus_is_cut_by_attention():
    """tp 8 with attention DP 8 and 8 ways of experts are 8 GPUs, not 64."""
    layout = (
        scenario(decode_tp_size=8, decode_attention_dp_size=8, decode_moe_ep_size=8).pools["decode"].layout
    )
    assert (layout.tensor_parallel_size, layout.num_devices) == (1, 8)


def test_clients_follow_from_the_batches_of_all_ranks():
    given = {"concurrency": np.nan, "decode_batch_size": 3, "decode_num_workers": 2}
    row = scenario(**given, decode_attention_dp_size=4, decode_moe_ep_size=4)
    assert row.workload.arrivals.num_users == 3 * 2 * 4


def test_decodes_are_not_delayed_by_prompts():
    """On one replica of both sides' GPUs, chunks of other prompts make decode iterations longer."""
    many = {"model": "llama-3.1-8b", "concurrency": 32.0, "isl": 2000, "osl": 60}
    apart = predict({**ROW, **many}, Spec())
    sizes = {"tp_size": 2, "pp_size": 1, "attention_dp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1}
    together = predict({**ROW, **many, **sizes, "mode": "agg", "gpus": 2}, Spec())
    assert apart["tpot_ms"] < together["tpot_ms"]
    assert apart["e2e_ms"] == pytest.approx(apart["ttft_ms"] + 53 * apart["tpot_ms"], rel=0.05)
