"""The requests of a session and the times of their tokens, up to a limit of memory.

It keeps 8 bytes for each token, 700 for each request and 12 for each 16 tokens of its prompt.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from math import isnan

import numpy as np
import pandas as pd

from policies.core.request import Request
from sim.records.requests import RequestLog, Status
from sim.records.table import AnyTable
from sim.workload.recording import TrafficLog

REQUEST_BYTES = 700
SEGMENT_BYTES = 12

_LOG = logging.getLogger("windtunnel.serve")


class RequestRecords:
    """Records requests from now on. max_bytes: memory after which nothing more is recorded. now: seconds."""

    def __init__(self, max_bytes: float, now: Callable[[], float]) -> None:
        self._bytes_left = max_bytes
        self._now = now
        self.start_s = now()
        self.log = RequestLog()
        self._traffic = TrafficLog()
        self.times_s: dict[int, array[float]] = {}  # of the tokens of each request's first output
        self.full_s: float | None = None
        """Time, since the start, at which the memory was full; None: everything is recorded."""

    def __contains__(self, request_id: int) -> bool:
        return request_id in self.times_s

    def __len__(self) -> int:
        return len(self.times_s)

    def has_room(self, num_bytes: int) -> bool:
        """Takes memory; returns false, for good, once it is full."""
        if self.full_s is not None:
            return False
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            self.full_s = self._now() - self.start_s
            _LOG.warning("The memory for records is full; the run folder will end here.")
        return self.full_s is None

    def arrive(self, request: Request, max_tokens: int) -> bool:
        """Records a request with its most output tokens; returns false if there is no memory left."""
        if not self.has_room(REQUEST_BYTES + SEGMENT_BYTES * len(request.prompt.segments)):
            return False
        self._traffic.add(request, max_tokens, request.arrival_s)
        self.log.arrive(request)
        self.log.begin_try(request.request_id, 1)
        self.times_s[request.request_id] = array("d")
        return True

    def emitted(self, request_id: int, num_tokens: int, now_s: float) -> bool:
        """Records new tokens of the first output of a request; returns whether they are recorded."""
        times_s = self.times_s.get(request_id)
        if times_s is None or not self.has_room(8 * num_tokens):
            return False
        times_s.extend([now_s] * num_tokens)
        return True

    def end(self, request_id: int, status: Status, now_s: float, reason: str = "") -> None:
        """Records the end of a request, unless it has ended before."""
        if request_id in self.times_s and self.log.status[request_id] == Status.unfinished:
            self.log.status[request_id] = status
            self.log.finished_s[request_id] = now_s
            if reason:
                self.log.reason[request_id] = reason

    def end_s(self) -> float:
        """Returns when the records end, in seconds from the start."""
        return self._now() - self.start_s if self.full_s is None else self.full_s

    def table(self, end_s: float) -> AnyTable:
        """Returns the requests up to end_s, with times from the start; call it once, after `gaps`."""
        log, start_s = self.log, self.start_s
        for request_id, times_s in self.times_s.items():
            if times_s:
                log.first_token_s[request_id], log.last_token_s[request_id] = times_s[0], times_s[-1]
            log.longest_tokens[request_id] = len(times_s)
            log.output_tokens[request_id] = len(times_s) * log.samples[request_id]
        self._note_ends(start_s + end_s)
        requests = log.table()
        moments = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
        return requests.assign(**{name: requests[name] - start_s for name in moments})

    def _note_ends(self, end_s: float) -> None:
        """Notes the output lengths of complete requests, and when the others were aborted."""
        log = self.log
        for request_id, times_s in self.times_s.items():
            if log.status[request_id] == Status.finished:
                self._traffic.set_output(request_id, max(1, len(times_s)))
            else:
                finished_s = log.finished_s[request_id]
                self._traffic.abort(request_id, end_s if isnan(finished_s) else finished_s)

    def traffic_table(self, adapters: Mapping[str, int]) -> pd.DataFrame:
        """Returns the requests for `workload=recording`; call it after `table`. adapters: ranks by name.

        The output of a request that was aborted would have had as many tokens as it allows at most.
        """
        return self._traffic.table(adapters, self.start_s)

    def gaps(self) -> pd.DataFrame:
        """Returns the gaps between the tokens of each request, in the columns of `RunRecords.own_gaps`.

        The hypotheses of a beam search have tokens at the same times.
        """
        log = self.log
        ids, replicas = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        since_s, end_s = [np.zeros(0)], [np.zeros(0)]
        for request_id, times_s in self.times_s.items():
            moments = np.frombuffer(times_s, np.float64) - self.start_s if times_s else np.zeros(0)
            num_outputs = log.samples[request_id]
            num_gaps = max(0, len(moments) - 1) * num_outputs
            ids.append(np.full(num_gaps, request_id))
            replicas.append(np.full(num_gaps, max(0, log.replica[request_id]), np.int32))
            since_s.append(np.repeat(moments[:-1], num_outputs))
            end_s.append(np.repeat(moments[1:], num_outputs))
        return pd.DataFrame(
            {
                "request_id": np.concatenate(ids),
                "replica": np.concatenate(replicas),
                "since_s": np.concatenate(since_s),
                "end_s": np.concatenate(end_s),
            }
        )
