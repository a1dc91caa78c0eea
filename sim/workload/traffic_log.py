"""Keeps the requests of a live session as they came, so that `workload=recording` can repeat them.

A row has everything that an engine sees of a request, with the content of its prompt, the true length of its
output, and the moments at which it came and at which its client left. One request takes about 150 bytes, and
12 more for each segment of its prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import nan

import numpy as np
import pandas as pd

from policies.core.request import Request

FILE = "recording.parquet"
REMARKS = "windtunnel_remarks"
"""Key of the remarks in the attributes of the table."""
NONE = -1
"""Stands for no limit and for no content id."""

ROW_BYTES = 400
"""Memory of a request without its contents, about."""
SEGMENT_BYTES = 12


class TrafficLog:
    """The requests of one session; times in seconds since its start."""

    def __init__(self) -> None:
        self._row_of: dict[int, int] = {}
        self._arrival_s = array("d")
        self._time_s = array("d")
        self._aborted_s = array("d")
        self._deadline_s = array("d")
        self._prompt_tokens = array("q")
        self._output_tokens = array("q")
        self._max_tokens = array("q")
        self._priority = array("q")
        self._answer_id = array("q")
        self._tenant: list[str] = []
        self._model: list[str | None] = []
        self._adapter: list[str | None] = []
        self._contents: list[array[int]] = []
        self._content_tokens: list[array[int]] = []
        self._num_segments = 0
        self._remarks: dict[str, int] = {}

    def add(self, request: Request, num_output_tokens: int, time_s: float) -> None:
        """Adds a request, which reached the service at time_s. num_output_tokens: its true output length."""
        self._row_of[request.request_id] = len(self._tenant)
        self._arrival_s.append(request.arrival_s)
        self._time_s.append(time_s)
        self._aborted_s.append(nan)
        self._deadline_s.append(nan if request.deadline_s is None else request.deadline_s)
        self._prompt_tokens.append(request.prompt.num_tokens)
        self._output_tokens.append(num_output_tokens)
        self._max_tokens.append(NONE if request.max_tokens is None else request.max_tokens)
        self._priority.append(request.priority)
        self._answer_id.append(NONE if request.answer_id is None else request.answer_id)
        self._tenant.append(request.tenant)
        self._model.append(request.model)
        self._adapter.append(request.adapter)
        segments = request.prompt.segments
        self._num_segments += len(segments)
        self._contents.append(array("q", [content_id for content_id, _ in segments]))
        self._content_tokens.append(array("i", [num_tokens for _, num_tokens in segments]))

    @property
    def num_bytes(self) -> int:
        """Memory of the log, bytes, about."""
        return ROW_BYTES * len(self._tenant) + SEGMENT_BYTES * self._num_segments

    def time_s(self, request_id: int) -> float:
        """Returns the time at which a request reached the service, s."""
        return self._time_s[self._row_of[request_id]]

    def set_output(self, request_id: int, num_output_tokens: int) -> None:
        """Corrects the output length of a request that has ended otherwise than was known before."""
        self._output_tokens[self._row_of[request_id]] = num_output_tokens

    def abort(self, request_id: int, at_s: float) -> None:
        """Notes that the client of a request has left at at_s."""
        self._aborted_s[self._row_of[request_id]] = at_s

    def remark(self, event: str) -> None:
        """Counts an event of the session that a replay leaves out, such as "a cold start"."""
        self._remarks[event] = self._remarks.get(event, 0) + 1

    def table(self, ranks: Mapping[str, int], zero_s: float = 0.0) -> pd.DataFrame:
        """Returns one row per request, in the order in which they came.

        ranks: rank of each adapter that requests name. zero_s: start of the session on the clock of the
        requests; times in the table count from it.
        """
        table = pd.DataFrame(
            {
                "request_id": list(self._row_of),
                "arrival_s": self._arrival_s,
                "time_s": self._time_s,
                "aborted_s": self._aborted_s,
                "deadline_s": self._deadline_s,
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": self._output_tokens,
                "max_tokens": self._max_tokens,
                "priority": self._priority,
                "answer_id": self._answer_id,
                "tenant": self._tenant,
                "model": self._model,
                "adapter": self._adapter,
                "adapter_rank": [0 if name is None else ranks[name] for name in self._adapter],
                "contents": [np.array(ids, np.int64) for ids in self._contents],
                "content_tokens": [np.array(lengths, np.int64) for lengths in self._content_tokens],
            }
        )
        for name in ("arrival_s", "time_s", "aborted_s", "deadline_s"):
            table[name] -= zero_s
        table.attrs[REMARKS] = self._remarks
        return table.sort_values("time_s", kind="stable", ignore_index=True)
