"""Repeats the traffic of a live session: the requests that `windtunnel serve` has written to its run folder.

Requests have the arrivals, prompts, shared prefixes, limits and output lengths of the session, and clients
give up at the same times. With the settings of the session and a simulated fleet, the run reproduces the
session; with other settings, it shows the results for the same clients. `TrafficLog` stores the requests of a
live session in order. A row has everything that an engine sees of a request: the content of its prompt, the
true length of its output, and the times at which it arrived and its client left. One request takes about 150
bytes, plus 12 for each segment of its prompt.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from policies.adapters.serving import Adapter
from policies.core.request import Prompt, Request, Segment
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import ROWS, Chunk, OpenLoopSource, chunks_of_made
from sim.workload.distributions import MAX_ARRIVAL_S, MAX_TOKENS, BoolArray, IntArray, clip_to_context
from sim.workload.trace_columns import shown
from sim.workload.trace_files import require_file
from sim.workload.trace_source import ChangedTraceError, version_of
from sim.workload.trace_tables import batches_of

FILE = "recording.parquet"
REMARKS = "windtunnel_remarks"
"""Key of the remarks in the table's attributes."""
NONE = -1
"""Stands for no limit and for no content id."""

ROW_BYTES = 400
"""Approximate memory of a request without its contents."""
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
        """Corrects the output length of a request that has ended differently than expected."""
        self._output_tokens[self._row_of[request_id]] = num_output_tokens

    def abort(self, request_id: int, at_s: float) -> None:
        """Records that the client of a request left at at_s."""
        self._aborted_s[self._row_of[request_id]] = at_s

    def remark(self, event: str) -> None:
        """Counts an event of the session that a replay omits, such as "a cold start"."""
        self._remarks[event] = self._remarks.get(event, 0) + 1

    def table(self, ranks: Mapping[str, int], zero_s: float = 0.0) -> pd.DataFrame:
        """Returns one row per request, in the order of arrival.

        ranks: rank of each adapter named by requests. zero_s: start of the session on the clock of the
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


LEAST = {
    "request_id": 0,
    "prompt_tokens": 1,
    "output_tokens": 1,
    "max_tokens": NONE,
    "priority": -(1 << 62),
    "answer_id": NONE,
    "adapter_rank": 0,
}
"""Integer columns, with the smallest value of each."""
TIMES = ("arrival_s", "time_s", "aborted_s", "deadline_s")
MAY_BE_MISSING = ("aborted_s", "deadline_s")
TEXTS = ("tenant", "model", "adapter")
LISTS = ("contents", "content_tokens")
COLUMNS = (*LEAST, *TIMES, *TEXTS, *LISTS)
BUFFER_BYTES = 1 << 20
DAMAGE = (pa.ArrowException, OSError, ValueError, KeyError)
"""Errors of a file that is damaged or not a Parquet file."""
ATTRIBUTES = b"PANDAS_ATTRS"
"""Key under which pandas writes the attributes of a table."""


@dataclass(slots=True)
class Session:
    """A recording whose rows have been checked. ranks: of adapters; models: with their requests."""

    path: Path
    version: tuple[int, int] | None
    remarks: dict[str, int]
    num_requests: int = 0
    last_s: float = 0.0
    ranks: dict[str, int] = field(default_factory=dict)
    models: Counter[str] = field(default_factory=Counter)

    def tables(self, columns: Sequence[str] = COLUMNS) -> Iterator[pd.DataFrame]:
        """Yields the rows in batches. Raises ChangedTraceError if the file has changed."""
        try:
            if version_of(self.path) == self.version:
                for table in _tables(self.path, columns):
                    yield _converted(table)
        except ValueError as error:
            raise ChangedTraceError(f"{error}; the file has changed since it was checked") from None
        if version_of(self.path) != self.version:
            raise ChangedTraceError(f"{self.path}: has changed since it was checked; start the run again")


def checked_session(path: Path) -> Session:
    """Reads and checks a recording. Raises ValueError.

    Of several errors, it reports the first one in a check of complete columns, one after the other.
    """
    session = Session(path, version_of(path), _checked_remarks(path))
    failure: tuple[int, ValueError] | None = None
    ids: list[IntArray] = []
    id_check = 0
    for table in _tables(path, COLUMNS):
        for number, found in enumerate(_checks(table, session)):
            if failure is not None and number >= failure[0]:
                break
            if isinstance(found, ValueError):
                failure = number, found
                break
            if found is not None:
                ids.append(found)
                id_check = number
        session.num_requests += len(table)
    if failure is None or failure[0] > id_check:
        _check_repeated(path, ids)
    if failure is not None:
        raise failure[1]
    if not session.num_requests:
        raise ValueError(f"path={path}: expected at least one request, found none")
    return session


def _checks(table: pd.DataFrame, session: Session) -> Iterator[ValueError | IntArray | None]:
    """Checks the next rows of a session, and adds the adapters and models that they name.

    Yields the error or None of each check, in a fixed order; for request ids, which must be unique over all
    rows, yields the ids.
    """
    for name, least in LEAST.items():
        most = MAX_TOKENS if name.endswith("_tokens") else 1 << 62
        is_whole = pd.api.types.is_integer_dtype(table[name])
        yield None if is_whole else _wrong_type(table, session, name, "whole numbers")
        yield _first_wrong(table, session, name, table[name].between(least, most))
    for name in TIMES:
        is_number = pd.api.types.is_numeric_dtype(table[name])
        yield None if is_number else _wrong_type(table, session, name, "numbers")
        times_s = _as_times(table[name])
        is_right = times_s.between(0, MAX_ARRIVAL_S)
        if name in MAY_BE_MISSING:
            is_right |= times_s.isna()
        yield _first_wrong(table, session, name, is_right)
        table[name] = times_s
    for name in TEXTS:
        table[name] = _as_texts(table[name])
        yield _first_wrong(
            table, session, name, table[name].map(lambda text: text is None or isinstance(text, str))
        )
    has_adapter = table["adapter"].notna()
    yield _first_wrong(table, session, "adapter_rank", (table["adapter_rank"] >= 1) | ~has_adapter)
    for name, rank in zip(table["adapter"][has_adapter], table["adapter_rank"][has_adapter], strict=True):
        session.ranks.setdefault(name, int(rank))
    session.models.update(table["model"].dropna())
    yield table["request_id"].to_numpy(np.int64)
    at_s = table["time_s"].to_numpy()
    before_s = session.last_s if session.num_requests else at_s[0]
    session.last_s = float(at_s[-1])
    yield _first_wrong(table, session, "time_s", np.diff(at_s, prepend=before_s) >= 0)
    rows = zip(table["contents"], table["content_tokens"], table["prompt_tokens"], strict=True)
    yield _first_wrong(table, session, "contents", [_has_right_segments(*row) for row in rows])


def _has_right_segments(contents: Any, lengths: Any, prompt_tokens: int) -> bool:
    contents, lengths = np.asarray(contents), np.asarray(lengths)
    if contents.shape != lengths.shape or contents.ndim != 1:
        return False
    if not len(contents):
        return True
    if contents.dtype.kind != "i" or lengths.dtype.kind != "i":
        return False
    return bool(contents.min() >= 0 and lengths.min() >= 1 and lengths.sum() <= prompt_tokens)


def _wrong_type(table: pd.DataFrame, session: Session, name: str, rule: str) -> ValueError:
    return ValueError(f"path={session.path}: {name} must be {rule}, found {table[name].dtype}")


def _first_wrong(table: pd.DataFrame, session: Session, name: str, is_right: Any) -> ValueError | None:
    """Returns the error of the first invalid row among the next rows of a session."""
    wrong = np.flatnonzero(~np.asarray(is_right, np.bool_))
    return (
        _wrong_row(session.path, session.num_requests + wrong[0], name, table[name].iloc[wrong[0]])
        if len(wrong)
        else None
    )


def _wrong_row(path: Path, row: int, name: str, found: object) -> ValueError:
    return ValueError(f"path={path}: row {row}: {name}={shown(found)} is not what a server writes")


def _check_repeated(path: Path, ids: Sequence[IntArray]) -> None:
    """Raises ValueError for the first row with the request id of an earlier one."""
    in_order = np.concatenate([np.empty(0, np.int64), *ids])
    in_order.sort()
    if (in_order[1:] == in_order[:-1]).any():
        row = int(pd.Index(np.concatenate(ids)).duplicated().argmax())
        raise _wrong_row(path, row, "request_id", np.concatenate(ids)[row])


def _checked_remarks(path: Path) -> dict[str, int]:
    """Returns the remarks of a recording. Raises ValueError for a file without the columns of one."""
    require_file(path)
    try:
        schema = pq.read_schema(path)
        attributes = json.loads((schema.metadata or {}).get(ATTRIBUTES, b"{}"))
    except DAMAGE:
        raise _damaged(path) from None
    for name in COLUMNS:
        if schema.names.count(name) != 1:
            number = "no" if name not in schema.names else "more than one"
            raise ValueError(
                f"path={path}: has {number} column {name}; give a file that `windtunnel serve` wrote"
            )
    remarks = attributes.get(REMARKS, {}) if isinstance(attributes, dict) else None
    if not isinstance(remarks, dict) or not set(map(type, remarks.values())) <= {int}:
        raise ValueError(f"path={path}: has remarks that are not what a server writes")
    return remarks


def _tables(path: Path, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yields some columns of the rows, unchanged from the file. Raises ValueError."""
    try:
        with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            for batch in batches_of(file, columns, ROWS):
                if len(batch):
                    yield batch.to_pandas(ignore_metadata=True)
    except DAMAGE:
        raise _damaged(path) from None


def _damaged(path: Path) -> ValueError:
    return ValueError(f"path={path}: is not a whole parquet file; serve and record again")


def _converted(table: pd.DataFrame) -> pd.DataFrame:
    """Returns checked rows, with the types set by `_checks`."""
    changed = {name: _as_times(table[name]) for name in TIMES if name in table}
    changed |= {name: _as_texts(table[name]) for name in TEXTS if name in table}
    return table.assign(**changed)


def _as_times(column: pd.Series[Any]) -> pd.Series[Any]:
    return column.astype(float)


def _as_texts(column: pd.Series[Any]) -> pd.Series[Any]:
    """Returns a column whose missing values are None."""
    return column.astype(object).where(column.notna(), None)


LENGTHS = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The requests of a live session.

    path: the run folder of `windtunnel serve`, or its recording.parquet. aborts: whether clients give up at
    the recorded times; if not, they wait for their outputs. Raises ValueError for a file that cannot be read.
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


class RecordedSource(OpenLoopSource):
    """The requests of a recording, which are reread whenever needed."""

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
