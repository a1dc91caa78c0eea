"""One row an iteration, and every gap between two tokens: a log of plain columns for each replica.

A leap is one row of the log. `expand` turns rows into one row an iteration, the same whether the run leapt or
stepped.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from struct import Struct
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations.iteration import COUNTED, AdapterBatch, IterationShape
from policies.core.engine import EngineCore
from policies.core.plan import AdapterUse, Cause, StepPlan

NO_USE = AdapterUse(0, 0, 0, 0)
ADAPTER_COLUMNS = ("adapters", *(f"adapter_{name}" for name in AdapterBatch._fields))
"""Of an iterations table where adapters are served: different ones, and the fields of AdapterBatch."""


class Step(Protocol):
    """Iterations of one plan that have ended: what the log needs to know of them."""

    plan: StepPlan
    start_s: float
    ends_s: list[float]
    num_iterations: int

    def shape_of_iteration(self, step: int) -> IterationShape:
        """What iteration `step` (from 0) computed."""
        ...


class IterationLog:
    """The iterations of one replica, a row a leap, and the token gaps that do not follow from them."""

    COUNTS: ClassVar[tuple[str, ...]] = (
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_tokens_used",
        "preempted",
        "waits_for_memory",  # 1: the first of the waiting found no room for its KV
        *COUNTED,
    )
    ROW: ClassVar[tuple[str, ...]] = (
        "num_iterations",
        "start_s",
        "emitted_s",  # when the decoding sequences had produced their tokens before this row
        "num_apart",  # decoding sequences for which that is not so: their gaps are noted by add_gap
        "block_phase",  # clock of the decode set modulo the block size
        "num_widening",  # decoding sequences that attend to a token more, and hold it, iteration by iteration
        *COUNTS,
    )
    TOKENS: ClassVar[tuple[str, ...]] = (
        "kv_tokens_used",
        "decode_context_tokens",
        "prefill_pairs",
        "prefill_context_tokens",
    )
    """COUNTS that may exceed 32 bits."""
    _pack: ClassVar[Callable[..., bytes]] = Struct(f"{len(ROW)}d").pack

    def __init__(self, replica: int, block_size: int, serves_adapters: bool = False) -> None:
        self.replica = replica
        self.serves_adapters = serves_adapters
        self.block_size = block_size
        self._rows = bytearray()
        self._ends_s = array("d")
        self._blocks_due = array("I")  # for each row of several iterations: block_size numbers, by phase
        self._gaps = array("d")  # request id, start, end
        self._adapters = array("q")  # for each row the numbers of AdapterUse, where adapters are served

    def add_gap(self, request_id: int, since_s: float, end_s: float) -> None:
        """One sequence's gap between two tokens, which came at since_s and end_s."""
        self._gaps.extend((request_id, since_s, end_s))

    def add(self, step: Step, core: EngineCore, emitted_s: float, num_apart: int) -> None:
        """Enter iterations that are about to be committed; the core is as the plan has left it."""
        plan, num_iterations, ends_s, decodes = step.plan, step.num_iterations, step.ends_s, core.decodes
        self._ends_s.extend(ends_s if num_iterations == len(ends_s) else ends_s[:num_iterations])
        if self.serves_adapters:
            use = plan.adapters or NO_USE
            self._adapters.extend(use * num_iterations if plan.chunks else use)
        if plan.chunks:
            self._add_chunks(step, core, emitted_s, num_apart)
            return
        num_running, pool = len(core.running), core.pool
        num_held = decodes.num_context_tokens if decodes.size == num_running else core.num_tokens_held
        self._rows += self._pack(
            num_iterations,
            step.start_s,
            emitted_s,
            num_apart,
            decodes.clock % self.block_size,
            plan.num_widening,
            num_running,
            core.num_waiting if plan.waits_for is not None else 0,
            pool.num_blocks - pool.num_free,
            num_held + plan.num_widening + plan.num_copied_tokens,
            len(plan.preempted),
            plan.waits_for is Cause.memory,
            plan.num_decodes,
            plan.num_decode_context_tokens,
            *(0, 0, 0, 0),
            plan.num_decodes,
        )
        if num_iterations > 1:
            self._blocks_due.extend(decodes.blocks_due_by_phase)

    def _add_chunks(self, step: Step, core: EngineCore, emitted_s: float, num_apart: int) -> None:
        """What prompt chunks cost is not linear in the iteration: each iteration has its row."""
        plan, start_s, shape = step.plan, step.start_s, step.shape_of_iteration(0)
        num_running, num_waiting = len(core.running), core.num_waiting
        num_blocks_used, num_tokens_held = core.pool.num_used, core.num_tokens_held
        num_new = shape.prefill_tokens + plan.num_widening + plan.num_copied_tokens
        for index in range(step.num_iterations):
            if index:
                shape = step.shape_of_iteration(index)
            self._rows += self._pack(
                1,
                start_s,
                emitted_s,
                num_apart,
                0,
                plan.num_widening,
                num_running,
                num_waiting,
                num_blocks_used + (core.blocks_of_repeats(plan, index) if index else 0),
                num_tokens_held + (index + 1) * num_new,
                len(plan.preempted),
                plan.waits_for is Cause.memory,
                *shape[:-1],
            )
            start_s = emitted_s = step.ends_s[index]
            num_apart = 0

    @property
    def num_iterations(self) -> int:
        """Rows of what `expand` returns."""
        return len(self._ends_s)

    @property
    def max_gaps(self) -> int:
        """No more gaps than that does it return."""
        return len(self._ends_s) + len(self._gaps) // 3

    @classmethod
    def dtypes(cls, *, serves_adapters: bool) -> dict[str, str]:
        """By name, of the columns that `expand` returns."""
        return {
            **{"replica": "i4", "iteration": "i4", "start_s": "f8", "duration_s": "f8"},
            **{name: "i8" if name in cls.TOKENS else "i4" for name in cls.COUNTS},
            **dict.fromkeys(ADAPTER_COLUMNS if serves_adapters else (), "i8"),
        }

    def expand(self) -> tuple[dict[str, NDArray[Any]], Gaps]:
        """One value an iteration by column, and all gaps between tokens."""
        table = np.frombuffer(self._rows).reshape(-1, len(self.ROW))
        row = dict(zip(self.ROW, table.T, strict=True))
        num = row["num_iterations"].astype(np.int64)
        first = np.cumsum(num) - num  # index of each row's first iteration
        step = np.arange(num.sum()) - np.repeat(first, num)  # index of an iteration in its row

        def by_iteration(name: str) -> NDArray[np.int64]:
            return np.repeat(row[name].astype(np.int64), num)

        ends_s = np.frombuffer(self._ends_s)
        start_s = np.roll(ends_s, 1)
        start_s[first] = row["start_s"]
        before_s = np.roll(ends_s, 1)
        before_s[first] = row["emitted_s"]
        columns: dict[str, NDArray[Any]] = {
            "replica": np.full(len(step), self.replica, np.int32),
            "iteration": np.arange(len(step), dtype=np.int32),
            "start_s": start_s,
            "duration_s": ends_s - start_s,
        }
        grown = step * by_iteration("num_widening")
        grown_by = {
            "decode_context_tokens": grown,
            "kv_tokens_used": grown,
            "kv_blocks_used": self._grown_blocks(row, num),
        }
        for name in self.COUNTS:
            column = by_iteration(name)
            if name in grown_by:
                column += grown_by[name]
            columns[name] = column if name in self.TOKENS else column.astype(np.int32)
        if self.serves_adapters:
            used = np.frombuffer(self._adapters, np.int64).reshape(-1, len(ADAPTER_COLUMNS))
            for name, column in zip(ADAPTER_COLUMNS, used.T, strict=True):
                columns[name] = np.repeat(column, num)
        count = columns["decode_seqs"].astype(np.int64)
        count[first] -= row["num_apart"].astype(np.int64)
        decodes = count > 0
        _, since_s, single_s = self.own_gaps().T
        gaps = Gaps(
            np.concatenate([(ends_s - before_s)[decodes], single_s - since_s]),
            np.concatenate([count[decodes], np.ones(len(single_s), np.int64)]),
            np.concatenate([ends_s[decodes], single_s]),
        )
        return columns, gaps

    def own_gaps(self) -> NDArray[np.float64]:
        """Those of add_gap, [n, 3]: request id, start, end."""
        return np.frombuffer(self._gaps).reshape(-1, 3)

    def _grown_blocks(self, row: dict[str, NDArray[np.float64]], num: NDArray[np.int64]) -> NDArray[np.int64]:
        """Blocks taken since the first iteration of each iteration's row."""
        leaps = np.flatnonzero(num > 1)
        due_by_leap = np.frombuffer(self._blocks_due, np.uint32).reshape(-1, self.block_size)
        size = num[leaps]
        leap = np.repeat(np.arange(len(leaps)), size)
        step = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        phase = np.repeat(row["block_phase"][leaps].astype(np.int64), size) + step
        due = np.where(step > 0, due_by_leap[leap, phase % self.block_size], 0)
        total = np.cumsum(due)
        before = np.repeat(total[np.cumsum(size) - size], size)  # due is 0 at each leap's first iteration
        grown = np.zeros(num.sum(), np.int64)
        grown[np.repeat(num > 1, num)] = total - before
        return grown


