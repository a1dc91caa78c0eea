"""The log of requests: one row per request, in plain columns written during the simulation."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from enum import IntEnum
from math import isnan
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence
from sim.records.table import Table

NAN = float("nan")


class Status(IntEnum):
    """Status of a request at the end of a run; every request has exactly one."""

    unfinished = 0
    finished = 1
    rejected = 2
    aborted = 3


# In Python 3.11, reading a member through the class of its enum takes 50 ns, a constant of the module 2 ns.
FINISHED: Final = Status.finished
_LENGTH: Final = FinishReason.length


EMPTY_ROW: Final[Mapping[str, object]] = {
    **dict.fromkeys(("has_arrived", "status", "tenant", "model", "priority", "prompt_tokens"), 0),
    **dict.fromkeys(("pinned_tokens", "output_tokens", "longest_tokens", "preemptions", "cached_tokens"), 0),
    **dict.fromkeys(("prefill_iterations", "attempts", "tries", "lost_tokens"), 0),
    **dict.fromkeys(("session_id", "replica", "prefill_replica"), -1),
    **dict.fromkeys(("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s"), NAN),
    **dict.fromkeys(("gateway_s", "kv_transfer_bytes"), 0.0),
    "kv_transfer_s": NAN,
    "samples": 1,
}
"""Columns of the log, with their initial values before a request arrives; status: unfinished."""
_OTHERS: Final = (
    *("reason", "_tenants", "_models", "lost_kv", "held_back", "failed_attempts"),
    *("num_lost_first_tokens", "num_crash_tokens", "num_resends", "num_resumed", "num_recomputed_tokens"),
)
"""Other attributes of the log."""
REASON_BYTES: Final = 100
"""Approximate memory of an entry in `reason`."""


class RequestLog:
    """One row per request, at the index of its id; ids count from 0 in the order of creation."""

    def __init__(self) -> None:
        self.has_arrived: Any = bytearray()  # columns of subclasses have other types
        self.session_id = array("q")  # -1: none
        self.tenant = array("i")  # index in _tenants
        self.model = array("i")  # index in _models
        self.priority = array("q")
        self.arrival_s = array("d")
        self.prompt_tokens = array("q")
        self.pinned_tokens = array("q")
        self.samples = array("i")
        self._tenants = {"": 0}
        self._models = {"": 0}
        self.replica = array("i")
        self.status = array("b")
        self.reason: dict[int, str] = {}
        self.scheduled_s = array("d")
        self.first_token_s = array("d")
        self.last_token_s = array("d")
        self.finished_s = array("d")
        self.output_tokens = array("q")
        self.longest_tokens = array("q")
        self.preemptions = array("i")
        self.cached_tokens = array("q")
        self.prefill_iterations = array("q")
        self.attempts = array("i")  # number of times that it was sent to a replica
        self.lost_tokens = array("q")
        self.gateway_s = array("d")  # seconds held by the gateway, or between an attempt and its retry
        self.prefill_replica = array("i")  # prefill replica if another one decodes, else -1
        self.kv_transfer_s = array("d")  # duration of the KV transfer from the prefill replica
        self.kv_transfer_bytes = array("d")
        self.tries = array("i")  # number of times that its client sent it
        self.num_lost_first_tokens = 0
        self.num_crash_tokens = 0  # the lost tokens that were lost in crashes
        self.num_resends = 0
        self.num_resumed = 0  # resends that continued after the streamed tokens
        self.num_recomputed_tokens = 0  # tokens recomputed because their KV was lost in a crash
        self.lost_kv: dict[int, int] = {}  # by request id, until it is scheduled again: lost tokens
        self.held_back: set[int] = set()  # ids of requests whose latest token is emitted with the KV
        self.failed_attempts: Counter[str] = Counter()

    def schedule(self, seq: Sequence, now: float) -> None:
        """Records that a request is scheduled, possibly for the first time."""
        request_id = seq.request_id
        if isnan(self.scheduled_s[request_id]):
            self.scheduled_s[request_id] = now
            self.cached_tokens[request_id] = seq.num_found
        if self.lost_kv:
            self.num_recomputed_tokens += max(0, self.lost_kv.pop(request_id, 0) - seq.num_found)

    def lose_kv(self, request_id: int, num_tokens: int) -> None:
        """Records that a crash has lost the KV of num_tokens tokens."""
        num_tokens = max(num_tokens, self.lost_kv.get(request_id, 0))
        if num_tokens:
            self.lost_kv[request_id] = num_tokens

    def arrive(self, request: Request) -> None:
        """Opens the row of a request."""
        request_id, arrival_s, prompt, _, priority, tenant, session_id, _, _, branching, _, model = request
        while request_id >= len(self.has_arrived):
            self._append_empty_rows(1024)
        self.has_arrived[request_id] = True
        self.arrival_s[request_id] = arrival_s
        self.prompt_tokens[request_id] = prompt.num_tokens
        if session_id is not None:
            self.session_id[request_id] = session_id
        if tenant:
            self.tenant[request_id] = self._tenants.setdefault(tenant, len(self._tenants))
        if model:
            self.model[request_id] = self._models.setdefault(model, len(self._models))
        if priority:
            self.priority[request_id] = priority
        if prompt.num_pinned:
            self.pinned_tokens[request_id] = prompt.num_pinned
        if branching is not None:
            self.samples[request_id] = branching.width

    def _append_empty_rows(self, num_rows: int) -> None:
        for name, empty in EMPTY_ROW.items():
            getattr(self, name).extend([empty] * num_rows)

    def clear(self, request_id: int) -> None:
        """Empties the row of a request that has ended, so that a new request can have its id."""
        for name, empty in EMPTY_ROW.items():
            getattr(self, name)[request_id] = empty
        self.reason.pop(request_id, None)
        self.lost_kv.pop(request_id, None)
        self.held_back.discard(request_id)

    def copied(self) -> RequestLog:
        """Returns a copy of the log."""
        made = RequestLog()
        for name in EMPTY_ROW:
            setattr(made, name, getattr(self, name)[:])
        for name in _OTHERS:
            setattr(made, name, copy(getattr(self, name)))
        return made

    @property
    def num_bytes(self) -> int:
        """Memory of the log, bytes."""
        return len(self.has_arrived) * ROW_BYTES + len(self.reason) * REASON_BYTES

    def first_token(self, request_id: int, now: float) -> None:
        """Records the first token of a request that another replica continues."""
        self.first_token_s[request_id] = self.last_token_s[request_id] = now
        self.output_tokens[request_id] = self.longest_tokens[request_id] = 1

    def next_token(self, request_id: int, now: float) -> float:
        """Records a later token of such a request; returns the time of the previous token, s."""
        since_s = self.last_token_s[request_id]
        self.last_token_s[request_id] = now
        self.output_tokens[request_id] += 1
        self.longest_tokens[request_id] += 1
        return since_s

    def send(self, request_id: int, replica: int) -> None:
        """Records that a request is sent to a replica."""
        self.replica[request_id] = replica
        self.attempts[request_id] += 1

    def begin_try(self, request_id: int, number: int) -> None:
        """Records that a client sends a request for the number-th time."""
        self.tries[request_id] = number

    def fail(self, reason: str) -> None:
        """Counts a failed attempt of a client, which may retry."""
        self.failed_attempts[reason] += 1

    def hold(self, request_id: int, held_s: float) -> None:
        """Adds to the time for which no replica had a request."""
        self.gateway_s[request_id] += held_s

    def abandon(self, request_id: int, now: float) -> None:
        """Closes the row of a request that its client abandoned while no replica had it."""
        self.status[request_id] = Status.aborted
        self.finished_s[request_id] = now

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Closes the row of a request that was rejected."""
        self.status[request_id] = Status.rejected
        self.reason[request_id] = reason
        self.finished_s[request_id] = now

    def end(self, seq: Sequence, status: Status, last_token_s: float, now: float) -> None:
        """Closes the row of a sequence that has ended."""
        request_id = seq.request_id
        self.status[request_id] = status
        if seq.finish_reason is _LENGTH:
            self.reason[request_id] = "length"
        self.finished_s[request_id] = now
        self.record_progress(seq, last_token_s)

    def forget_kv_transfer(self, request_id: int) -> None:
        """Resets the KV transfer of a request, and the token that was held back for it."""
        self.held_back.discard(request_id)
        self.prefill_replica[request_id] = -1
        self.kv_transfer_s[request_id] = NAN
        self.kv_transfer_bytes[request_id] = 0.0

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Resets the output of a request that restarts after a crash or a timeout of its client."""
        self.status[request_id] = Status.unfinished
        self.reason.pop(request_id, None)
        if not isnan(self.first_token_s[request_id]):
            self.num_lost_first_tokens += self.samples[request_id]
            self.lost_tokens[request_id] += self.output_tokens[request_id]
            if in_crash:
                self.num_crash_tokens += self.output_tokens[request_id]
        for times_s in (self.scheduled_s, self.first_token_s, self.last_token_s, self.finished_s):
            times_s[request_id] = NAN
        for counts in (
            self.output_tokens,
            self.longest_tokens,
            self.preemptions,
            self.cached_tokens,
            self.prefill_iterations,
        ):
            counts[request_id] = 0

    def record_progress(self, seq: Sequence, last_token_s: float) -> None:
        """Records the output tokens of a sequence so far, without a token that is held back."""
        request_id = seq.request_id
        self.preemptions[request_id] = seq.num_preemptions
        if isnan(self.first_token_s[request_id]):
            return
        num_unseen = request_id in self.held_back
        if seq.branches is None:
            num_longest = num_emitted = seq.num_known - self.prompt_tokens[request_id]
        else:
            num_longest, num_emitted = seq.num_output_tokens, seq.num_emitted_tokens
        self.last_token_s[request_id] = last_token_s
        self.output_tokens[request_id] = num_emitted - num_unseen
        self.longest_tokens[request_id] = num_longest - num_unseen

    def table(self) -> Table:
        """Returns one row per request, by request id; times in seconds, NaN for events that did not occur.

        samples: number of samples (n of the API). output_tokens: sum over the samples; longest_tokens: the
        longest sample. tries: number of times that its client sent it; attempts: number of times that it was
        sent to a replica; lost_tokens: output tokens before a crash or a timeout, in none of the other
        columns. wait_gateway_s: held by the gateway, or between an attempt and its retry. prefill_replica:
        the replica of the prefill if another one decodes, else -1; kv_transfer_s, kv_transfer_bytes: the KV
        transfer, from slot and blocks to the last byte. The log is dropped column by column, because both
        together would need twice the memory.
        """

        def dropped(values: array[Any]) -> NDArray[Any]:
            of_requests = np.frombuffer(values, values.typecode)[ids]
            del values[:]
            return of_requests

        ids = np.flatnonzero(np.frombuffer(self.has_arrived, np.bool_))
        return self._table_of(ids, dropped)

    def _table_of(self, ids: NDArray[np.int64], column: Callable[[Any], NDArray[Any]]) -> Table:
        """Returns the rows of some requests. column: returns their values of a column of the log."""
        names = np.array([status.name for status in Status], dtype=object)
        tenants, models = (np.array([*found], dtype=object) for found in (self._tenants, self._models))
        return Table(
            {
                "request_id": ids,
                "session_id": column(self.session_id),
                "tenant": tenants[column(self.tenant)],
                "model": models[column(self.model)],
                "priority": column(self.priority),
                "replica": column(self.replica),
                "status": names[column(self.status)],
                "reason": np.array([self.reason.get(i, "") for i in ids.tolist()], dtype=object),
                "arrival_s": column(self.arrival_s),
                "scheduled_s": column(self.scheduled_s),
                "first_token_s": column(self.first_token_s),
                "last_token_s": column(self.last_token_s),
                "finished_s": column(self.finished_s),
                "prompt_tokens": column(self.prompt_tokens),
                "pinned_tokens": column(self.pinned_tokens),
                "cached_tokens": column(self.cached_tokens),
                "output_tokens": column(self.output_tokens),
                "longest_tokens": column(self.longest_tokens),
                "samples": column(self.samples).astype(np.int64),
                "preemptions": column(self.preemptions),
                "prefill_iterations": column(self.prefill_iterations),
                "tries": column(self.tries),
                "attempts": column(self.attempts),
                "lost_tokens": column(self.lost_tokens),
                "wait_gateway_s": column(self.gateway_s),
                "prefill_replica": column(self.prefill_replica),
                "kv_transfer_s": column(self.kv_transfer_s),
                "kv_transfer_bytes": column(self.kv_transfer_bytes),
            }
        )


ROW_BYTES: Final[int] = (
    sum(getattr(RequestLog(), name).itemsize for name in EMPTY_ROW if name != "has_arrived") + 1
)
"""Memory of a row of the log."""
