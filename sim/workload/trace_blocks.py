"""Rows of a trace, one by one and as blocks of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sim.workload.chunks import NO_SESSION, ROWS, ObjectArray, objects, rows_where
from sim.workload.distributions import FloatArray, IntArray
from sim.workload.lengths import BoolArray

NUMBERS = 4
"""Numbers of a row without contents."""
MAX_VALUES = 1 << 19
"""Numbers of a block from which on it gets no more rows, however few they are: some 20 MB."""


class TraceRow(NamedTuple):
    """One request of a trace, already checked: lengths >= 1, arrival_s finite."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    content_ids: tuple[int, ...] = ()  # content ids of the prompt's blocks, if the trace has them
    remark: str = ""  # note for the user on how the times were read; at most one row has it
    skip_reason: str = ""  # reason why the row is counted but not replayed; its lengths are not checked
    tenant: str = ""
    session_id: int = NO_SESSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive rows of a trace; every column is [N], with the fields of `TraceRow`."""

    line: IntArray
    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    content_ids: ObjectArray | None = None
    """Tuples; None: all are empty."""
    skip_reason: ObjectArray | None = None
    """Texts; None: all rows are replayed."""
    tenant: ObjectArray | None = None
    """Texts; None: all are empty."""
    session_id: IntArray | None = None
    """None: no row has one."""
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.line)

    def num_values(self) -> IntArray:
        """Returns the number of numbers of each row, a measure of its memory, [N]."""
        ids = () if self.content_ids is None else self.content_ids
        values = np.full(len(self), NUMBERS)
        return values + np.fromiter(map(len, ids), np.int64) if len(ids) else values

    def where(self, rows: BoolArray | IntArray | slice) -> Block:
        """Returns the block of the selected rows: a mask [N], row numbers or a slice."""
        return rows_where(self, rows)

    def is_replayed(self) -> BoolArray:
        """Returns which rows are requests to replay [N]."""
        if self.skip_reason is None:
            return np.ones(len(self), np.bool_)
        return np.asarray(self.skip_reason == "", np.bool_)


def blocks_of_rows(rows: Iterator[TraceRow]) -> Iterator[Block]:
    """Yields rows as blocks. A ValueError of a row is raised after the rows before it."""
    while True:
        gathered: list[TraceRow] = []
        failure = None
        num_values, has_more = 0, False
        try:
            for row in rows:
                gathered.append(row)
                num_values += NUMBERS + len(row.content_ids)
                if has_more := len(gathered) == ROWS or num_values >= MAX_VALUES:
                    break
        except ValueError as error:
            failure = error
        if gathered:
            yield _block(gathered)
        if failure is not None:
            raise failure
        if not has_more:
            return


def joined(blocks: Sequence[Block]) -> Block:
    """Returns the rows of several blocks as one block without remarks."""

    def column(name: str, empty: object, kind: type = np.object_) -> npt.NDArray[Any] | None:
        columns = [getattr(block, name) for block in blocks]
        if all(one is None for one in columns):
            return None
        filled = [
            np.fromiter([empty] * len(block), kind) if one is None else one
            for one, block in zip(columns, blocks, strict=True)
        ]
        return np.concatenate(filled)

    def numbers(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(block, name) for block in blocks])

    return Block(
        line=numbers("line"),
        arrival_s=numbers("arrival_s"),
        prompt_tokens=numbers("prompt_tokens"),
        output_tokens=numbers("output_tokens"),
        content_ids=column("content_ids", ()),
        skip_reason=column("skip_reason", ""),
        tenant=column("tenant", ""),
        session_id=column("session_id", NO_SESSION, np.int64),
    )


def _block(rows: Sequence[TraceRow]) -> Block:
    lines, arrival_s, prompts, outputs, contents, remarks, reasons, tenants, sessions = zip(
        *rows, strict=True
    )
    session_id = np.array(sessions, np.int64)

    def checked(lengths: Iterable[int]) -> IntArray:
        """Returns lengths; those of skipped rows, which may be anything, as 0."""
        pairs = zip(lengths, reasons, strict=True)
        return np.array([0 if reason else length for length, reason in pairs], np.int64)

    return Block(
        line=np.array(lines, np.int64),
        arrival_s=np.array(arrival_s),
        prompt_tokens=checked(prompts),
        output_tokens=checked(outputs),
        content_ids=_unless_empty(contents),
        skip_reason=_unless_empty(reasons),
        tenant=_unless_empty(tenants),
        session_id=session_id if (session_id != NO_SESSION).any() else None,
        remarks=tuple(filter(None, remarks)),
    )


def _unless_empty(values: Iterable[object]) -> ObjectArray | None:
    listed = list(values)
    return objects(listed) if any(listed) else None
