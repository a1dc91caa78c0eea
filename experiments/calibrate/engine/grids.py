"""Grid of the measured steps: decodes by batch size and context, chunks by new and cached tokens."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from experiments.calibrate.engine.steps import Chunk, Step

SPREAD = 0.6
"""Standard deviation over mean of the contexts in a batch (lognormal, cut at the longest possible context).

It is close to the spread in service with lognormal prompts (coefficient of variation 1) and their outputs.
The torch reference groups similar contexts and pads them: such a batch takes 1.5 times as long as one with
equal contexts.
"""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
EVERY_BATCH = 32
"""Largest batch size up to which every size is measured on a CPU.

Three rows more than the tiles of a CPU hold make a matrix product 10 % slower.
"""
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (2, 6, 14, 30, 62, 94, 126, 190, 254, 382, 510, 766, 1022, 1534, 2046, 3070, 4094, 6142, 8190)
"""Chunk sizes in tokens, two fewer than tiles hold.

Prompts have any length, and sizes that fill their tiles are up to 10 % faster on a CPU.
"""
CACHED = (0, 256, 2048, 8192, 32768)
VERIFYING = ((2, 8), (6, 2), (6, 4), (6, 8), (14, 4), (14, 8), (14, 16))
"""New tokens of each chunk, and chunks, of steps with several: the rows of sequences that verify drafts.

Tokens are drawn at all of them, so that the LM head is measured with more rows than there are sequences.
"""
VERIFYING_CACHED = 256


class Point(NamedTuple):
    """A step, and the sizes of the row that it fills in the attention table of `hwmodels.levels.profile`."""

    step: Step
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_seqs: int = 0
    decode_kv_tokens: int = 0
    prefill_seqs: int = 1
    """Chunks of the step, all of the same size."""


def decode_points(max_num_seqs: int, max_model_len: int, every: int = EVERY_BATCH) -> list[Point]:
    """Returns the decode steps of the grid.

    Listed batch sizes are combined with every mean context. The batch sizes between them, up to `every`, are
    measured with one context, for the matrix products, whose time depends on the number of rows.
    """
    batches, contexts = upto(BATCHES, max_num_seqs), upto(CONTEXTS, max_model_len)
    between = sorted(set(range(1, min(max_num_seqs, every))) - set(batches))
    return [
        Point(Step(contexts=spread_around(mean, count, max_model_len)), 0, 0, count, mean)
        for counts, means in ((batches, contexts), (between, contexts[1:2]))
        for count in counts
        for mean in means
    ]


def prefill_points(max_num_batched_tokens: int, max_model_len: int) -> list[Point]:
    """Returns a step for every chunk size and number of cached tokens.

    The longest sequences exceed max_model_len.
    """
    return [
        Point(Step(chunks=(Chunk(cached, new),)), prefill_tokens=new, cached_tokens=cached)
        for new in upto(CHUNKS, min(max_num_batched_tokens, max_model_len) - 2)
        for cached in upto(CACHED, max_model_len)
    ]


def verifying_points(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> list[Point]:
    """Returns steps of several chunks each, of sizes that are also measured alone."""
    cached = VERIFYING_CACHED
    return [
        Point(Step(chunks=(Chunk(cached, new, verifies=True),) * count), new, cached, prefill_seqs=count)
        for new, count in VERIFYING
        if count <= max_num_seqs
        and count * new < max_num_batched_tokens
        and cached < max_model_len
        and new < min(max_num_batched_tokens, max_model_len) - 2
    ]


def longest(points: list[Point]) -> int:
    """Returns the number of tokens of the longest sequence."""
    ends = [chunk.cached + chunk.new for point in points for chunk in point.step.chunks]
    return max([*ends, *(context for point in points for context in point.step.contexts)])


def spread_around(mean: int, count: int, limit: int) -> tuple[int, ...]:
    """Returns lognormal quantiles of contexts, in tokens, cut at the limit and scaled to keep the mean."""
    sigma = math.sqrt(math.log(1 + SPREAD**2))
    contexts = np.exp([sigma * NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    for _ in range(100):
        contexts = np.minimum(contexts * mean / contexts.mean(), limit)
    return tuple(np.rint(contexts).astype(int).tolist())


def upto(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Returns the sizes below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]
