"""Records what an engine does while it serves: its requests, its iterations and the times of its tokens.

It keeps 180 bytes for each iteration, and the requests as `request_records.py` says, up to a limit.
"""

from __future__ import annotations

from collections import deque
from math import isnan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from experiments.serve.engine.request_records import RequestRecords
from hwmodels.iterations import COUNTED
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from policies.speculation.engine.drafts import DraftPlan
from realengine.engine import Engine
from realengine.serving.answer import Answer, DraftCounts
from sim.engine.iteration_times import shape_of
from sim.records.requests import Status
from sim.records.run import PoolRecord, RunRecords, replicas_throughout
from sim.speculation.log import DRAFT_WORK_COLUMNS, first_shape

COUNTS = ("num_iterations", "running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted")
STEP = np.dtype(
    [
        ("start_s", "f8"),
        ("end_s", "f8"),
        *((name, "i8") for name in (*COUNTS, *COUNTED, *DRAFT_WORK_COLUMNS)),
    ]
)
"""One launch: its plan was made at start_s, and its tokens were read at end_s."""
GROWING = ("decode_context_tokens", "kv_tokens_used")
"""Columns that grow by one token per decoding sequence from one iteration of a launch to the next."""


class ServingRecorder:
    """Observes one engine from now on. max_bytes: memory after which nothing more is recorded."""

    def __init__(self, engine: Engine, max_bytes: float) -> None:
        self._engine = engine
        self._core = engine.core
        self._requests = RequestRecords(max_bytes, engine.clock.now)
        self._steps = bytearray()  # rows of STEP
        self._unread: deque[NDArray[np.void]] = deque()  # rows of launches that are not read yet
        self._is_committed = True  # the last of them
        self._speculates = False
        self._drafts = DraftCounts([])

    @property
    def full_s(self) -> float | None:
        """Time, since the start, at which the memory was full; None: everything is recorded."""
        return self._requests.full_s

    @property
    def num_requests(self) -> int:
        """Number of recorded requests."""
        return len(self._requests)

    @property
    def drafts(self) -> DraftCounts:
        """Counts of the draft tokens of the requests that have ended."""
        return self._drafts

    def entered(self, seq: Sequence, now_s: float) -> None:
        request = seq.request
        room = self._core.max_model_len - request.prompt.num_tokens
        if self._requests.arrive(request, request.max_tokens or room):
            self._requests.log.send(seq.request_id, 0)

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        if not self._is_committed:
            self._unread.pop()  # its launch has failed
        core, drafts = self._core, plan.drafts if isinstance(plan.drafts, DraftPlan) else None
        shape = shape_of(plan, 0) if drafts is None else first_shape(plan, drafts)
        row = np.zeros((), STEP)
        row["start_s"] = now_s
        counts = (
            num_iterations,
            len(core.running),
            core.num_waiting,
            core.block_pool.num_used,
            core.num_tokens_held,
            len(plan.preempted),
        )
        columns = (*COUNTS, *COUNTED, *(DRAFT_WORK_COLUMNS if shape.drafts else ()))
        for name, count in zip(columns, (*counts, *shape.counts, *(shape.drafts or ())), strict=True):
            row[name] = count
        self._speculates |= drafts is not None
        self._unread.append(row)
        self._is_committed = False
        log = self._requests.log
        for seq in plan.admitted:
            if seq.request_id in self._requests and isnan(log.scheduled_s[seq.request_id]):
                log.schedule(seq, now_s)
        for chunk in plan.chunks:
            if chunk.seq.request_id in self._requests:
                log.prefill_iterations[chunk.seq.request_id] += 1

    def waited(self, now_s: float) -> None:
        pass

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        self._is_committed = True
        _, finished = progress
        for seq in finished:
            self._end(seq, Status.finished, now_s, "length")

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        pass

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        self._end(seq, Status.aborted if reason is FinishReason.aborted else Status.finished, now_s)

    def read(self, now_s: float) -> None:
        if self._unread:
            row = self._unread.popleft()
            row["end_s"] = now_s
            if self._requests.has_room(STEP.itemsize):
                self._steps += row.tobytes()
            self._is_committed = self._is_committed or not self._unread

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        if not self._requests.emitted(answer.request_id, num_tokens, now_s):
            return
        if answer.is_finished:
            log = self._requests.log
            log.status[answer.request_id] = Status.finished
            log.finished_s[answer.request_id] = now_s
            if answer.outputs[0].finish_reason == "length":
                log.reason[answer.request_id] = "length"
            if answer.drafts is not None:
                self._add_drafts(answer.drafts)

    def traffic_table(self) -> pd.DataFrame:
        """Returns the requests for `workload=recording`; call it after `records`."""
        residents = self._core.residents
        adapters = () if residents is None else residents.registry.adapters
        return self._requests.traffic_table({adapter.name: adapter.rank for adapter in adapters})

    def records(self) -> RunRecords:
        """Returns the records since the start, in seconds from it; call it once, after the engine's end."""
        end_s = self._requests.end_s()
        gaps, requests = self._requests.gaps(), self._requests.table(end_s)
        pool = self._core.block_pool
        return RunRecords(
            requests=requests,
            iterations=iterations_table(
                np.frombuffer(bytes(self._steps), STEP), self._requests.start_s, speculates=self._speculates
            ),
            gap_s=(gaps["end_s"] - gaps["since_s"]).to_numpy(),
            gap_count=np.ones(len(gaps), np.int64),
            gap_end_s=gaps["end_s"].to_numpy(),
            pools=(PoolRecord(pool.num_blocks, pool.block_size),),
            replicas=replicas_throughout(1, end_s),
            end_s=end_s,
            own_gaps=gaps,
            num_evicted_blocks=pool.num_evicted,
            num_discarded_tokens=self._core.num_discarded,
        )

    def _end(self, seq: Sequence, status: Status, now_s: float, reason: str = "") -> None:
        records = self._requests
        if seq.request_id in records and records.full_s is None:
            records.log.preemptions[seq.request_id] = seq.num_preemptions
            records.end(seq.request_id, status, now_s, reason)

    def _add_drafts(self, drafts: DraftCounts) -> None:
        total = self._drafts
        total.num_drafts += drafts.num_drafts
        total.num_draft_tokens += drafts.num_draft_tokens
        total.num_accepted_tokens += drafts.num_accepted_tokens


def iterations_table(steps: NDArray[np.void], since_s: float, *, speculates: bool = False) -> pd.DataFrame:
    """Returns one row per iteration, with times from since_s; those of one launch share its time evenly.

    A launch that waited for the one before on the device begins when that one was read.
    """
    num = steps["num_iterations"]
    begin_s = np.maximum(steps["start_s"], np.concatenate([steps["start_s"][:1], steps["end_s"][:-1]]))
    each_s = (steps["end_s"] - begin_s) / num
    rows = np.repeat(np.arange(len(steps)), num)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(num) - num, num)
    columns = ["running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", *COUNTED]
    if speculates:
        columns += DRAFT_WORK_COLUMNS
    table = pd.DataFrame({name: steps[name][rows] for name in columns})
    for column in GROWING:
        table[column] += nth * table["decode_seqs"]
    table.insert(0, "replica", np.zeros(len(rows), np.int32))
    table.insert(1, "iteration", np.arange(len(rows)))
    table.insert(2, "start_s", begin_s[rows] + nth * each_s[rows] - since_s)
    table.insert(3, "duration_s", each_s[rows])
    table["waits_for_memory"] = np.zeros(len(rows), np.int32)
    return table
