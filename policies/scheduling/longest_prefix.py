"""Longest prefix first: the request with the longest prefix cache hit goes first (SGLang's `lpm`).

Assumes a prefix cache. Requests that share a prefix run one after the other while it is cached, which
approximates a depth-first traversal of the radix tree. A hit counts fully cached pages, excluding the last
token (`match_kv_cache` in SGLang 0.5.23), although the page with that token is computed again. A request
without a hit goes behind all others if it shares its prefix with an earlier waiting request, because it will
have a hit later (`SharedPrefixes`). Ties keep their order; new and preempted requests enter at the end. A
request without a shared prefix may starve, unless max_wait_s limits that, as in shortest_job_first (not in
SGLang). With more than max_sorted waiting requests the order is left unchanged, as in SGLang, because looking
up all of them takes too long.
Memory pressure: the sequence with the shortest hit at its admission is preempted. Horizon: one iteration
while a request waits, because evictions change the hits.

In-batch caching (SGLang): of waiting requests that share an uncached prefix, one is served first, and the
others then find its KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Annotated, ClassVar

from fieldlimits import Ge, PositiveInt, Unit
from policies.caching.content import all_segments
from policies.core.request import Segment
from policies.core.sequence import SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Overdue, Scheduling
from policies.scheduling.fcfs import Entries

NUM_TOKENS = 32
"""Hits up to this number of tokens count as none; shared prefixes count from this number of tokens on."""

Prefix = tuple[Segment, ...]


class SharedPrefixes:
    """The leading tokens of waiting requests, by request id."""

    def __init__(self) -> None:
        self._prefixes: dict[int, Prefix] = {}

    def behind(self, queue: Sequence[SequenceView], hits: Mapping[int, int]) -> set[int]:
        """Returns the ids of the requests that share a prefix with one before them in the queue.

        hits: cached tokens by request id. A request with a hit is never delayed and delays no others.
        """
        behind, found = set[int](), set[Prefix]()
        for seq in queue:
            if hits[seq.request_id] > NUM_TOKENS or seq.num_known < NUM_TOKENS:
                continue
            prefix = self._prefixes.get(seq.request_id)
            if prefix is None:
                prefix = self._prefixes[seq.request_id] = _prefix(seq)
            if prefix in found:
                behind.add(seq.request_id)
            found.add(prefix)
        return behind

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._prefixes.pop(seq.request_id, None)


def _prefix(seq: SequenceView) -> Prefix:
    """Returns the segments of the first `NUM_TOKENS` tokens, which are equal for equal tokens."""
    prefix, num_left = [], NUM_TOKENS
    for content_id, num_tokens in islice(all_segments(seq.request), NUM_TOKENS):
        prefix.append(Segment(content_id, min(num_tokens, num_left)))
        num_left -= num_tokens
        if num_left <= 0:
            break
    return tuple(prefix)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestPrefix(Scheduling):
    """The longest prefix hit goes first; ties keep their order."""

    looks_up: ClassVar[bool] = True

    max_sorted: Annotated[PositiveInt, Unit("request")] = 128
    """Number of waiting requests above which the order is left unchanged."""
    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _num_found: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _moved: dict[int, SequenceView] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Sequences with a hit, or behind another one, by request id."""
    _behind: set[int] = field(init=False, default_factory=set, repr=False, compare=False)
    _shared: SharedPrefixes = field(init=False, default_factory=SharedPrefixes, repr=False, compare=False)
    _entries: Entries = field(init=False, default_factory=Entries, repr=False, compare=False)
    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, is behind, -hit, entry, arrival)."""
        num_found = self._num_found.get(seq.request_id, 0)
        is_behind = seq.request_id in self._behind
        if (num_found or is_behind) and seq.state is SequenceState.waiting:
            self._moved[seq.request_id] = seq
        key = is_behind, 0 if is_behind else -num_found, self._entries.of(seq)
        return self._overdue.rank(seq, self.max_wait_s, *key)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front, and looks up the prefix hits of all waiting requests."""
        self._overdue.bring_forward(view, step, now)
        if not view.num_waiting:
            return
        step.hold(1)
        if view.num_waiting > self.max_sorted:
            self._order_by_entry(step)
        else:
            self._sort(view, step)

    def _sort(self, view: StepView, step: StepBuilder) -> None:
        """Looks up the hits of the waiting sequences and sorts them in place."""
        queue = sorted(view.waiting, key=self._entries.of)
        hits = {seq.request_id: view.num_matched(seq) for seq in queue}
        behind = self._shared.behind(queue, hits)
        changed = self._behind ^ behind
        self._behind.symmetric_difference_update(changed)
        queue.sort(key=lambda seq: inf if seq.request_id in behind else -hits[seq.request_id])
        changed |= self._entries.sort(queue)
        for seq in queue:
            self._note_hit(seq, hits[seq.request_id], step, has_moved=seq.request_id in changed)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        for by_id in (self._num_found, self._moved):
            by_id.pop(seq.request_id, None)
        self._behind.discard(seq.request_id)
        self._entries.forget(seq)
        self._shared.forget(seq)
        self._overdue.forget(seq)

    def _order_by_entry(self, step: StepBuilder) -> None:
        """Clears the hits of waiting sequences; others have no hits, so they are not visited."""
        behind = set(self._behind)
        self._behind.clear()
        for seq in list(self._moved.values()):
            if seq.state is SequenceState.waiting:
                self._note_hit(seq, 0, step, has_moved=seq.request_id in behind)
        self._moved.clear()

    def _note_hit(self, seq: SequenceView, num_found: int, step: StepBuilder, has_moved: bool) -> None:
        """Reranks a waiting sequence if its hit, or its waiting for another sequence, has changed."""
        if has_moved or num_found != self._num_found.get(seq.request_id, 0):
            self._num_found[seq.request_id] = num_found
            step.rerank(seq)
