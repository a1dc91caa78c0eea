"""The log of iterations and of gaps between tokens: packed rows, one log per replica.

A leap is one row of the log. `expanded` converts the rows to one row per iteration, with the same result for
leaps and steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from struct import Struct
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import Num
from hwmodels.iterations import COUNTED, AdapterBatch, IterationShape
from policies.core.engine import EngineCore
from policies.core.plan import AdapterUse, Cause, StepPlan
from sim.records.mapped_buffers import MappedBuffers
from sim.records.table import Gaps
from sim.speculation.log import DRAFT_COLUMNS, DraftLog

ROW = np.dtype(
    [
        ("start_s", "f8"),
        ("emitted_s", "f8"),  # time of the latest tokens of the decoding sequences before this row
        ("decode_context_tokens", "i8"),
        ("kv_tokens_used", "i8"),
        ("clock", "u4"),  # clock of the decode set
        ("num_iterations", "u4"),
        ("num_apart", "u4"),  # decoding sequences to which emitted_s does not apply: add_gap logs their gaps
        ("num_widening", "u4"),  # decoding sequences whose context grows by a token per iteration
        ("decode_seqs", "u4"),
        ("running", "u4"),
        ("kv_blocks_used", "u4"),
        ("more", "u4"),  # QUEUED, CHUNKS or their sum: it has a row there, or one per iteration
    ]
)
"""The iterations of a plan. Tokens and blocks are those of the first iteration."""
QUEUE_ROW = np.dtype([("waiting", "i4"), ("preempted", "i4"), ("waits_for_memory", "i4")])
CHUNKS_ROW = np.dtype(
    [
        ("kv_tokens_used", "i8"),
        ("kv_blocks_used", "i4"),
        ("prefill_seqs", "i4"),
        ("prefill_tokens", "i4"),
        ("prefill_pairs", "i8"),
        ("prefill_context_tokens", "i8"),
        ("sampled_seqs", "i4"),
    ]
)
QUEUED: Final = 1
CHUNKS: Final = 2
pack_row: Final = Struct("=2d2q8I").pack
"""Packs the fields of `ROW`."""
pack_queue: Final = Struct("=3i").pack
"""Packs the fields of `QUEUE_ROW`."""
pack_chunks: Final = Struct("=q3i2qi").pack
"""Packs the fields of `CHUNKS_ROW`."""


class _TimePackers(dict[int, Callable[..., bytes]]):
    """Functions that pack times into bytes, by the number of times; twice as fast as `array.extend`."""

    def __missing__(self, num_times: int) -> Callable[..., bytes]:
        self[num_times] = pack = Struct(f"={num_times}d").pack
        return pack


TIME_PACKERS: Final = _TimePackers()


NO_USE = AdapterUse(0, 0, 0, 0)
ADAPTER_COLUMNS = ("adapters", *(f"adapter_{name}" for name in AdapterBatch._fields[1:]))
"""Columns of the table if adapters are served: the fields of AdapterBatch."""

_PACK_USE: Final = Struct(f"={len(ADAPTER_COLUMNS)}q").pack


class Step(Protocol):
    """Completed iterations of one plan, with the attributes that the log reads.

    shape: the shape of the first iteration, if the plan has prompt chunks.
    """

    plan: StepPlan
    shape: IterationShape | None
    start_s: float
    ends_s: list[float]
    num_iterations: int

    def shape_of_iteration(self, step: int) -> IterationShape:
        """Returns the shape of iteration `step` (from 0)."""
        ...


class IterationLog:
    """The iterations of one replica, one row per leap, and the token gaps that do not follow from them."""

    COUNTS: ClassVar[tuple[str, ...]] = (
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_tokens_used",
        "preempted",
        "waits_for_memory",  # 1: there was no memory for the KV of the first waiting sequence
        *COUNTED,
    )
    TOKENS: ClassVar[tuple[str, ...]] = (
        "kv_tokens_used",
        "decode_context_tokens",
        "prefill_pairs",
        "prefill_context_tokens",
    )
    """COUNTS that may exceed 32 bits."""

    def __init__(
        self, replica: int, block_size: int, serves_adapters: bool = False, speculates: bool = False
    ) -> None:
        self.replica = replica
        self._speculates = speculates
        self.serves_adapters = serves_adapters
        self.block_size = block_size
        self._begin(0)

    def _begin(self, first_iteration: int) -> None:
        """Begins a log without rows. first_iteration: number of iterations of the replica before it."""
        self.first_iteration = first_iteration
        self.drafts = DraftLog(first_iteration) if self._speculates else None
        """The draft tokens of the iterations; None: the replica does not speculate."""
        self._rows = bytearray()
        self._ends_s = bytearray()  # ends of all iterations
        self._blocks_due = bytearray()  # block_size numbers, by phase, per row of several iterations
        self._queues = bytearray()
        self._chunks = bytearray()
        self._adapters = bytearray()  # the fields of AdapterUse per row, if adapters are served
        self._buffers = MappedBuffers(
            self._rows, self._ends_s, self._blocks_due, self._queues, self._chunks, self._adapters
        )
        self._gaps = array("d")  # request id, start, end

    def cut(self) -> Self:
        """Returns a log with all rows so far, and removes them from this one."""
        taken = type(self)(self.replica, self.block_size, self.serves_adapters, self._speculates)
        taken._take(self)
        self._begin(self.next_iteration)
        return taken

    def _take(self, other: Self) -> None:
        """Takes over the rows of another log, which must be reset before it is used again."""
        self.first_iteration = other.first_iteration
        self._rows, self._ends_s, self._blocks_due = other._rows, other._ends_s, other._blocks_due
        self._queues, self._chunks, self._adapters = other._queues, other._chunks, other._adapters
        self._buffers, self._gaps, self.drafts = other._buffers, other._gaps, other.drafts

    def extend(self, other: IterationLog) -> None:
        """Adds the rows of another log with the same block size and the same columns."""
        self._buffers.extend(other._buffers)
        self._gaps += other._gaps

    def more_dtypes(self) -> dict[str, str]:
        """Returns the dtypes of additional columns of the table, by name."""
        names = (*(ADAPTER_COLUMNS if self.serves_adapters else ()), *(DRAFT_COLUMNS if self.drafts else ()))
        return dict.fromkeys(names, "i8")

    def add_gap(self, request_id: int, since_s: float, end_s: float) -> None:
        """Logs the gap of one sequence between two tokens, from since_s to end_s."""
        self._gaps.extend((request_id, since_s, end_s))

    def add(self, step: Step, core: EngineCore, emitted_s: float, num_apart: int) -> None:
        """Logs iterations that are about to be committed; the core is in its state after the plan.

        emitted_s, num_apart: see `ROW`.
        """
        plan, num_iterations, ends_s = step.plan, step.num_iterations, step.ends_s
        decodes, pool, chunks = core.decodes, core.block_pool, plan.chunks
        if num_iterations != len(ends_s):
            ends_s = ends_s[:num_iterations]
        self._ends_s += TIME_PACKERS[num_iterations](*ends_s)
        if self.serves_adapters:
            self._add_use(plan)
        num_running = len(core.running)
        num_widening = num_new = plan.num_widening
        if plan.drafts is not None:
            num_new = plan.num_decodes + plan.drafts.num_tokens
        if decodes.size == num_running:
            num_held = decodes.num_context_tokens + num_new
        else:
            num_held = core.num_tokens_held + num_new + plan.num_copied_tokens
        num_blocks_used = pool.num_blocks - pool.num_free
        more = 0
        if not plan.is_unasked:
            more = CHUNKS if chunks else 0
            if plan.waits_for is not None or plan.preempted or (more and core.num_waiting):
                self._add_queue(plan, core)
                more += QUEUED
        self._rows += pack_row(
            step.start_s,
            emitted_s,
            plan.num_decode_context_tokens,
            num_held,
            decodes.clock,
            num_iterations,
            num_apart,
            num_widening,
            plan.num_decodes,
            num_running,
            num_blocks_used,
            more,
        )
        if chunks:
            self._add_chunks(step, core, num_held, num_blocks_used)
        elif num_iterations > 1:
            self._blocks_due += decodes.blocks_due_by_phase

    def _add_use(self, plan: StepPlan) -> None:
        """Logs the use of adapters in a plan."""
        self._adapters += _PACK_USE(*(plan.adapters or NO_USE))

    def _add_queue(self, plan: StepPlan, core: EngineCore) -> None:
        """Logs the queue of a plan that leaves requests waiting or has preempted some."""
        num_waiting = core.num_waiting if plan.chunks or plan.waits_for is not None else 0
        self._queues += pack_queue(num_waiting, len(plan.preempted), plan.waits_for is Cause.memory)

    def _add_chunks(self, step: Step, core: EngineCore, num_held: Num, num_blocks_used: int) -> None:
        """Logs prompt chunks, one row per iteration, because their counts are not linear in the iteration.

        num_held: KV tokens held, without those of the chunks.
        """
        shape = step.shape
        assert shape is not None
        num_held += shape.prefill_tokens
        self._chunks += pack_chunks(num_held, num_blocks_used, *shape[2:7])
        if step.num_iterations > 1:
            num_new = shape.prefill_tokens + step.plan.num_widening + step.plan.num_copied_tokens
            for index in range(1, step.num_iterations):
                blocks = num_blocks_used + core.blocks_of_repeats(step.plan, index)
                chunks = step.shape_of_iteration(index)[2:7]
                self._chunks += pack_chunks(num_held + index * num_new, blocks, *chunks)
        if len(self._rows) >= self._buffers.limit:
            self._buffers.move()

    @property
    def num_iterations(self) -> int:
        """Number of rows that `expand` fills."""
        return self._buffers.num_bytes(self._ends_s) // 8

    @property
    def next_iteration(self) -> int:
        """Number of iterations of the replica so far."""
        return self.first_iteration + self.num_iterations

    @property
    def num_bytes(self) -> int:
        """Memory of the log, bytes."""
        num_bytes = self._buffers.num_all_bytes() + 8 * len(self._gaps)
        return num_bytes if self.drafts is None else num_bytes + self.drafts.num_bytes

    @property
    def max_gaps(self) -> int:
        """Upper bound of the number of gaps that `expand` writes."""
        return self.num_iterations + len(self._gaps) // 3

    @classmethod
    def dtypes(cls) -> dict[str, str]:
        """Returns the dtypes of the columns that every table has, by name."""
        return {
            **{"replica": "i4", "iteration": "i4", "start_s": "f8", "duration_s": "f8"},
            **{name: "i8" if name in cls.TOKENS else "i4" for name in cls.COUNTS},
        }

    def expand(self, columns: dict[str, NDArray[Any]], gaps: Gaps) -> int:
        """Fills columns of zeros with one value per iteration, and writes the gaps; returns their number.

        The log is dropped, because it is as large as the table.
        """
        rows, ends_s = self._buffers.take(self._rows, ROW), self._buffers.take(self._ends_s, np.float64)
        num = rows["num_iterations"].astype(np.int64)
        first = np.cumsum(num) - num  # index of each row's first iteration
        start_s = columns["start_s"]
        start_s[1:] = ends_s[:-1]
        start_s[first] = rows["start_s"]
        np.subtract(ends_s, start_s, out=columns["duration_s"])
        columns["replica"][:] = self.replica
        columns["iteration"][:] = np.arange(self.first_iteration, self.first_iteration + len(ends_s))
        for name in ("decode_seqs", "running", "kv_blocks_used", "kv_tokens_used", "decode_context_tokens"):
            columns[name][:] = np.repeat(rows[name], num)
        columns["sampled_seqs"][:] = columns["decode_seqs"]
        grown = np.arange(len(ends_s)) - np.repeat(first, num)  # index of an iteration in its row
        grown *= np.repeat(rows["num_widening"], num)
        columns["kv_tokens_used"] += grown
        columns["decode_context_tokens"] += grown
        self._grow_blocks(columns["kv_blocks_used"], rows, num, first)
        self._fill_queues(columns, rows, num)
        chunks = self._buffers.take(self._chunks, CHUNKS_ROW)
        at = np.flatnonzero(np.repeat(rows["more"] & CHUNKS > 0, num))
        for name in CHUNKS_ROW.names or ():
            columns[name][at] = chunks[name]
        if self.serves_adapters:
            used = self._buffers.take(self._adapters, np.int64).reshape(-1, len(ADAPTER_COLUMNS))
            for name, column in zip(ADAPTER_COLUMNS, used.T, strict=True):
                columns[name][:] = np.repeat(column, num)
        if self.drafts is not None:
            self.drafts.fill(columns)
        return self._write_gaps(gaps, ends_s, columns["decode_seqs"], rows, first)

    def own_gaps(self) -> NDArray[np.float64]:
        """Returns the gaps logged by add_gap, [n, 3]: request id, start, end."""
        return np.frombuffer(self._gaps).reshape(-1, 3)

    def _grow_blocks(
        self,
        blocks: NDArray[np.int32],
        rows: NDArray[np.void],
        num: NDArray[np.int64],
        first: NDArray[np.int64],
    ) -> None:
        """Adds the blocks allocated since the first iteration of a leap to each of its iterations."""
        leaps = np.flatnonzero((num > 1) & (rows["more"] & CHUNKS == 0))
        due_by_leap = self._buffers.take(self._blocks_due, np.uint32).reshape(-1, self.block_size)
        size = num[leaps]
        begin = np.cumsum(size) - size
        step = np.arange(size.sum()) - np.repeat(begin, size)
        phase = (np.repeat(rows["clock"][leaps], size) + step) % self.block_size
        due = due_by_leap[np.repeat(np.arange(len(leaps)), size), phase]
        due[begin] = 0
        total = np.cumsum(due, dtype=np.int64)
        total -= np.repeat(total[begin], size)
        blocks[step + np.repeat(first[leaps], size)] += total.astype(np.int32)

    def _fill_queues(
        self, columns: dict[str, NDArray[Any]], rows: NDArray[np.void], num: NDArray[np.int64]
    ) -> None:
        """Fills the columns of the queue for the rows that left requests waiting or preempted some."""
        queues = self._buffers.take(self._queues, QUEUE_ROW)
        is_queued = rows["more"] & QUEUED > 0
        for name in QUEUE_ROW.names or ():
            if queues[name].any():  # else the memory of the column is not touched
                values = np.zeros(len(rows), np.int32)
                values[is_queued] = queues[name]
                columns[name][:] = np.repeat(values, num)

    def _write_gaps(
        self,
        gaps: Gaps,
        ends_s: NDArray[np.float64],
        decode_seqs: NDArray[np.int32],
        rows: NDArray[np.void],
        first: NDArray[np.int64],
    ) -> int:
        before_s = np.roll(ends_s, 1)
        before_s[first] = rows["emitted_s"]
        count = decode_seqs.astype(np.int64)
        count[first] -= rows["num_apart"]
        decodes = count > 0
        _, since_s, single_s = self.own_gaps().T
        num_shared = int(np.count_nonzero(decodes))
        num_gaps = num_shared + len(single_s)
        shared, single = slice(num_shared), slice(num_shared, num_gaps)
        gaps.gap_s[shared], gaps.gap_s[single] = (ends_s - before_s)[decodes], single_s - since_s
        gaps.gap_count[shared], gaps.gap_count[single] = count[decodes], 1
        gaps.gap_end_s[shared], gaps.gap_end_s[single] = ends_s[decodes], single_s
        return num_gaps
