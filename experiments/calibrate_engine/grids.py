"""Which steps are measured: decodes by batch and context, chunks by tokens and cached tokens."""

from __future__ import annotations

from typing import NamedTuple

from experiments.calibrate_engine.steps import Chunk, Step

SPREAD = 0.3
"""Contexts of a batch lie within so much of their mean: kernels pad to the longest, and none are alike.

Less than a third: the torch reference does not put sequences together of which one is twice as long.
"""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (2, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
CACHED = (0, 256, 2048, 8192, 32768)


class Point(NamedTuple):
    """A step, and the row of the attention table that it measures: `hwmodels.levels.profile`."""

    step: Step
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_seqs: int = 0
    decode_kv_tokens: int = 0


def decode_points(max_num_seqs: int, max_model_len: int) -> list[Point]:
    """Every batch with every mean context; of a spread batch, some contexts reach beyond max_model_len."""
    return [
        Point(Step(contexts=spread_around(mean, count)), decode_seqs=count, decode_kv_tokens=mean)
        for count in upto(BATCHES, max_num_seqs)
        for mean in upto(CONTEXTS, max_model_len)
    ]


def prefill_points(max_num_batched_tokens: int, max_model_len: int) -> list[Point]:
    """Every chunk behind every number of cached tokens; the longest reach beyond max_model_len."""
    return [
        Point(Step(chunks=(Chunk(cached, new),)), prefill_tokens=new, cached_tokens=cached)
        for new in upto(CHUNKS, min(max_num_batched_tokens, max_model_len))
        for cached in upto(CACHED, max_model_len)
    ]


def longest(points: list[Point]) -> int:
    """Tokens of the longest sequence."""
    ends = [chunk.cached + chunk.new for point in points for chunk in point.step.chunks]
    return max([*ends, *(context for point in points for context in point.step.contexts)])


def spread_around(mean: int, count: int) -> tuple[int, ...]:
    """Contexts evenly around the mean."""
    if count == 1:
        return (mean,)
    return tuple(round(mean * (1 - SPREAD + 2 * SPREAD * i / (count - 1))) for i in range(count))


def upto(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Those below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]
