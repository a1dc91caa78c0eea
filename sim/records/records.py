"""What a run leaves behind: one record a request, one an iteration, and every gap between two tokens.

Logs are plain columns, appended to while the simulation runs. A leap is one row; `expand` turns rows into
one row an iteration, the same whether the run leapt or stepped.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import isnan
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations.iteration import COUNTED, AdapterBatch
from policies.adapters.residents import AdapterCounts
from policies.core.engine import EngineCore
from policies.core.plan import AdapterUse, Cause
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence
from sim.cluster.missed import Missed
from sim.cluster.overload import Overload
from sim.cluster.troubles import Trouble
from sim.engine.shape import shape_of
from sim.records.events import logged_events

if TYPE_CHECKING:
    from sim.engine.replica import Flight

NAN = float("nan")
NO_USE = AdapterUse(0, 0, 0, 0)
ADAPTER_COLUMNS = ("adapters", *(f"adapter_{name}" for name in AdapterBatch._fields))
"""Of an iterations table where adapters are served: different ones, and the fields of AdapterBatch."""


class Status(IntEnum):
    """How a request stands at the end of a run; every request has exactly one."""

    unfinished = 0
    finished = 1
    rejected = 2
    aborted = 3


class RequestLog:
    """One row a request, at the index of its id; ids count from 0 in the order in which requests are made."""

    def __init__(self) -> None:
        self.has_arrived = bytearray()
        self.session_id = array("q")  # -1: none
        self.tenant = array("i")  # index in _tenants
        self.model = array("i")  # index in _models
        self.priority = array("q")
        self.arrival_s = array("d")
        self.prompt_tokens = array("q")
        self.pinned_tokens = array("q")
        self.samples = array("i")
        self._tenants: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self.replica = array("i")
        self.status = array("b")
        self.reason: dict[int, str] = {}
        self.scheduled_s = array("d")
        self.first_token_s = array("d")
        self.last_token_s = array("d")
        self.finished_s = array("d")
        self.output_tokens = array("q")
        self.longest_tokens = array("q")
        self.preemptions = array("i")
        self.cached_tokens = array("q")
        self.prefill_iterations = array("q")
        self.attempts = array("i")  # times that it was sent to a replica
        self.lost_tokens = array("q")
        self.gateway_s = array("d")  # held, or on the way back to the service
        self.prefill_replica = array("i")  # that computed the prompt, where another one decodes; else -1
        self.kv_transfer_s = array("d")  # from there
        self.kv_transfer_bytes = array("d")
        self.tries = array("i")  # times that its client sent it
        self.num_lost_first_tokens = 0
        self.num_crash_tokens = 0  # of the lost ones, those that were lost in crashes
        self.num_resends = 0
        self.num_resumed = 0  # of these, those that went on where they were
        self.num_recomputed_tokens = 0  # whose KV crashes had lost
        self.lost_kv: dict[int, int] = {}  # by request id: tokens of it that have not been admitted again
        self.held_back: set[int] = set()  # request ids: the newest token goes out with the KV, not before
        self.failures: Counter[str] = Counter()

    def schedule(self, seq: Sequence, now: float) -> None:
        """A request is worked on, perhaps for the first time."""
        request_id = seq.request_id
        if isnan(self.scheduled_s[request_id]):
            self.scheduled_s[request_id] = now
            self.cached_tokens[request_id] = seq.num_found
        if self.lost_kv:
            self.num_recomputed_tokens += max(0, self.lost_kv.pop(request_id, 0) - seq.num_found)

    def lose_kv(self, request_id: int, num_tokens: int) -> None:
        """A crash has lost the KV of so many tokens."""
        num_tokens = max(num_tokens, self.lost_kv.get(request_id, 0))
        if num_tokens:
            self.lost_kv[request_id] = num_tokens

    def arrive(self, request: Request) -> None:
        """Open the row of a request."""
        request_id, session_id = request.request_id, request.session_id
        while request_id >= len(self.has_arrived):
            self._append_empty_rows(1024)
        self.has_arrived[request_id] = True
        if session_id is not None:
            self.session_id[request_id] = session_id
        self.tenant[request_id] = self._tenants.setdefault(request.tenant, len(self._tenants))
        self.model[request_id] = self._models.setdefault(request.model or "", len(self._models))
        self.priority[request_id] = request.priority
        self.arrival_s[request_id] = request.arrival_s
        self.prompt_tokens[request_id] = request.prompt.num_tokens
        self.pinned_tokens[request_id] = request.prompt.num_pinned
        self.samples[request_id] = 1 if request.branching is None else request.branching.width

    def _append_empty_rows(self, num_rows: int) -> None:
        self.has_arrived.extend(bytes(num_rows))
        self.replica.extend([-1] * num_rows)
        self.session_id.extend([-1] * num_rows)
        for times_s in (
            self.arrival_s,
            self.scheduled_s,
            self.first_token_s,
            self.last_token_s,
            self.finished_s,
        ):
            times_s.extend([NAN] * num_rows)
        self.gateway_s.extend([0.0] * num_rows)
        self.prefill_replica.extend([-1] * num_rows)
        self.kv_transfer_s.extend([NAN] * num_rows)
        self.kv_transfer_bytes.extend([0.0] * num_rows)
        for counts in (
            self.tenant,
            self.model,
            self.priority,
            self.prompt_tokens,
            self.pinned_tokens,
            self.samples,
            self.status,
            self.output_tokens,
            self.longest_tokens,
            self.preemptions,
            self.cached_tokens,
            self.prefill_iterations,
            self.attempts,
            self.tries,
            self.lost_tokens,
        ):
            counts.extend([0] * num_rows)  # status: unfinished

    def first_token(self, request_id: int, now: float) -> None:
        """The first token of a request that another replica goes on with reaches its client."""
        self.first_token_s[request_id] = self.last_token_s[request_id] = now
        self.output_tokens[request_id] = self.longest_tokens[request_id] = 1

    def next_token(self, request_id: int, now: float) -> float:
        """The same for a later one; returns when the one before it came."""
        since_s = self.last_token_s[request_id]
        self.last_token_s[request_id] = now
        self.output_tokens[request_id] += 1
        self.longest_tokens[request_id] += 1
        return since_s

    def send(self, request_id: int, replica: int) -> None:
        """A request goes to a replica."""
        self.replica[request_id] = replica
        self.attempts[request_id] += 1

    def fail(self, reason: str) -> None:
        """An attempt of a client has failed, which may come again."""
        self.failures[reason] += 1

    def hold(self, request_id: int, held_s: float) -> None:
        """No replica has had a request for so long."""
        self.gateway_s[request_id] += held_s

    def abandon(self, request_id: int, now: float) -> None:
        """Close the row of a request that was given up while no replica had it."""
        self.status[request_id] = Status.aborted
        self.finished_s[request_id] = now

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Close the row of a request that was never served."""
        self.status[request_id] = Status.rejected
        self.reason[request_id] = reason
        self.finished_s[request_id] = now

    def end(self, seq: Sequence, status: Status, last_token_s: float, now: float) -> None:
        """Close the row of a sequence that ended."""
        request_id = seq.request_id
        self.status[request_id] = status
        if seq.finish_reason is FinishReason.length:
            self.reason[request_id] = "length"
        self.note(seq, last_token_s)
        self.finished_s[request_id] = now

    def forget_handover(self, request_id: int) -> None:
        """Nothing is left of the KV that was handed over, nor of a token that was to go out with it."""
        self.held_back.discard(request_id)
        self.prefill_replica[request_id] = -1
        self.kv_transfer_s[request_id] = NAN
        self.kv_transfer_bytes[request_id] = 0.0

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Forget what was answered: the engine crashed, or the client left, and the request begins anew."""
        self.status[request_id] = Status.unfinished
        self.reason.pop(request_id, None)
        if not isnan(self.first_token_s[request_id]):
            self.num_lost_first_tokens += self.samples[request_id]
            self.lost_tokens[request_id] += self.output_tokens[request_id]
            if in_crash:
                self.num_crash_tokens += self.output_tokens[request_id]
        for times_s in (self.scheduled_s, self.first_token_s, self.last_token_s, self.finished_s):
            times_s[request_id] = NAN
        for counts in (
            self.output_tokens,
            self.longest_tokens,
            self.preemptions,
            self.cached_tokens,
            self.prefill_iterations,
        ):
            counts[request_id] = 0

    def note(self, seq: Sequence, last_token_s: float) -> None:
        """Enter how far a sequence has come. A token that no client has seen yet does not count."""
        request_id = seq.request_id
        self.preemptions[request_id] = seq.num_preemptions
        if not isnan(self.first_token_s[request_id]):
            num_unseen = request_id in self.held_back
            self.last_token_s[request_id] = last_token_s
            self.output_tokens[request_id] = seq.num_emitted_tokens - num_unseen
            self.longest_tokens[request_id] = seq.num_output_tokens - num_unseen

    def table(self) -> pd.DataFrame:
        """One row a request, by request id; times in seconds, NaN where it did not happen.

        samples: answers asked for. output_tokens: of all of them; longest_tokens: of the longest. tries:
        how often its client sent it; attempts: how often it was sent to a replica; lost_tokens: answered
        before a crash or to a client that had left, in none of the other figures. wait_gateway_s: held by the
        service, or until the client sent it again. prefill_replica: that computed the prompt, if another one
        decodes, else -1; kv_transfer_s, kv_transfer_bytes: of the KV from there, from slot and blocks to the
        last byte.
        """
        ids = np.flatnonzero(np.frombuffer(self.has_arrived, np.bool_))
        names = np.array([status.name for status in Status], dtype=object)
        tenants, models = (np.array([*found], dtype=object) for found in (self._tenants, self._models))

        def column(values: array[Any]) -> NDArray[Any]:
            return np.frombuffer(values, values.typecode)[ids]

        return pd.DataFrame(
            copy=False,
            data={
                "request_id": ids,
                "session_id": column(self.session_id),
                "tenant": tenants[column(self.tenant)].tolist(),
                "model": models[column(self.model)].tolist(),
                "priority": column(self.priority),
                "replica": column(self.replica),
                "status": names[column(self.status)],
                "reason": [self.reason.get(i, "") for i in ids.tolist()],
                "arrival_s": column(self.arrival_s),
                "scheduled_s": column(self.scheduled_s),
                "first_token_s": column(self.first_token_s),
                "last_token_s": column(self.last_token_s),
                "finished_s": column(self.finished_s),
                "prompt_tokens": column(self.prompt_tokens),
                "pinned_tokens": column(self.pinned_tokens),
                "cached_tokens": column(self.cached_tokens),
                "output_tokens": column(self.output_tokens),
                "longest_tokens": column(self.longest_tokens),
                "samples": column(self.samples).astype(np.int64),
                "preemptions": column(self.preemptions),
                "prefill_iterations": column(self.prefill_iterations),
                "tries": column(self.tries),
                "attempts": column(self.attempts),
                "lost_tokens": column(self.lost_tokens),
                "wait_gateway_s": column(self.gateway_s),
                "prefill_replica": column(self.prefill_replica),
                "kv_transfer_s": column(self.kv_transfer_s),
                "kv_transfer_bytes": column(self.kv_transfer_bytes),
            },
        )


class IterationLog:
    """The iterations of one replica, a row a leap, and the token gaps that do not follow from them."""

    COUNTS = (
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_tokens_used",
        "preempted",
        "waits_for_memory",  # 1: the first of the waiting found no room for its KV
        *COUNTED,
    )
    ROW = (
        "num_iterations",
        "start_s",
        "emitted_s",  # when the decoding sequences had produced their tokens before this row
        "num_apart",  # decoding sequences for which that is not so: their gaps are noted by add_gap
        "block_phase",  # clock of the decode set modulo the block size
        "num_widening",  # decoding sequences that attend to a token more, and hold it, iteration by iteration
        *COUNTS,
    )
    TOKENS = ("kv_tokens_used", "decode_context_tokens", "prefill_pairs", "prefill_context_tokens")
    """COUNTS that may exceed 32 bits."""
    _pack = Struct(f"{len(ROW)}d").pack

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

    def add(self, flight: Flight, core: EngineCore, emitted_s: float, num_apart: int) -> None:
        """Enter a flight that is about to be committed."""
        plan, num_iterations, ends_s = flight.plan, flight.num_iterations, flight.ends_s
        self._ends_s.extend(ends_s if num_iterations == len(ends_s) else ends_s[:num_iterations])
        if self.serves_adapters:
            use = plan.adapters or NO_USE
            self._adapters.extend(use * num_iterations if plan.chunks else use)
        if plan.chunks:
            self._add_chunks(flight, core, emitted_s, num_apart)
            return
        self._rows += self._pack(
            num_iterations,
            flight.start_s,
            emitted_s,
            num_apart,
            core.decodes.clock % self.block_size,
            plan.num_widening,
            flight.num_running,
            flight.num_waiting,
            flight.num_blocks_used,
            flight.num_tokens_held + plan.num_widening + plan.num_copied_tokens,
            len(plan.preempted),
            plan.waits_for is Cause.memory,
            plan.num_decodes,
            plan.num_decode_context_tokens,
            *(0, 0, 0, 0),
            plan.num_decodes,
        )
        if num_iterations > 1:
            self._blocks_due.extend(core.decodes.blocks_due_by_phase)

    def _add_chunks(self, flight: Flight, core: EngineCore, emitted_s: float, num_apart: int) -> None:
        """What prompt chunks cost is not linear in the iteration: each iteration has its row."""
        plan, start_s, shape = flight.plan, flight.start_s, flight.shape
        assert shape is not None
        num_new = shape.prefill_tokens + plan.num_widening + plan.num_copied_tokens
        for step in range(flight.num_iterations):
            if step:
                shape = shape_of(plan, step)
            self._rows += self._pack(
                1,
                start_s,
                emitted_s,
                num_apart,
                0,
                plan.num_widening,
                flight.num_running,
                flight.num_waiting,
                flight.num_blocks_used + (core.blocks_of_repeats(plan, step) if step else 0),
                flight.num_tokens_held + (step + 1) * num_new,
                len(plan.preempted),
                plan.waits_for is Cause.memory,
                *shape[:-1],
            )
            start_s = emitted_s = flight.ends_s[step]
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


class EngineRecord(NamedTuple):
    """What is told of one engine, of one of a replica's lives."""

    pinned_token_s: float
    num_evicted: int
    unfilled: NDArray[np.int64] | None
    """As `BlockPool.unfilled`, [n, 3]."""
    adapters: AdapterCounts | None

    @classmethod
    def of(cls, core: EngineCore, end_s: float) -> EngineRecord:
        """Its life having ended at end_s."""
        pool, residents = core.pool, core.residents
        unfilled = None if pool.unfilled is None else np.array(pool.unfilled, np.int64).reshape(-1, 3)
        counts = None if residents is None else residents.counts
        return cls(pool.pinned_token_s_until(end_s), pool.num_evicted, unfilled, counts)


