"""The operating point of a batch under the roofline."""

import pytest

from hwmodels.iterations import Explained, IterationShape
from hwmodels.iterations.memory import plan_memory
from hwmodels.iterations.ops import (
    decode_shape,
    largest_batch,
    operating_point,
    prefill_shape,
    ridge_points,
)


class Model:
    """An iteration takes 2 s, 100 FLOPs a token at a peak of 1,000, 50 bytes at a peak of 40."""

    peak_flops_per_s = 1000.0
    peak_bytes_per_s = 40.0

    def seconds(self, shape):
        return 2.0

    def flops(self, shape):
        return 100.0 * (shape.decode_seqs + shape.prefill_tokens)

    def bytes_moved(self, shape):
        return 50.0

    def explain(self, shape):
        return [
            Explained("attention_decode", "attention", 0.9, 0.45, "compute", 1.0, 1.0, 1.0),
            Explained("qkv_proj", "gemm", 0.6, 0.3, "memory", 1.0, 1.0, 1.0),
            Explained("lm_head", "lm_head", 0.5, 0.25, "memory", 1.0, 1.0, 1.0),
        ]


def test_shapes_of_decodes_and_of_whole_prompts():
    assert decode_shape(3, 100) == IterationShape(3, 300, 0, 0, 0, 0, 3)
    assert prefill_shape(2, 4) == IterationShape(0, 0, 2, 8, 20, 8, 2)


def test_figures_of_a_decode():
    point = operating_point(Model(), decode_shape(4, 100))
    assert (point.phase, point.num_seqs, point.num_tokens) == ("decode", 4, 4)
    assert point.intensity == 8
    assert point.tokens_per_s == 2
    assert point.flops_per_s == 200
    assert point.mfu == pytest.approx(0.2)
    assert point.mbu == pytest.approx(50 / 80)


def test_a_prefill_counts_all_its_tokens():
    point = operating_point(Model(), prefill_shape(2, 10))
    assert (point.phase, point.num_seqs, point.num_tokens, point.mfu) == ("prefill", 2, 20, 1.0)


def test_the_bound_is_that_of_most_of_the_time():
    """Two operators bound by memory take more than the longest one."""
    point = operating_point(Model(), decode_shape(4, 100))
    assert (point.bound, point.bound_share) == ("memory", pytest.approx(0.55))


def test_the_ridge_of_an_h100(devices):
    ridges = ridge_points(devices["h100_sxm"])
    assert ridges["bf16"] == pytest.approx(295.3, abs=0.1)
    assert ridges["fp8"] == pytest.approx(2 * ridges["bf16"], rel=1e-3)


def test_the_largest_batch_holds_whole_blocks(models, devices):
    plan = plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], num_kv_blocks=2602)
    assert largest_batch(plan, 1025, 256) == (40, "memory")
    assert largest_batch(plan, 1024, 256) == (40, "memory")
    assert largest_batch(plan, 1008, 256) == (41, "memory")
    assert largest_batch(plan, 16, 256) == (256, "slots")
