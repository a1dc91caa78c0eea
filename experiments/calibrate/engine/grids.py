"""Which steps are measured: decodes by batch and context, chunks by tokens and cached tokens."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from experiments.calibrate.engine.steps import Chunk, Step

SPREAD = 0.6
"""Of the contexts in a batch: standard deviation over mean, lognormal, as far as the longest may be so long.

Near to what lognormal prompts (cv 1) and their answers make of a batch in service. The torch reference puts
like contexts together and pads: for such a batch it needs 1.5 times as long as for equal contexts.
"""
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
EVERY_BATCH = 32
"""Up to which products are measured for each batch: three rows more than a CPU's tiles hold cost 10 %."""
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNKS = (2, 6, 14, 30, 62, 94, 126, 190, 254, 382, 510, 766, 1022, 1534, 2046, 3070, 4094, 6142, 8190)
"""Two less than tiles hold: prompts have any length, and full tiles alone are up to 10 % faster on a CPU."""
CACHED = (0, 256, 2048, 8192, 32768)


class Point(NamedTuple):
    """A step, and the row of the attention table that it measures: `hwmodels.levels.profile`."""

    step: Step
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_seqs: int = 0
    decode_kv_tokens: int = 0


def decode_points(max_num_seqs: int, max_model_len: int) -> list[Point]:
    """Every batch with every mean context; those between small ones with one, for the products by rows."""
    batches, contexts = upto(BATCHES, max_num_seqs), upto(CONTEXTS, max_model_len)
    between = sorted(set(range(1, min(max_num_seqs, EVERY_BATCH))) - set(batches))
    return [
        Point(Step(contexts=spread_around(mean, count, max_model_len)), 0, 0, count, mean)
        for counts, means in ((batches, contexts), (between, contexts[1:2]))
        for count in counts
        for mean in means
    ]


def prefill_points(max_num_batched_tokens: int, max_model_len: int) -> list[Point]:
    """Every chunk behind every number of cached tokens; the longest reach beyond max_model_len."""
    return [
        Point(Step(chunks=(Chunk(cached, new),)), prefill_tokens=new, cached_tokens=cached)
        for new in upto(CHUNKS, min(max_num_batched_tokens, max_model_len) - 2)
        for cached in upto(CACHED, max_model_len)
    ]


def longest(points: list[Point]) -> int:
    """Tokens of the longest sequence."""
    ends = [chunk.cached + chunk.new for point in points for chunk in point.step.chunks]
    return max([*ends, *(context for point in points for context in point.step.contexts)])


def spread_around(mean: int, count: int, limit: int) -> tuple[int, ...]:
    """Quantiles of contexts around the mean; what the limit takes from the longest, the others have more."""
    sigma = math.sqrt(math.log(1 + SPREAD**2))
    contexts = np.exp([sigma * NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    for _ in range(100):
        contexts = np.minimum(contexts * mean / contexts.mean(), limit)
    return tuple(np.rint(contexts).astype(int).tolist())


def upto(sizes: tuple[int, ...], limit: int) -> list[int]:
    """Those below the limit, and the limit."""
    return [*(size for size in sizes if size < limit), limit]
