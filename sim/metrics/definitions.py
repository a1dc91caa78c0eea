"""What the latency words mean: TTFT, TPOT, ITL, E2E, queue time, and how they are condensed to figures.

    arrival      scheduled        first token    ...    last token
       |-- queue ---|                  |-- ITL --|-- ITL --|
       |------------ TTFT -------------|
       |----------------------- E2E ----------------------|
    TPOT = (last token - first token) / (output tokens - 1)

ITL is pooled over all gaps of all requests, so long answers weigh more; TPOT is one figure a request. Where
other tools differ: guidellm and AIPerf call our TPOT "ITL", Vidur divides by the output tokens.
Times are seconds, arrays have one value a request, NaN stands for what did not happen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Counts = NDArray[np.int64]

PERCENTILES = (50, 90, 95, 99)
"""Those that every summary holds."""


def ttft_s(arrival_s: Times, first_token_s: Times) -> Times:
    """Time to first token: arrival at the service to the first output token, queueing included."""
    return first_token_s - arrival_s


def tpot_s(first_token_s: Times, last_token_s: Times, output_tokens: Counts) -> Times:
    """Time per output token after the first; NaN for answers of one token, which have none.

    First token at 1.0 s, last at 1.9 s, 10 tokens: 0.9 / 9 = 0.1 s.
    """
    several = output_tokens > 1
    return np.where(several, (last_token_s - first_token_s) / np.where(several, output_tokens - 1, 1), np.nan)


def e2e_s(arrival_s: Times, last_token_s: Times) -> Times:
    """End to end: arrival to last token. Others call it request latency or job completion time (JCT)."""
    return last_token_s - arrival_s


def queue_s(arrival_s: Times, scheduled_s: Times) -> Times:
    """Arrival to the start of the first iteration that works on the request; later waits do not count."""
    return scheduled_s - arrival_s


def describe(values: Times, counts: Counts | None = None) -> dict[str, float | int]:
    """Count, mean, `PERCENTILES`, min and max of the values that are not NaN; NaN where there is none.

    counts: how many times each value occurs, once if not given. Keys end in _s: the values are seconds.
    TTFT of 100, 102, 100, 100, 99, 104, 110, 90, 3000 and 95 ms: mean 390 ms, median 100 ms. One
    request of ten makes the mean useless; hence percentiles.
    """
    happened = ~np.isnan(values)
    if counts is None:
        counts = np.ones(values.shape, dtype=np.int64)
    happened &= counts > 0
    if not happened.all():
        values, counts = values[happened], counts[happened]
    total = int(counts.sum())
    percentiles = weighted_percentile(values, counts, PERCENTILES)
    return {
        "count": total,
        "mean_s": float(np.dot(values, counts)) / total if total else float("nan"),
        **{f"p{q}_s": float(p) for q, p in zip(PERCENTILES, percentiles, strict=True)},
        "min_s": float(values.min()) if total else float("nan"),
        "max_s": float(values.max()) if total else float("nan"),
    }


def weighted_percentile(values: Times, counts: Counts, q: Sequence[float]) -> Times:
    """The percentiles q (0 to 100) of `np.repeat(values, counts)`, to the last bit, without expanding it.

    Linear interpolation, numpy's default: the percentile lies at position (n - 1) q / 100 of the n sorted
    values. NaN where there is no value. Raises ValueError for q outside [0, 100].
    """
    share = np.asarray(q, dtype=np.float64) / 100
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError(f"q={list(q)}: percentiles must be in [0, 100]")
    total = int(counts.sum())
    if total == 0:
        return np.full(share.shape, np.nan)
    order = np.argsort(values)
    ordered, last_position = values[order], np.cumsum(counts[order]) - 1
    position = (total - 1) * share
    below = np.floor(position)
    low = ordered[np.searchsorted(last_position, below)]
    high = ordered[np.searchsorted(last_position, np.minimum(below + 1, total - 1))]
    t = position - below
    # Interpolating from the nearer end is what numpy does; it keeps the result between low and high.
    result: Times = np.where(t < 0.5, low + (high - low) * t, high - (high - low) * (1 - t))
    return result
