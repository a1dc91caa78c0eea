"""Requests as columns, for readers that need only a part of many requests.

A source with a method `chunks` yields its requests as chunks of several thousand rows. A reader selects rows
by the columns, and only those become Python objects:

    for chunk in chunks_of(source):
        mine = chunk.where(chunk.request_id % num_shards == shard)
        yield from mine.arrivals()

`PartOfSource` is this loop as a source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice, repeat
from math import inf, isnan
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from policies.core.request import Branching, Prompt, Request, Segment
from sim.workload.base import Arrival, Source, SourceAround, WorkloadNotes
from sim.workload.distributions import BoolArray, FloatArray, IntArray, clip_to_context

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


ROWS = 4096
"""Number of rows per chunk, which limits the Python objects created at once."""
NO_SESSION = -1

ObjectArray = npt.NDArray[np.object_]
Row = TypeVar("Row", bound=tuple[Any, ...])
Columns = TypeVar("Columns", bound="DataclassInstance")


class Common(NamedTuple):
    """Settings shared by all requests of a source.

    The fields of a request follow from them and its columns.
    """

    max_tokens: int | Literal["exact"] | None = None
    """Limit that clients set on their outputs; exact: the output tokens of each request."""
    deadlines_s: tuple[float | None, ...] = ()
    """Deadline of each priority, see `due_s`."""
    branching: Branching | None = None
    segments: Callable[[Any, int], tuple[Segment, ...]] | None = None
    """Computes the content of a prompt from its entry in `Chunk.content` and its tokens; None: no content."""


NOTHING_COMMON = Common()


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Requests of a source in order of arrival; every column is [N]."""

    request_id: IntArray
    at_s: FloatArray
    """Time at which the request reaches the service."""
    prompt_tokens: IntArray
    output_tokens: IntArray
    """True output length; of the longest sample if there are several."""
    priority: IntArray | None = None
    """None: all are 0."""
    deadline_s: FloatArray | None = None
    """Time at which the client needs the output, nan: none; None: it follows from `Common.deadlines_s`."""
    session_id: IntArray | None = None
    """NO_SESSION: no session; None: no request has one."""
    tenant: ObjectArray | None = None
    """Texts; None: all are empty."""
    model: ObjectArray | None = None
    """Model names, or None for the only model; None: no request names one."""
    samples_NW: IntArray | None = None
    """Output tokens of each sample if they differ."""
    content: npt.NDArray[Any] | None = None
    """Names of the contents of prompts, which `Common.segments` turns into segments."""
    made: ObjectArray | None = None
    """The requests as `Arrival`s, if the source has made them already; `arrivals` returns these."""
    common: Common = NOTHING_COMMON

    def __len__(self) -> int:
        return len(self.request_id)

    def where(self, rows: BoolArray | IntArray | slice) -> Chunk:
        """Returns the chunk of the selected rows: a mask [N], row numbers or a slice."""
        return rows_where(self, rows)

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the rows as `Arrival`s, in order of arrival."""
        if self.made is not None:
            return iter(self.made.tolist())
        common, arrival_s, outputs = self.common, self.at_s.tolist(), self.output_tokens.tolist()
        priorities = [0] * len(self) if self.priority is None else self.priority.tolist()
        requests = rows_of(
            Request,
            self.request_id.tolist(),
            arrival_s,
            self._prompts(),
            outputs if common.max_tokens == "exact" else repeat(common.max_tokens),
            priorities,
            repeat("") if self.tenant is None else self.tenant.tolist(),
            self._sessions(),
            self._deadlines(),
            repeat(None),
            repeat(common.branching),
            repeat(None),
            repeat(None) if self.model is None else self.model.tolist(),
        )
        samples: Iterable[tuple[int, ...]] = repeat(())
        if self.samples_NW is not None:
            samples = map(tuple, self.samples_NW.tolist())
        return rows_of(Arrival, requests, outputs, samples, repeat(None), repeat(None))

    def due_s(self) -> FloatArray | None:
        """Returns the deadline of each request in seconds [N], nan: none; None: no request has one."""
        if self.deadline_s is not None or not self.common.deadlines_s:
            return self.deadline_s
        after_s = np.array([np.nan if one is None else one for one in self.common.deadlines_s])
        priorities = np.zeros(len(self), np.int64) if self.priority is None else self.priority
        deadline_s: FloatArray = self.at_s + after_s[priorities]
        return deadline_s

    def _deadlines(self) -> Iterable[float | None]:
        """Yields the deadline of each row, in seconds of simulated time; None: it has none."""
        deadline_s = self.due_s()
        if deadline_s is None:
            return repeat(None)
        return (None if isnan(one) else one for one in deadline_s.tolist())

    def _prompts(self) -> Iterator[Prompt]:
        """Yields the prompt of each row, with its length in tokens and its contents."""
        prompt_tokens: list[int] = self.prompt_tokens.tolist()
        contents: Iterable[tuple[Segment, ...]] = repeat(())
        if self.content is not None and self.common.segments is not None:
            contents = map(self.common.segments, self.content.tolist(), prompt_tokens)
        return rows_of(Prompt, prompt_tokens, contents, repeat(0))

    def _sessions(self) -> Iterable[int | None]:
        """Yields the number of the session of each row; None: it belongs to none."""
        if self.session_id is None:
            return repeat(None)
        return (None if session == NO_SESSION else session for session in self.session_id.tolist())


@runtime_checkable
class ChunkedSource(Protocol):
    """A source that yields its open-loop requests as columns, in constant memory if it can."""

    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests of `arrivals()`, in the same order; every call starts again."""
        ...