def own_gaps_table(logs: list[IterationLog]) -> pd.DataFrame:
    """Of all replicas: `RunRecords.own_gaps`."""
    gaps = [log.own_gaps() for log in logs]
    request_id, since_s, end_s = np.concatenate(gaps or [np.empty((0, 3))]).T
    replica = np.repeat([log.replica for log in logs], [len(own) for own in gaps])
    return pd.DataFrame(
        {
            "request_id": request_id.astype(np.int64),
            "replica": replica.astype(np.int32),
            "since_s": since_s,
            "end_s": end_s,
        }
    )


def expanded(logs: list[IterationLog]) -> tuple[dict[str, NDArray[Any]], Gaps]:
    """`expand` of all replicas, one behind the other; 0 where an engine has no such thing, as adapters.

    The logs are taken from the list one after the other: together they are as large as the table.
    """
    num_rows, max_gaps = sum(log.num_iterations for log in logs), sum(log.max_gaps for log in logs)
    dtypes = IterationLog.dtypes(serves_adapters=any(log.serves_adapters for log in logs))
    columns: dict[str, NDArray[Any]] = {name: np.empty(num_rows, dtype) for name, dtype in dtypes.items()}
    gaps = Gaps(np.empty(max_gaps), np.empty(max_gaps, np.int64), np.empty(max_gaps))
    row = num_gaps = 0
    logs.reverse()
    while logs:
        log = logs.pop()
        own_columns, own_gaps = log.expand()
        for name, column in columns.items():
            column[row : row + log.num_iterations] = own_columns.get(name, 0)
        for values, own_values in zip(gaps, own_gaps, strict=True):
            values[num_gaps : num_gaps + len(own_values)] = own_values
        row += log.num_iterations
        num_gaps += len(own_gaps.gap_s)
    return columns, Gaps(gaps.gap_s[:num_gaps], gaps.gap_count[:num_gaps], gaps.gap_end_s[:num_gaps])


class Gaps(NamedTuple):
    """Gaps between consecutive tokens of a sequence: each value, how many sequences had it, when it ended."""

    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