class PoolRecord(NamedTuple):
    """What the replicas of a pool have in common."""

    num_kv_blocks: int
    """Of each."""
    block_size: int
    kv_bytes_per_token: float = 0.0
    name: str = ""


class ReplicaRecord(NamedTuple):
    """The pool that a replica belongs to, for how long it was paid, and when it served."""

    pool: int
    start_s: float
    end_s: float
    ready_s: float | None = 0.0
    """From when on it took requests; None: it never did."""
    drain_s: float | None = None
    """From when on it was not wanted any more; None: to the end."""
    down: tuple[tuple[float, float], ...] = ()
    """From when until when, after each crash."""


class RecoveryRecord(NamedTuple):
    """What was done to go on with requests whose replica had crashed. Tokens and bytes are those of KV."""

    num_resumed: int = 0
    """Times that a request went on where it was."""
    num_recomputed_tokens: int = 0
    """Lost in crashes, and computed a second time, whoever began again or went on."""
    mirrored_bytes: float = 0.0
    num_restored_tokens: int = 0
    restored_bytes: float = 0.0


class LinkRecord(NamedTuple):
    """What KV has travelled on: a port in one direction, or a switch."""

    name: str
    bytes_per_s: float
    carried_bytes: float


def replicas_throughout(num_replicas: int, end_s: float) -> tuple[ReplicaRecord, ...]:
    """Replicas of the first pool that are there for the whole run."""
    return (ReplicaRecord(0, 0.0, end_s),) * num_replicas


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """All that a run leaves, from which every metric is computed.

    requests: RequestLog.table(). iterations: one row an iteration, by (replica, iteration); start_s and
    duration_s in seconds, the fields of IterationShape, sequences running and waiting at the plan, KV blocks
    and tokens held at the iteration's end, sequences preempted by the plan. replicas: by index, all that
    there ever were. unfilled: where KV is reserved ahead, `BlockPool.unfilled` of all replicas, [n, 4]:
    replica, first iteration, iteration behind the last, token places; else None.
    interrupted: the run was stopped by hand at end_s. overload, missed: why it was ended early there,
    if it was. events: `sim.records.events.logged_events`.
    own_gaps: between two tokens of one request where these did not come at two iterations with decodes, one
    behind the other, of one replica: request_id, replica, since_s, end_s. All others do, see `token_times`.
    pinned_token_s: tokens of pinned prefixes times the seconds for which they were kept.
    num_evicted_blocks: KV blocks whose content was given up for another, of all replicas and the whole run.
    num_lost_first_tokens: of answers in vain, which their requests' rows do not count. num_crash_tokens: of
    the tokens lost, those lost in crashes. troubles: those that happened.
    num_resends: requests sent again by the service. failures: by reason, how often a client was refused or
    left alone with its request.
    recovery: of those whose replica crashed. links: between replicas, those that KV was sent over.
    adapters: what those of each replica did; empty where none are served.
    """

    requests: pd.DataFrame
    iterations: pd.DataFrame
    gap_s: NDArray[np.float64]
    gap_count: NDArray[np.int64]
    gap_end_s: NDArray[np.float64]
    pools: tuple[PoolRecord, ...]
    replicas: tuple[ReplicaRecord, ...]
    end_s: float
    interrupted: bool = False
    overload: Overload | None = None
    missed: Missed | None = None
    events: pd.DataFrame = field(default_factory=lambda: logged_events([]))
    own_gaps: pd.DataFrame = field(default_factory=lambda: own_gaps_table([]))
    num_evicted_blocks: int = 0
    pinned_token_s: float = 0.0
    unfilled: NDArray[np.int64] | None = None
    num_lost_first_tokens: int = 0
    num_crash_tokens: int = 0
    troubles: tuple[Trouble, ...] = ()
    num_resends: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    recovery: RecoveryRecord = field(default_factory=RecoveryRecord)
    links: tuple[LinkRecord, ...] = ()
    adapters: Iterable[AdapterCounts] = ()

    @property
    def num_replicas(self) -> int:
        """All that there ever were."""
        return len(self.replicas)

    @property
    def pool_by_replica(self) -> NDArray[np.int64]:
        """Index of each replica's pool."""
        return np.array([replica.pool for replica in self.replicas], np.int64)

    def by_replica(self, name: str) -> NDArray[np.float64]:
        """A figure of `PoolRecord` for each replica."""
        values = np.array([getattr(pool, name) for pool in self.pools], np.float64)
        return values[self.pool_by_replica]

    def rows_by_pool(self) -> list[NDArray[np.bool_] | slice]:
        """Of each pool, which rows of `iterations` are its own."""
        if len(self.pools) == 1:
            return [slice(None)]
        pool = self.pool_by_replica[self.iterations["replica"].to_numpy()]
        return [pool == index for index in range(len(self.pools))]