def chunks_of(source: Source, until_s: float = inf) -> Iterator[Chunk]:
    """Returns the open-loop requests of any source as chunks.

    A source without columns creates its requests chunk by chunk. until_s: end of the run; such a source
    creates only one later request, as in a run of one process.
    """
    if isinstance(source, ChunkedSource):
        return source.chunks()
    return chunks_of_made(_up_to(until_s, source.arrivals()))


def chunks_of_made(arrivals: Iterator[Arrival]) -> Iterator[Chunk]:
    """Yields existing request objects as chunks."""
    while made := list(islice(arrivals, ROWS)):
        requests = [arrival.request for arrival in made]
        sessions = [NO_SESSION if one.session_id is None else one.session_id for one in requests]
        yield Chunk(
            request_id=np.array([one.request_id for one in requests], np.int64),
            at_s=np.array([arrival.at_s for arrival in made]),
            prompt_tokens=np.array([one.prompt.num_tokens for one in requests], np.int64),
            output_tokens=np.array([arrival.num_output_tokens for arrival in made], np.int64),
            priority=np.array([one.priority for one in requests], np.int64),
            session_id=np.array(sessions, np.int64),
            tenant=objects([one.tenant for one in requests]),
            model=objects([one.model for one in requests]),
            made=objects(made),
        )


class OpenLoopSource(ABC):
    """A source whose requests are columns and do not depend on each other."""

    is_open_loop = True

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests, in order of arrival; every call starts again."""

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the requests one by one."""
        return arrivals_of(self.chunks())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns no requests: there are no follow-ups."""
        return ()


class PartOfSource(SourceAround):
    """The open-loop requests of a source selected by `chooses`, with their ids in the whole traffic.

    chooses: returns a mask [N] of the rows of a chunk. It must not split a conversation, because the
    follow-ups of a request come from the source.
    """

    def __init__(self, source: Source, chooses: Callable[[Chunk], BoolArray]) -> None:
        """Creates the part. Its notes are the source's."""
        super().__init__(source)
        self.num_requests = self.last_arrival_s = None
        self._chooses = chooses

    def chunks(self) -> Iterator[Chunk]:
        """Yields the selected rows of each chunk."""
        for chunk in chunks_of(self._source):
            yield chunk.where(self._chooses(chunk))

    def arrivals(self) -> Iterator[Arrival]:
        return arrivals_of(self.chunks())


def arrivals_of(chunks: Iterable[Chunk]) -> Iterator[Arrival]:
    """Yields the rows of all chunks as `Arrival`s, in order of arrival."""
    return chain.from_iterable(chunk.arrivals() for chunk in chunks)


def due_s(arrival_s: float, priority: int, deadlines_s: tuple[float | None, ...]) -> float | None:
    """Returns the deadline of a request, deadlines_s[priority] after its arrival; None: no deadline."""
    deadline_s = deadlines_s[priority] if deadlines_s else None
    return None if deadline_s is None else arrival_s + deadline_s


