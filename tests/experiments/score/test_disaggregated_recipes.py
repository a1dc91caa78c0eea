"""Published settings of prefill and decode workers, and rows whose labels they correct."""

import pytest

from experiments.score.disaggregated import scenario_of
from experiments.score.disaggregated_recipes import side_recipe, with_published_layout
from hwmodels.levels import Spec
from tests.experiments.score.test_disaggregated import ROW

EIGHT = {"tp_size": 8, "attention_dp_size": 1, "moe_tp_size": 1, "moe_ep_size": 8, "num_workers": 1}
PUBLISHED = {
    **ROW,
    **{f"{side}_{name}": value for side in ("prefill", "decode") for name, value in EIGHT.items()},
    "source": "inferencemax",
    "model": "deepseek-r1",
    "gpu": "b200_sxm",
    "weights": "fp8",
    "measured_date": "2026-03-18",
    "isl": 8192,
    "osl": 1024,
}
RANKS = {"prefill_tp_size": 1, "prefill_attention_dp_size": 8}
SGLANG = {**PUBLISHED, "backend": "sglang"}
TRTLLM = {**PUBLISHED, "backend": "trtllm", "backend_version": "0.8.1.post2"}


def test_sglang_has_few_places_with_data_parallel_attention():
    """Since March a chunk and one request on each of the 8 ranks, before that twice as much."""
    pools = scenario_of({**SGLANG, **RANKS}, Spec()).pools
    prefill, decode = pools["prefill"].engine, pools["decode"].engine
    assert (prefill.max_num_batched_tokens, prefill.max_num_seqs) == (65_536, 8)
    assert decode.max_num_batched_tokens == 32_768
    assert decode.max_num_seqs > 100
    before = side_recipe({**SGLANG, **RANKS, "measured_date": "2026-02-07"}, "prefill")
    assert before[:2] == (131_072, 16)
    assert side_recipe({**SGLANG, **RANKS, "weights": "nvfp4"}, "prefill")[:2] == (32_768, None)
    assert side_recipe({**SGLANG, "prefill_num_workers": 7}, "prefill")[:2] == (65_536, None)


def test_batches_of_decode_workers_are_those_of_the_recipes_names():
    row = {**TRTLLM, "weights": "nvfp4", "isl": 1024, "decode_num_workers": 5}
    assert scenario_of(row, Spec()).pools["decode"].engine.max_num_seqs == 32
    assert side_recipe({**row, "decode_num_workers": 6}, "decode").max_num_seqs == 64
    assert side_recipe({**row, "decode_num_workers": 4}, "decode").max_num_seqs is None
    assert side_recipe(row, "prefill").max_num_seqs is None


def test_workers_in_fp8_with_data_parallel_attention_run_deepgemm():
    assert side_recipe({**TRTLLM, **RANKS}, "prefill").moe_backend == "deepgemm"
    assert side_recipe({**TRTLLM, **RANKS}, "decode").moe_backend == "auto"
    assert side_recipe({**TRTLLM, **RANKS, "gpu": "h200_sxm"}, "prefill").moe_backend == "auto"


def test_other_rows_have_the_engines_own_settings():
    for other in ({"source": "lab"}, {"model": "qwen3-32b"}):
        assert side_recipe({**SGLANG, **RANKS, **other}, "prefill") == side_recipe(ROW, "prefill")


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"gpu": "h200_sxm", "isl": 1024}, (1, 8, 1, 8)),
        ({"gpu": "h200_sxm"}, (8, 1, 1, 8)),
        ({"concurrency": 128}, (1, 8, 8, 1)),
        ({"concurrency": 1}, (8, 1, 8, 1)),
    ],
)
def test_wrong_layouts_of_february_become_those_of_march(given, sizes):
    """Tensor parallel size, attention ranks, slices of the experts, groups of experts: 8 GPUs each."""
    row = with_published_layout({**TRTLLM, **given, "measured_date": "2026-02-12"})
    names = ("tp", "attention_dp", "moe_tp", "moe_ep")
    assert tuple(row[f"prefill_{name}_size"] for name in names) == sizes
    assert row["decode_tp_size"] == 8
    late = {**TRTLLM, **given}
    assert with_published_layout(late) is late
