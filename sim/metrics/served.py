"""The client's view of a run, as load generators record it, and the percentile definitions of other tools."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window, longest_tokens
from sim.metrics.slo import Slo
from sim.metrics.token_times import TokenTimes
from sim.records.table import AnyTable, column

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Times of requests as a load generator records them, in seconds; NaN for events that did not happen.

    Arrays without a note have one value per request, in the order of arrival.
    """

    window: Window
    sent_s: Values
    first_s: Values
    last_s: Values
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    """Output tokens of all samples of a request; rates count these."""
    longest_tokens: NDArray[np.int64]
    """Output tokens of the longest sample, which ends last; times per token are over these."""
    done: NDArray[np.bool_]
    """True for finished requests."""
    token_s: Values
    """Time of each token; empty if the times are unknown."""
    token_row: NDArray[np.int64]
    """Index of the request of each token."""
    gap_s: Values
    """Seconds between two tokens of a request, for each gap; tokens of one chunk have none between them."""
    gap_row: NDArray[np.int64]
    """Index of the request of each gap."""

    @classmethod
    def of(cls, requests: AnyTable, window: Window, times: TokenTimes | None) -> Served:
        """Returns the requests that arrived in the window. times: of all requests; None: gaps are unknown."""
        arrival_s = column(requests, "arrival_s", np.float64)
        rows = np.flatnonzero(window.holds(arrival_s))
        rows = rows[np.argsort(arrival_s[rows], kind="stable")]
        table = requests.take(rows)
        if times is None:
            times = TokenTimes(np.empty(0), np.zeros(len(requests), np.int64))
        place = np.full(len(requests), -1)
        place[rows] = np.arange(len(rows))
        token_row = place[np.repeat(np.arange(len(requests)), times.num_tokens)]
        gap_s, gap_row = times.gaps()
        gap_row = place[gap_row]
        return cls(
            window=window,
            sent_s=column(table, "arrival_s", np.float64),
            first_s=column(table, "first_token_s", np.float64),
            last_s=column(table, "last_token_s", np.float64),
            prompt_tokens=column(table, "prompt_tokens", np.int64),
            output_tokens=column(table, "output_tokens", np.int64),
            longest_tokens=longest_tokens(table).astype(np.int64),
            done=(column(table, "status") == "finished"),
            token_s=times.time_s[token_row >= 0],
            token_row=token_row[token_row >= 0],
            gap_s=gap_s[gap_row >= 0],
            gap_row=gap_row[gap_row >= 0],
        )

    @property
    def ttft_s(self) -> Values:
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> Values:
        return self.last_s - self.sent_s

    @property
    def per_token_s(self) -> Values:
        """Seconds per output token after the first; NaN for outputs of one token."""
        several = self.longest_tokens > 1
        return np.where(
            several, (self.last_s - self.first_s) / np.where(several, self.longest_tokens - 1, 1), np.nan
        )

    @property
    def gaps_of_done(self) -> Values:
        return self.gap_s[self.done[self.gap_row]]

    def within(self, slo: Slo, *, one_token: bool | None) -> NDArray[np.bool_]:
        """Returns which requests meet the SLO. one_token: whether outputs without a TPOT meet its limit."""
        per_token_s = self.per_token_s
        latencies_s = {"ttft": self.ttft_s, "tpot": per_token_s, "e2e": self.e2e_s}
        held = self.done.copy()
        for term, limit_s in slo.request_limits_s.items():
            kept = latencies_s[term] <= limit_s
            if term == "tpot" and one_token:
                kept = kept | np.isnan(per_token_s)
            held &= kept
        return held


def interpolated(values: Values, weights: Values | None, q: float) -> float:
    """Computes numpy's interpolated percentile of values with equal weights (`weights` is ignored)."""
    return float(np.percentile(values, q))


def measured_value(values: Values, weights: Values | None, q: float) -> float:
    """Computes guidellm's percentile: the smallest value at or below which q % of the weight lies."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum((np.ones(len(values)) if weights is None else weights)[order])
    # The tolerance keeps a cumulative share of exactly q, up to rounding errors, on its value.
    at = int(np.searchsorted(share / share[-1], q / 100 - 1e-12, side="left"))
    return float(values[order][min(at, len(values) - 1)])


def next_value(values: Values, weights: Values | None, q: float) -> float:
    """Computes LoadGen's percentile, sorted[floor(n q / 100)]: p50 of 1, 2, 3, 4 is 3."""
    return float(np.sort(values)[min(int(len(values) * q / 100 + 1e-9), len(values) - 1)])
