"""Rows of a trace, one by one and as blocks of columns, and sorting them by time in constant memory.

Sorted runs are in a temporary file and are merged when they are read. Rows with equal times keep the order of
the file. The temporary file is in the folder that `tempfile` chooses (the environment variable TMPDIR names
another) and is deleted with the object, or when the process ends.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sim.workload.chunks import NO_SESSION, ROWS, ObjectArray, objects, rows_where
from sim.workload.distributions import BoolArray, FloatArray, IntArray

NUMBERS = 4
"""Count of numbers in a row without contents."""
MAX_VALUES = 1 << 19
"""Count of numbers at which a block is full, regardless of its rows: about 20 MB."""


RUN_VALUES = 1 << 21
"""Count of numbers in a run, which is sorted in memory: half a million rows without contents."""
VALUES_AT_ONCE = 1 << 13
"""Count of numbers per run in memory while runs are merged: 2,048 rows without contents."""
MAX_RUNS = 64
"""Number of runs merged at once; if there are more, groups of this size are first merged in a new file."""

SCHEMA = pa.schema(
    [
        ("line", pa.int64()),
        ("arrival_s", pa.float64()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("content_ids", pa.utf8()),  # a JSON list: the ids may have more than 64 bits
        ("skip_reason", pa.utf8()),
        ("tenant", pa.utf8()),
        ("session_id", pa.int64()),
    ]
)
TEXTS = ("content_ids", "skip_reason", "tenant")


class TraceRow(NamedTuple):
    """One request of a trace, already checked: lengths >= 1, arrival_s finite."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    content_ids: tuple[int, ...] = ()  # content ids of the prompt's blocks, if the trace has them
    remark: str = ""  # note on how the times were read; at most one row has it
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
        """Returns the count of numbers in each row, a measure of its memory, [N]."""
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
        """Returns lengths; 0 for skipped rows, whose lengths may be invalid."""
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


class SortedRows:
    """The rows of a trace in order of time. If the earliest is before 0 s, times count from it.

    This occurs with dates, which count from the first row of a file until the rows are sorted.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        """Sorts the rows. Raises ValueError if the temporary file cannot be written."""
        self._remarks: tuple[str, ...] = ()
        self._first_s = 0.0
        self._in_memory: Block | None = None  # all rows, if they are too few for a file
        self._runs: list[range] = []  # the batches of each run in the file
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._path = Path()
        is_done = False
        try:
            self._sort(blocks)
            is_done = True
        except OSError as error:
            raise ValueError(
                "the sorted rows of a trace cannot be written to the temporary folder "
                f"{tempfile.gettempdir()}: {error.strerror or error}; free space in it, or name another "
                "one in the environment variable TMPDIR"
            ) from None
        finally:
            if self._folder is not None and not is_done:
                self._folder.cleanup()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes for another process, which reads the file without deleting it."""
        return self.__dict__ | {"_folder": None}

    @property
    def is_readable(self) -> bool:
        """False if the temporary file was removed."""
        return not self._runs or self._path.exists()

    def copied_to(self, path: Path) -> SortedRows:
        """Returns the same rows in a file that is not deleted with them. Raises OSError."""
        rows = copy(self)
        rows._folder, rows._path = None, path
        if self._runs:
            shutil.copyfile(self._path, path)
        elif self._in_memory is not None:
            rows._in_memory, rows._runs = None, []
            with pa.ipc.new_file(str(path), SCHEMA) as writer:
                rows._write(writer, [self._in_memory])
        return rows

    def blocks(self) -> Iterator[Block]:
        """Yields the rows; every call starts from the beginning. The first block has the remarks of all."""
        remarks = self._remarks
        merged = _merged(self._path, self._runs) if self._runs else filter(None, [self._in_memory])
        for block in merged:
            arrival_s = block.arrival_s - self._first_s if self._first_s < 0 else block.arrival_s
            yield replace(block, arrival_s=arrival_s, remarks=remarks)
            remarks = ()

    def _sort(self, blocks: Iterable[Block]) -> None:
        gathered: list[Block] = []
        num_values = 0
        with ExitStack() as stack:
            writer = None
            for block in blocks:
                self._remarks += block.remarks
                self._first_s = min(self._first_s, float(block.arrival_s.min()))
                gathered.append(block)
                num_values += int(block.num_values().sum())
                if num_values >= RUN_VALUES:
                    writer = writer or stack.enter_context(self._new_file())
                    self._write(writer, gathered)
                    gathered, num_values = [], 0
            if writer is None and gathered:
                self._in_memory = _in_order(gathered)
            elif writer is not None and gathered:
                self._write(writer, gathered)
        while len(self._runs) > MAX_RUNS:
            self._merge_runs()

    def _new_file(self) -> pa.ipc.RecordBatchFileWriter:
        self._folder = tempfile.TemporaryDirectory(prefix="windtunnel-sort-")
        self._path = Path(self._folder.name) / "runs.arrow"
        return pa.ipc.new_file(str(self._path), SCHEMA)

    def _write(self, writer: pa.ipc.RecordBatchFileWriter, blocks: Sequence[Block]) -> None:
        """Writes a sorted run."""
        self._write_run(writer, [_in_order(blocks)])

    def _write_run(self, writer: pa.ipc.RecordBatchFileWriter, blocks: Iterable[Block]) -> None:
        """Writes the sorted blocks of a run in batches of some `VALUES_AT_ONCE` numbers."""
        first = num_batches = self._runs[-1].stop if self._runs else 0
        for block in blocks:
            values = block.num_values()
            batch = (np.cumsum(values) - values) // VALUES_AT_ONCE
            cuts = [*np.flatnonzero(np.diff(batch, prepend=-1)).tolist(), len(block)]
            for start, end in pairwise(cuts):
                writer.write_batch(_to_batch(block.where(slice(start, end))))
            num_batches += len(cuts) - 1
        self._runs.append(range(first, num_batches))

    def _merge_runs(self) -> None:
        """Replaces the file by one in which each group of `MAX_RUNS` runs is merged."""
        runs, self._runs = self._runs, []
        file = self._path.with_suffix(".merged")
        with pa.ipc.new_file(str(file), SCHEMA) as writer:
            for start in range(0, len(runs), MAX_RUNS):
                self._write_run(writer, _merged(self._path, runs[start : start + MAX_RUNS]))
        file.replace(self._path)


