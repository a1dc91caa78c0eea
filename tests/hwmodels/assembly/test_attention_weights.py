"""Attention weights that a cache reads: bytes by hand, arrays as numbers, and parts that sum to the whole."""

import numpy as np
import pytest

from hwmodels.assembly.attention import WithAttentionWeights
from hwmodels.assembly.roofline import Roofline
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model import Block, DenseMlp, ModelSpec
from hwmodels.model.attention import GroupedQueryAttention

MODEL = ModelSpec(
    name="llama3_1_8b",
    hidden_size=4096,
    vocab_size=128256,
    max_position_embeddings=131072,
    blocks=(
        Block(
            count=32,
            attention=GroupedQueryAttention(num_heads=32, num_kv_heads=8, head_dim=128),
            mlp=DenseMlp(intermediate_size=14336),
        ),
    ),
)
DECODE = IterationShape(1, 2048, 0, 0, 0, 0, 1)
WHOLE_PROMPT = IterationShape(0, 0, 1, 1000, causal_pairs(1000), 1000, 1)
PART_OF_PROMPT = WHOLE_PROMPT._replace(sampled_seqs=0)


def make(device, *, decode_share=0.0, prompt_rows=None, layout=None):
    base = Roofline(model=MODEL, device=device, layout=layout)
    return base, WithAttentionWeights(base, base.site, decode_share=decode_share, prompt_rows=prompt_rows)


def test_a_decode_moves_a_tenth_of_its_kv(devices):
    """32 layers x 2,048 x (5 x 32 heads x 2 + 12 x 8 KV heads) bytes, in 4 kernels per layer."""
    base, model = make(devices["h100_sxm"], decode_share=1.0)
    by_hand = 32 * 2048 * (5 * 32 * 2 + 12 * 8)
    assert model.weights_bytes(DECODE) == by_hand
    added_s = 32 * 4 * base.site.calibration.stream.start_s + by_hand / (3.35e12 * 0.80)
    assert model.seconds(DECODE) - base.seconds(DECODE) == pytest.approx(added_s)


def test_ranks_share_the_heads(devices):
    _, alone = make(devices["h100_sxm"], decode_share=1.0)
    _, four = make(devices["h100_sxm"], decode_share=1.0, layout=ParallelLayout(tensor_parallel_size=4))
    assert four.weights_bytes(DECODE) == alone.weights_bytes(DECODE) / 4


def test_a_cut_by_an_observation_window_reads_weights_at_the_end_of_a_prompt_only(devices):
    """Keys of 8 heads again, and 32 rows of weights of 32 heads, for each of 1,000 keys."""
    base, model = make(devices["h100_sxm"], prompt_rows=32)
    assert model.weights_bytes(WHOLE_PROMPT) == 32 * 1000 * (8 * 128 * 2 + 32 * 5 * 32 * 2)
    for shape in (PART_OF_PROMPT, DECODE):
        assert model.weights_bytes(shape) == 0
        assert model.seconds(shape) == base.seconds(shape)
    assert model.decode_ends(1.0, 3, 300, 5) == base.decode_ends(1.0, 3, 300, 5)


def test_sums_over_a_prompt_read_every_pair(devices):
    _, model = make(devices["h100_sxm"], decode_share=1.0)
    expected = 32 * (500_500 * 5 * 32 * 2 + 1000 * 12 * 8)
    assert model.weights_bytes(WHOLE_PROMPT) == model.weights_bytes(PART_OF_PROMPT) == expected


def test_leaps_equal_single_iterations(devices):
    _, model = make(devices["h100_sxm"], decode_share=0.3)
    contexts = 100 + 7 * np.arange(50)
    leap = model.seconds(IterationShape(7, contexts, 2, 100, 5000, 900 + contexts, 8)).tolist()
    single = [
        model.seconds(IterationShape(7, int(c), 2, 100, 5000, 900 + int(c), 8)) for c in contexts.tolist()
    ]
    assert leap == single
    end_s, ends_s = 0.25, []
    for context in contexts.tolist():
        end_s += model.seconds(IterationShape(7, context, 0, 0, 0, 0, 7))
        ends_s.append(end_s)
    assert model.decode_ends(0.25, 7, 100, 50) == ends_s


def test_parts_sum_to_the_whole(devices):
    _, model = make(devices["h100_sxm"], decode_share=1.0)
    shape = IterationShape(4, 4000, 1, 512, causal_pairs(512), 512, 5)
    assert sum(model.breakdown(shape).values()) == pytest.approx(model.seconds(shape))
    lines = model.explain(shape)
    assert sum(line.seconds for line in lines) == pytest.approx(model.seconds(shape))
    assert sum(line.share for line in lines) == pytest.approx(1)
    assert "attention_weights" in [line.operator for line in lines]


def test_rejects_pipelines(devices):
    with pytest.raises(ValueError, match="pipeline_parallel_size=2: a cache that reads attention weights"):
        make(devices["h100_sxm"], decode_share=1.0, layout=ParallelLayout(pipeline_parallel_size=2))
