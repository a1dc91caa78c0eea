"""The traffic of a recorded trace: read in blocks, once to check it, and again by the run.

The check finds every error before anything runs, counts the requests, and notices rows that are not in order
of time. Short traces are kept in memory; others are read again, so any number of requests takes the same
memory. A check is valid as long as the file has the same path, size and modification time: later runs of the
process, and other processes, reuse it.
"""

from __future__ import annotations

import math
import pickle  # nosec B403
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from copy import copy, deepcopy
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from sim.settings.errors import ConfigError
from sim.workload.base import WorkloadNotes
from sim.workload.chunks import Chunk, Common, OpenLoopSource, sized_segments
from sim.workload.distributions import BoolArray, clip_to_context
from sim.workload.trace_rows import Block, SortedRows

KEPT_VALUES = 1 << 20
"""Count of numbers up to which a trace is kept in memory: about 200,000 requests, fewer with contents."""
TIME_DIGITS = 7
"""Decimals of times in the files (Azure's have seven), which subtraction changes and rounding restores."""

SETTLED_NS: Final = 1_000_000_000
"""Minimum age of a file at which its modification time identifies its content; file systems have coarse
clocks.
"""
MAX_CHECKED: Final = 4
"""Number of cached traces; the requests of a short one are in memory, see `trace_source.KEPT_VALUES`."""


class Window(NamedTuple):
    """The part of a trace that is replayed, in seconds from the trace's zero."""

    start_s: float | None
    """The setting; None: the first arrival."""
    duration_s: float | None
    max_requests: int | None
    later_s: float = 0.0
    """Offset of a seed's window from the start, in seconds."""


class OutOfOrderError(ValueError):
    """A row arrives before the previous one."""


class ChangedTraceError(ConfigError):
    """A file was changed between its check and the run."""


