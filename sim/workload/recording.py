"""Repeats the traffic of a live session: the requests that `windtunnel serve` has written to its run folder.

Requests have the arrivals, prompts, shared prefixes, limits and output lengths of the session, and clients
give up when they did. With the settings of the session and a simulated fleet, the run is the session again;
with others, it says what the same clients would have seen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from policies.adapters.registry import Adapter
from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, chunks_of_made
from sim.workload.distributions import IntArray
from sim.workload.lengths import BoolArray, clip_to_context
from sim.workload.recorded_session import Session, checked_session
from sim.workload.traffic_log import FILE, NONE

LENGTHS = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The requests of a live session.

    path: the run folder of `windtunnel serve`, or its recording.parquet. aborts: clients give up when they
    did; otherwise they wait for their outputs. Raises ValueError for a file that cannot be read.
    """

    path: Path
    aborts: bool = True

    def __post_init__(self) -> None:
        path = Path(self.path).expanduser()
        object.__setattr__(self, "path", path / FILE if path.is_dir() else path)
        if not self.path.is_file():
            raise ValueError(
                f"path={path}: has no {FILE}; give a folder that `windtunnel serve` has written, with "
                "output.tables=true"
            )
        _ = self._session

    @cached_property
    def _session(self) -> Session:
        return checked_session(self.path)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The LoRA adapters that requests name, by name."""
        return tuple(Adapter(name=name, rank=rank) for name, rank in sorted(self._session.ranks.items()))

    @property
    def models(self) -> dict[str, float]:
        """The models that requests name, with their shares of the requests."""
        counts = self._session.models
        return {name: count / counts.total() for name, count in sorted(counts.items())}

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the traffic; the seed has no effect. Longer requests than the context are clipped."""
        return RecordedSource(self._session, max_model_len, aborts=self.aborts)


class RecordedSource:
    """The requests of a recording, which are read again whenever they are needed."""

    is_open_loop = True

    def __init__(self, session: Session, max_model_len: int, *, aborts: bool) -> None:
        """Counts the requests that are clipped. aborts: see `Recording`."""
        self.num_requests: int | None = session.num_requests
        self.last_arrival_s: float | None = session.last_s
        self.patience_s: float | None = None
        self.notes = WorkloadNotes()
        self._session = session
        self._max_model_len = max_model_len
        self._aborts = aborts
        for table in session.tables(LENGTHS):
            self.notes.num_clipped += int(np.count_nonzero(self._clipped(table)[2]))
        self.notes.remarks += [
            f"The session had {event} ({count:,}), which this run does not repeat."
            for event, count in session.remarks.items()
        ]

    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests. Raises ChangedTraceError if the file has changed since it was checked."""
        return chunks_of_made(self.arrivals())

    def arrivals(self) -> Iterator[Arrival]:
        for table in self._session.tables():
            prompts, outputs, _ = self._clipped(table)
            rows = zip(table.to_dict("records"), prompts.tolist(), outputs.tolist(), strict=True)
            for row, prompt, output in rows:
                yield self._arrival(row, prompt, output)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()

    def _clipped(self, table: pd.DataFrame) -> tuple[IntArray, IntArray, BoolArray]:
        prompts, outputs = (table[name].to_numpy() for name in LENGTHS)
        return clip_to_context(prompts, outputs, self._max_model_len)

    def _arrival(self, row: dict[Hashable, Any], prompt: int, output: int) -> Arrival:
        segments = tuple(_segments(row["contents"], row["content_tokens"], prompt))
        limit = None if row["max_tokens"] == NONE else min(row["max_tokens"], self._max_model_len - prompt)
        request = Request(
            request_id=row["request_id"],
            arrival_s=row["arrival_s"],
            prompt=Prompt(prompt, segments),
            max_tokens=limit,
            priority=row["priority"],
            tenant=row["tenant"] or "",
            deadline_s=None if isnan(row["deadline_s"]) else row["deadline_s"],
            answer_id=None if row["answer_id"] == NONE else row["answer_id"],
            adapter=row["adapter"],
            model=row["model"],
        )
        gives_up_s = None if isnan(row["aborted_s"]) or not self._aborts else row["aborted_s"]
        return Arrival(request, output, time_s=row["time_s"], gives_up_s=gives_up_s)


def _segments(contents: Sequence[int], lengths: Sequence[int], num_tokens: int) -> Iterator[Segment]:
    """Yields the segments of the first num_tokens tokens of a prompt."""
    for content_id, length in zip(contents, lengths, strict=True):
        if num_tokens < 1:
            return
        yield Segment(int(content_id), min(int(length), num_tokens))
        num_tokens -= int(length)