def _merged(path: Path, runs: Sequence[range]) -> Iterator[Block]:
    """Merges runs of a file; yields sorted blocks.

    In each step, all rows up to the smallest last row of all buffers are in memory.
    """
    with pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        buffers = [_Buffer(reader, run) for run in runs]
        while buffers:
            limit = min((buffer.last for buffer in buffers if buffer.rest), default=None)
            due = [buffer for buffer in buffers if limit is None or buffer.first_s <= limit[0]]
            yield _in_order([buffer.take(limit) for buffer in due])
            buffers = [buffer for buffer in buffers if len(buffer.block)]


@dataclass(slots=True)
class _Buffer:
    """The next rows of a run."""

    reader: pa.ipc.RecordBatchFileReader
    rest: range
    """Batches that have not been read."""
    block: Block

    def __init__(self, reader: pa.ipc.RecordBatchFileReader, run: range) -> None:
        self.reader, self.rest = reader, run
        self._read()

    @property
    def first_s(self) -> float:
        """Time of the first row in memory."""
        return float(self.block.arrival_s[0])

    @property
    def last(self) -> tuple[float, int]:
        """Time and line of the last row in memory."""
        return float(self.block.arrival_s[-1]), int(self.block.line[-1])

    def take(self, limit: tuple[float, int] | None) -> Block:
        """Removes and returns the rows up to a time and a line; None: all in memory."""
        num_rows = len(self.block)
        if limit is not None:
            limit_s, line = limit
            first, after = (
                int(np.searchsorted(self.block.arrival_s, limit_s, side)) for side in ("left", "right")
            )
            num_rows = first + int(np.searchsorted(self.block.line[first:after], line, "right"))
        taken = self.block.where(slice(0, num_rows))
        self.block = self.block.where(slice(num_rows, None))
        if not len(self.block) and self.rest:
            self._read()
        return taken

    def _read(self) -> None:
        self.block = _to_block(self.reader.get_batch(self.rest[0]))
        self.rest = self.rest[1:]


def _in_order(blocks: Sequence[Block]) -> Block:
    """Returns the rows of blocks sorted by time; where times are equal, the order stays."""
    rows = joined(blocks)
    return rows.where(np.argsort(rows.arrival_s, kind="stable"))


def _to_batch(block: Block) -> pa.RecordBatch:
    texts: dict[str, Any] = {name: getattr(block, name) for name in TEXTS}
    if block.content_ids is not None:
        texts["content_ids"] = [json.dumps(ids) for ids in block.content_ids]
    columns: list[Any] = [block.line, block.arrival_s, block.prompt_tokens, block.output_tokens]
    columns += [texts[name] for name in TEXTS]
    columns.append(block.session_id)
    columns = [[None] * len(block) if column is None else column for column in columns]
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def _to_block(batch: pa.RecordBatch) -> Block:
    def numbers(name: str) -> npt.NDArray[Any]:
        return np.asarray(batch.column(name).to_numpy())

    texts: dict[str, Any] = {}
    for name in TEXTS:
        column = batch.column(name)
        texts[name] = None if column.null_count else objects(column.to_pylist())
    if texts["content_ids"] is not None:
        texts["content_ids"] = objects([tuple(json.loads(ids)) for ids in texts["content_ids"]])
    has_session = not batch.column("session_id").null_count
    return Block(
        line=numbers("line"),
        arrival_s=numbers("arrival_s"),
        prompt_tokens=numbers("prompt_tokens"),
        output_tokens=numbers("output_tokens"),
        session_id=numbers("session_id") if has_session else None,
        **texts,
    )