class TraceSource(OpenLoopSource):
    """The requests of a window of a trace, in order of time; the number of a request is its id."""

    def __init__(
        self,
        path: Path,
        blocks: Callable[[], Iterator[Block]] | SortedRows,
        *,
        window: Window,
        max_model_len: int,
        patience_s: float | None,
        sort: bool = False,
        finish: Callable[[Callable[[], Iterator[Block]]], Iterator[Block]] | None = None,
        time_digits: int | None = TIME_DIGITS,
        nothing: str = ":1:1: expected at least one request",
    ) -> None:
        """Checks the trace.

        blocks: reads the rows in the order of the file, and every call starts again; or all rows, already
        sorted. sort: sort rows that are out of order. finish: see `Trace.finished`.
        time_digits: decimals to which times are rounded; None: they stay as they are. nothing: the error of a
        file without rows, after its name. Raises ValueError.
        """
        self.patience_s = patience_s
        self._path = path
        self._sorted = blocks if isinstance(blocks, SortedRows) else None
        self._blocks = blocks.blocks if isinstance(blocks, SortedRows) else blocks
        self._finish = finish
        self._window = window
        self._max_model_len = max_model_len
        self._time_digits = time_digits
        self._nothing = nothing
        self._start_s = None if window.start_s is None else window.start_s + window.later_s
        self._version = version_of(path)
        try:
            self._check(to_the_end=sort)
        except OutOfOrderError:
            if not sort:
                raise
            self._sorted = SortedRows(self._blocks())
            self._blocks = self._sorted.blocks
            self._start_s = None if window.start_s is None else self._start_s
            self._check(to_the_end=False)

    def again(self) -> TraceSource:
        """Returns the same traffic, without another check, for another run with its own notes."""
        source = copy(self)
        source.notes = deepcopy(self.notes)
        return source

    @property
    def is_readable(self) -> bool:
        """False if sorted rows were removed, for example because their process has ended."""
        return self._sorted is None or self._sorted.is_readable

    def for_others(self, file: Path) -> TraceSource | None:
        """Returns the same traffic for other processes, with sorted rows in the file.

        None: it is short, so they can check it themselves. Raises OSError.
        """
        if self._kept is not None:
            return None
        source = self.again()
        if self._sorted is not None:
            source._sorted = self._sorted.copied_to(file)
            source._blocks = source._sorted.blocks
        return source

    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests. Raises ChangedTraceError if the file has changed since it was checked."""
        return self._read_again() if self._kept is None else iter(self._kept)

    def _check(self, *, to_the_end: bool) -> None:
        """Reads the window, and keeps it if it is short. to_the_end: also check the rows after it."""
        self.notes = WorkloadNotes()
        self.num_requests: int | None = 0
        self.last_arrival_s: float | None = None
        self._kept: list[Chunk] | None = []
        num_values = 0
        for chunk in self._read(self.notes, to_the_end=to_the_end):
            self.num_requests += len(chunk)
            self.last_arrival_s = float(chunk.at_s[-1])
            num_values += 4 * len(chunk) + (0 if chunk.content is None else sum(map(len, chunk.content)))
            if num_values > KEPT_VALUES:
                self._kept = None
            elif self._kept is not None:
                self._kept.append(chunk)

    def _read_again(self) -> Iterator[Chunk]:
        changed = f"{self._path}: has changed since it was checked; start the run again"
        if self._sorted is None and version_of(self._path) != self._version:
            raise ChangedTraceError(changed)
        try:
            yield from self._read(WorkloadNotes(), to_the_end=False)
        except ValueError as error:
            raise ChangedTraceError(f"{error}; the file has changed since it was checked") from None
        if self._sorted is None and version_of(self._path) != self._version:
            raise ChangedTraceError(changed)

    def _read(self, notes: WorkloadNotes, *, to_the_end: bool) -> Iterator[Chunk]:
        """Yields the requests of the window, and adds to the notes. Raises ValueError."""
        previous_s, last_s = -math.inf, 0.0
        has_rows = has_ended = False
        count = 0
        for block in self._blocks() if self._finish is None else self._finish(self._blocks):
            has_rows = True
            times_s = block.arrival_s
            if self._start_s is None:
                self._begin(block, notes)
            start_s = math.inf if self._start_s is None else self._start_s
            in_time = (times_s >= start_s) & (times_s < self._end_s)
            wanted = in_time & block.is_replayed()
            end = 0 if has_ended else self._end(block, wanted, count)
            before_s = np.concatenate([[previous_s], times_s[:-1]])
            early = _first(times_s < before_s)
            if early < len(block) and (early <= end or to_the_end):
                raise OutOfOrderError(
                    f"{self._path}:{block.line[early]}:1: expected an arrival at or after that of the "
                    f"previous row ({before_s[early]:.7f} s), found {times_s[early]:.7f} s; set "
                    "workload.sort=true to sort the rows"
                )
            if not has_ended:
                notes.remarks += block.remarks
                last_s = float(times_s[min(end, len(block) - 1)])
                counted = times_s < self._end_s if self._window.start_s is None else in_time
                _count_skipped(notes, block, counted, end)
                rows = np.flatnonzero(wanted[:end])
                if len(rows):
                    yield self._chunk(block.where(rows), count, notes)
                    count += len(rows)
            previous_s = float(times_s[-1])
            has_ended = has_ended or end < len(block)
            if has_ended and not to_the_end:
                break  # do not read the rest of a long trace
        if not has_rows:
            raise ValueError(f"{self._path}{self._nothing}, found none")
        if not count:
            if self._start_s is None:
                left_out = ", ".join(f"{reason} ({count:,})" for reason, count in notes.skipped.items())
                raise ValueError(f"{self._path}: has no request to replay; left out: {left_out}")
            setting = self._start_s if self._window.start_s is None else self._window.start_s
            raise ValueError(
                f"start_s={setting:g}: no request of {self._path} arrives between "
                f"{self._start_s:g} s and {self._end_s:g} s; the last row that was read arrives at "
                f"{last_s:g} s"
            )

    @property
    def _end_s(self) -> float:
        """Time from which rows are not replayed."""
        if self._start_s is None or self._window.duration_s is None:
            return math.inf
        return self._start_s + self._window.duration_s

    def _begin(self, block: Block, notes: WorkloadNotes) -> None:
        """Begins the window with the first request of the block, if it has one."""
        first = _first(block.is_replayed())
        if first == len(block):
            return
        first_s = float(block.arrival_s[first])
        self._start_s = first_s + self._window.later_s
        if self._time_digits is not None and round(first_s, self._time_digits):
            notes.remarks.append(
                f"The first request of the trace arrives at {first_s:,.10g} s of its own time, which is "
                "0 s of the run; workload.start_s=0 begins at the zero of the trace."
            )

    def _end(self, block: Block, wanted: BoolArray, count: int) -> int:
        """Returns the row at which reading ends, because of the window's end or max_requests.

        count: requests of the window before this block.
        """
        end = _first(block.arrival_s >= self._end_s)
        if self._window.max_requests is None:
            return end
        before = count + np.cumsum(wanted) - wanted  # requests before each row
        return min(end, _first(before >= self._window.max_requests))

    def _chunk(self, rows: Block, first_id: int, notes: WorkloadNotes) -> Chunk:
        prompts, outputs, clipped = clip_to_context(
            rows.prompt_tokens, rows.output_tokens, self._max_model_len
        )
        notes.num_clipped += int(np.count_nonzero(clipped))
        at_s = rows.arrival_s - (self._start_s or 0.0)
        return Chunk(
            request_id=np.arange(first_id, first_id + len(rows)),
            at_s=at_s if self._time_digits is None else np.round(at_s, self._time_digits),
            prompt_tokens=prompts,
            output_tokens=outputs,
            session_id=rows.session_id,
            tenant=rows.tenant,
            content=rows.content_ids,
            common=Common(segments=sized_segments),
        )


def _count_skipped(notes: WorkloadNotes, block: Block, in_time: BoolArray, end: int) -> None:
    """Adds the omitted rows of the window to the notes, by reason."""
    if block.skip_reason is not None:
        for reason, count in Counter(block.skip_reason[:end][in_time[:end]].tolist()).items():
            if reason:
                notes.skip(reason, count)


def _first(mask: BoolArray) -> int:
    """Returns the first row of a mask that is true; the number of rows if there is none."""
    return int(mask.argmax()) if mask.any() else len(mask)


def version_of(path: Path) -> tuple[int, int] | None:
    """Returns size and modification time of a file; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class TraceKey(NamedTuple):
    """Everything that a check depends on. version: size and modification time of the file."""

    settings: Hashable
    version: tuple[int, int]


