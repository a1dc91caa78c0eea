"""Which rows were measured with speculative decoding, and how SGLang looked for requests."""

import pytest

from experiments.score.drafts import num_draft_tokens, with_drafts
from experiments.score.recipes import Recipe, recipe_of
from hwmodels.levels import Spec

ROW = {
    "source": "inferencemax",
    "backend": "trtllm",
    "backend_version": "1.2.0rc6.post2",
    "model": "deepseek-r1",
    "gpu": "b200_sxm",
    "weights": "fp8",
    "isl": 1024,
    "osl": 1024,
    "concurrency": 64,
    "tp_size": 8,
    "attention_dp_size": 1,
    "moe_tp_size": 8,
    "moe_ep_size": 1,
    "gpus": 8,
}


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        ({}, 0),
        ({"backend_version": "1.2.0rc6.post3"}, 3),
        ({"backend_version": "1.2.0rc6.post3", "attention_dp_size": 8}, 1),
        ({"backend_version": "1.1.0rc2.post2", "gpu": "h200_sxm"}, 3),
        ({"backend": "sglang", "backend_version": "0.5.9", "concurrency": 128}, 2),
        ({"backend": "sglang", "backend_version": "0.5.9"}, 0),
    ],
)
def test_images_that_ran_with_speculative_decoding_are_known(given, drafts):
    row = ROW | given
    assert num_draft_tokens(row) == drafts
    is_priced = drafts > 0 and row["backend"] == "trtllm"
    assert (with_drafts(Spec(), row) == Spec()) is not is_priced


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"concurrency": 4},
            Recipe(32_768, scheduler_recv_interval=10, max_prefill_tokens=32_768, moe_backend="auto"),
        ),
        (
            {"concurrency": 16},
            Recipe(32_768, scheduler_recv_interval=30, max_prefill_tokens=32_768, moe_backend="auto"),
        ),
        (
            {"weights": "nvfp4"},
            Recipe(16_384, scheduler_recv_interval=30, max_prefill_tokens=16_384, moe_backend="auto"),
        ),
        ({"gpu": "h200_sxm"}, Recipe(32_768, max_prefill_tokens=32_768)),
        (
            {"concurrency": 128, "backend_version": "0.5.9"},
            Recipe(32_768, scheduler_recv_interval=68, max_prefill_tokens=32_768, moe_backend="auto"),
        ),
        ({"model": "llama-3.1-70b"}, Recipe()),
    ],
)
def test_sglang_looks_for_requests_in_intervals(given, expected):
    assert recipe_of(ROW | {"backend": "sglang"} | given) == expected