def rows_of(kind: type[Row], *columns: Iterable[Any]) -> Iterator[Row]:
    """Yields a named tuple per row, from one column per field, up to the end of the shortest column.

    They are created without a call of Python code for each, for speed.
    """
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=False))


def rows_where(columns: Columns, rows: BoolArray | IntArray | slice) -> Columns:
    """Returns a dataclass of columns with the selected rows: a mask [N], row numbers or a slice."""
    found = {field.name: getattr(columns, field.name) for field in fields(columns)}
    selected: dict[str, Any] = {
        name: column[rows] for name, column in found.items() if isinstance(column, np.ndarray)
    }
    return replace(columns, **selected)


def objects(values: Sequence[Any]) -> ObjectArray:
    """Returns an array [N] of Python objects, also of tuples."""
    return np.fromiter(values, np.object_, len(values))


def _up_to(until_s: float, arrivals: Iterator[Arrival]) -> Iterator[Arrival]:
    """Yields the arrivals up to the first that is later than until_s."""
    for arrival in arrivals:
        yield arrival
        if arrival.at_s > until_s:
            return


SegmentsOfRow = Callable[[int, int], tuple[Segment, ...]]  # (row, prompt tokens) -> content of the prompt


class TableSource(OpenLoopSource):
    """Creates one request per row of a table; there are no follow-up requests.

    All arrays are [N] and sorted by arrival_s; the row number is the request id. priorities None: all 0.
    max_tokens exact: the output tokens of each request. deadlines_s: see `due_s`. branching: the same for all
    requests. samples_NW: output tokens of each sample if their lengths differ; output_tokens is the longest.
    tenants, session_ids None: requests have none.
    """

    def __init__(
        self,
        *,
        arrival_s: FloatArray,
        prompt_tokens: IntArray,
        output_tokens: IntArray,
        notes: WorkloadNotes,
        priorities: IntArray | None = None,
        segments: SegmentsOfRow | None = None,
        max_tokens: int | Literal["exact"] | None = None,
        deadlines_s: tuple[float | None, ...] = (),
        patience_s: float | None = None,
        branching: Branching | None = None,
        samples_NW: IntArray | None = None,
        tenants: ObjectArray | None = None,
        session_ids: IntArray | None = None,
    ):
        self.num_requests: int | None = len(arrival_s)
        self.last_arrival_s: float | None = float(arrival_s[-1]) if len(arrival_s) else None
        self.patience_s = patience_s
        self.notes = notes
        numbers = np.arange(len(arrival_s))
        self._whole = Chunk(
            request_id=numbers,
            at_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            priority=priorities,
            session_id=session_ids,
            tenant=tenants,
            samples_NW=samples_NW,
            content=None if segments is None else numbers,
            common=Common(max_tokens, deadlines_s, branching, segments),
        )

    @classmethod
    def clipped(
        cls, *, prompt_tokens: IntArray, output_tokens: IntArray, max_model_len: int, **others: Any
    ) -> TableSource:
        """Creates requests that are shortened to the context, and records their number.

        others: see `__init__`.
        """
        prompts, outputs, are_clipped = clip_to_context(prompt_tokens, output_tokens, max_model_len)
        notes = WorkloadNotes(num_clipped=int(np.count_nonzero(are_clipped)))
        return cls(prompt_tokens=prompts, output_tokens=outputs, notes=notes, **others)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the rows of the table."""
        starts = range(0, len(self._whole), ROWS)
        return (self._whole.where(slice(start, start + ROWS)) for start in starts)


def sized_segments(content: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
    """Returns the content of a prompt. content: the number of tokens per id, and the ids; empty: none."""
    return block_segments(content[1:], num_tokens, content[0]) if content else ()


def block_segments(content_ids: tuple[int, ...], num_tokens: int, block: int) -> tuple[Segment, ...]:
    """Returns the content of num_tokens tokens, of which each id names `block`; the last may name fewer."""
    full, rest = divmod(num_tokens, block)
    whole = tuple(rows_of(Segment, content_ids[:full], repeat(block)))
    return whole + tuple(Segment(content_id, rest) for content_id in content_ids[full : full + 1] if rest)