_checked: OrderedDict[TraceKey, TraceSource] = OrderedDict()  # the one used last at the end


def checked_once(path: Path, settings: Hashable, check: Callable[[], TraceSource]) -> TraceSource:
    """Returns the traffic of a trace for one run; `check` is called if no check is known.

    settings: everything except the file's content that the traffic depends on. If they are unhashable, as a
    user's class may be, each run checks the file.
    """
    version = version_of(path)
    try:
        hash(settings)
    except TypeError:
        return check()
    if version is None or time.time_ns() - version[1] < SETTLED_NS:
        return check()
    key = TraceKey(settings, version)
    if key not in _checked or not _checked[key].is_readable:
        _remember(key, check())
    _checked.move_to_end(key)
    return _checked[key].again()


def checks_for_others(folder: Path) -> list[bytes]:
    """Returns the checks of long traces for `adopt` in other processes; sorted rows are copied to the folder.

    A trace whose rows cannot be written, or which cannot be pickled, is omitted: other processes check it.
    """
    found = []
    for number, (key, source) in enumerate(_checked.items()):
        file = folder / f"trace-{number}.arrow"
        try:
            if (shared := source.for_others(file)) is not None:
                found.append(pickle.dumps((key, shared)))
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            file.unlink(missing_ok=True)
    return found


def adopt(checks: Iterable[bytes]) -> None:
    """Adopts the checks of the process that called `checks_for_others`, if they are useful here."""
    for check in checks:
        with suppress(ImportError, AttributeError):  # of a class that is not found here
            # Made by the command of this run.
            key, source = pickle.loads(check)  # nosec B301
            if source.is_readable and key not in _checked:
                _remember(key, source)


def _remember(key: TraceKey, source: TraceSource) -> None:
    _checked[key] = source
    while len(_checked) > MAX_CHECKED:
        _checked.popitem(last=False)
