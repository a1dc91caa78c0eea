"""Clients of requests: what they see of an output, and when, beside the times at which it is generated.

    arrival    first token   ...   first visible token   ...   last token
       |----------- TTFT ----|          |                          |
       |---- time to publish, streaming, after output moderation --|
       |---- time to publish of a complete answer (streams: false) ---------- + moderation

The requests themselves are those of another workload and stay as they are; only figures are added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from policies.prediction import uniform
from sim.metrics.client_view import ClientsFigure, ClientView, PublishLatencies
from sim.metrics.distributions import Kept
from sim.records.table import AnyTable, column
from sim.workload.base import Source
from sim.workload.distributions import Distribution, Fixed, require_not_negative, require_positive
from sim.workload.modified import OfWorkload

NORMAL = NormalDist()
NOTHING_HIDDEN = Fixed(value=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithClients(OfWorkload):
    """A workload and the clients of its requests."""

    hidden_share: Distribution = NOTHING_HIDDEN
    """Share of the output tokens before the first visible one, such as reasoning; at least one is visible."""
    streams: bool = True
    """Whether clients get tokens as they come; false: the first token comes with the last one."""
    moderation_s: float = 0.0
    """Time that output moderation takes for each piece before it is published: a token, or the answer."""
    reading_tokens_per_s: float | None = None
    """Speed at which users read, 6 to 8 tokens/s; null: it is not compared."""
    publish_slo_ms: float | None = None
    """Time to publish that counts as good; null: no limit."""

    def __post_init__(self) -> None:
        require_not_negative(self, "moderation_s")
        require_positive(self, "reading_tokens_per_s", "publish_slo_ms")
        for name, share in self.hidden_share.magnitudes().items():
            if not 0 <= share <= 1:
                raise ValueError(f"hidden_share.{name}={share:g}: must be a share, >= 0 and <= 1")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic of the workload."""
        return self.of.source(seed=seed, max_model_len=max_model_len)

    def hidden_tokens(self, requests: AnyTable, seed: int, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Draws the hidden tokens of each request, less than its output tokens.

        They depend on the request id, or on the session and the number of the request in it, because ids of
        later requests depend on the engine. number: these numbers, see `SessionNumbers`.
        """
        sessions = column(requests, "session_id").tolist()
        names = (f"hidden/{one}" if one >= 0 else "hidden" for one in sessions)
        drawn = [uniform(seed, name, i) for name, i in zip(names, number.tolist(), strict=True)]
        scores = np.array([NORMAL.inv_cdf(p) for p in drawn])
        share = np.clip(self.hidden_share.from_normal(scores), 0.0, 1.0)
        tokens = column(requests, "output_tokens", np.int64)
        hidden: NDArray[np.int64] = np.minimum(
            np.rint(share * tokens).astype(np.int64), np.maximum(tokens - 1, 0)
        )
        return hidden

    @property
    def slo_terms(self) -> frozenset[str]:
        """Returns the latency that these requests have beside those of the engine: the time to publish."""
        return frozenset({"publish"})

    def new_latencies(self, *, seed: int, in_shards: bool, terms: Collection[str]) -> PublishLatencies:
        """Returns what computes the time to publish of each request."""
        return PublishLatencies(partial(self._view_of, seed), in_shards=in_shards, draws=self._draws)

    def new_section(self, *, seed: int, in_shards: bool, kept: Kept) -> ClientsFigure:
        """Returns an accumulator of the sections `publish` and `clients`."""
        new_view = partial(self._view_of, seed)
        return ClientsFigure(new_view, in_shards=in_shards, draws=self._draws, kept=kept)

    @property
    def _draws(self) -> bool:
        """Returns whether the hidden tokens of a request depend on its number."""
        return not isinstance(self.hidden_share, Fixed)

    def _view_of(self, seed: int, requests: AnyTable, number: NDArray[np.int64]) -> ClientView:
        return ClientView(
            hidden_tokens=self.hidden_tokens(requests, seed, number),
            streams=self.streams,
            moderation_s=self.moderation_s,
            reading_tokens_per_s=self.reading_tokens_per_s,
            publish_slo_s=None if self.publish_slo_ms is None else self.publish_slo_ms / 1e3,
        )
