"""Records what an engine does while it serves: its requests, its iterations and the times of its tokens.

It keeps 8 bytes for each token, 180 for each iteration, 700 for each request and 12 for each 16 tokens of its
prompt, up to a limit.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from math import isnan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from hwmodels.iterations import COUNTED
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from policies.speculation.engine.drafts import DraftPlan
from realengine.engine import Engine
from realengine.serving.answer import Answer, DraftCounts
from sim.engine.iteration_times import shape_of
from sim.records.requests import RequestLog, Status
from sim.records.run import PoolRecord, RunRecords, replicas_throughout
from sim.speculation.log import DRAFT_WORK_COLUMNS, first_shape
from sim.workload.recording import TrafficLog

REQUEST_BYTES = 700
SEGMENT_BYTES = 12
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

_LOG = logging.getLogger("windtunnel.serve")


class ServingRecorder:
    """Observes one engine from now on. max_bytes: memory after which nothing more is recorded."""

    def __init__(self, engine: Engine, max_bytes: float) -> None:
        self._engine = engine
        self._core = engine.core
        self._bytes_left = max_bytes
        self._start_s = engine.clock.now()
        self._requests = RequestLog()
        self._traffic = TrafficLog()
        self._times_s: dict[int, array[float]] = {}  # of the tokens of each request's first output
        self._steps = bytearray()  # rows of STEP
        self._unread: deque[NDArray[np.void]] = deque()  # rows of launches that are not read yet
        self._is_committed = True  # the last of them
        self._speculates = False
        self._drafts = DraftCounts([])
        self.full_s: float | None = None
        """Time, since the start, at which the memory was full; None: everything is recorded."""

    @property
    def num_requests(self) -> int:
        """Number of recorded requests."""
        return len(self._times_s)

    @property
    def drafts(self) -> DraftCounts:
        """Counts of the draft tokens of the requests that have ended."""
        return self._drafts

    def entered(self, seq: Sequence, now_s: float) -> None:
        request = seq.request
        if self._has_room(REQUEST_BYTES + SEGMENT_BYTES * len(request.prompt.segments)):
            room = self._core.max_model_len - request.prompt.num_tokens
            self._traffic.add(request, request.max_tokens or room, request.arrival_s)
            self._requests.arrive(request)
            self._requests.send(seq.request_id, 0)
            self._requests.tries[seq.request_id] = 1
            self._times_s[seq.request_id] = array("d")

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
        log = self._requests
        for seq in plan.admitted:
            if seq.request_id in self._times_s and isnan(log.scheduled_s[seq.request_id]):
                log.schedule(seq, now_s)
        for chunk in plan.chunks:
            if chunk.seq.request_id in self._times_s:
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
            if self._has_room(STEP.itemsize):
                self._steps += row.tobytes()
            self._is_committed = self._is_committed or not self._unread

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        times_s = self._times_s.get(answer.request_id)
        if times_s is None or not self._has_room(8 * num_tokens):
            return
        times_s.extend([now_s] * num_tokens)
        if answer.is_finished:
            log = self._requests
            log.status[answer.request_id] = Status.finished
            log.finished_s[answer.request_id] = now_s
            if answer.outputs[0].finish_reason == "length":
                log.reason[answer.request_id] = "length"
            if answer.drafts is not None:
                self._add_drafts(answer.drafts)

    def traffic_table(self) -> pd.DataFrame:
        """Returns the requests for `workload=recording`; call it after `records`.

        The output of a request that was aborted would have had as many tokens as it allows at most.
        """
        residents = self._core.residents
        adapters = () if residents is None else residents.registry.adapters
        return self._traffic.table({adapter.name: adapter.rank for adapter in adapters}, self._start_s)

    def _note_ends(self, end_s: float) -> None:
        """Notes the output lengths of complete requests, and when the others were aborted."""
        log = self._requests
        for request_id, times_s in self._times_s.items():
            if log.status[request_id] == Status.finished:
                self._traffic.set_output(request_id, max(1, len(times_s)))
            else:
                finished_s = log.finished_s[request_id]
                self._traffic.abort(request_id, end_s if isnan(finished_s) else finished_s)

    def records(self) -> RunRecords:
        """Returns the records since the start, in seconds from it; call it once, after the engine's end."""
        log, start_s = self._requests, self._start_s
        for request_id, times_s in self._times_s.items():
            if times_s:
                log.first_token_s[request_id], log.last_token_s[request_id] = times_s[0], times_s[-1]
            log.longest_tokens[request_id] = len(times_s)
            log.output_tokens[request_id] = len(times_s) * log.samples[request_id]
        end_s = self._engine.clock.now() - start_s if self.full_s is None else self.full_s
        self._note_ends(start_s + end_s)
        gaps, requests = self._gaps(), log.table()
        moments = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
        requests = requests.assign(**{name: requests[name] - start_s for name in moments})
        pool = self._core.block_pool
        return RunRecords(
            requests=requests,
            iterations=self._iterations(),
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

    def _has_room(self, num_bytes: int) -> bool:
        """Takes memory; returns false, for good, once it is full."""
        if self.full_s is not None:
            return False
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            self.full_s = self._engine.clock.now() - self._start_s
            _LOG.warning("The memory for records is full; the run folder will end here.")
        return self.full_s is None

    def _end(self, seq: Sequence, status: Status, now_s: float, reason: str = "") -> None:
        request_id, log = seq.request_id, self._requests
        if request_id not in self._times_s or self.full_s is not None:
            return
        log.preemptions[request_id] = seq.num_preemptions
        if log.status[request_id] == Status.unfinished:
            log.status[request_id] = status
            log.finished_s[request_id] = now_s
            if reason:
                log.reason[request_id] = reason

    def _add_drafts(self, drafts: DraftCounts) -> None:
        total = self._drafts
        total.num_drafts += drafts.num_drafts
        total.num_draft_tokens += drafts.num_draft_tokens
        total.num_accepted_tokens += drafts.num_accepted_tokens

    def _gaps(self) -> pd.DataFrame:
        """Returns the gaps between the tokens of each request, in the columns of `RunRecords.own_gaps`.

        The hypotheses of a beam search have tokens at the same times.
        """
        ids, since_s, end_s = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0)]
        for request_id, times_s in self._times_s.items():
            moments = np.frombuffer(times_s, np.float64) - self._start_s if times_s else np.zeros(0)
            num_outputs = self._requests.samples[request_id]
            ids.append(np.full(max(0, len(moments) - 1) * num_outputs, request_id))
            since_s.append(np.repeat(moments[:-1], num_outputs))
            end_s.append(np.repeat(moments[1:], num_outputs))
        return pd.DataFrame(
            {
                "request_id": np.concatenate(ids),
                "replica": np.zeros(sum(map(len, ids)), np.int32),
                "since_s": np.concatenate(since_s),
                "end_s": np.concatenate(end_s),
            }
        )

    def _iterations(self) -> pd.DataFrame:
        """Returns one row per iteration; the iterations of one launch share its time evenly.

        A launch that waited for the one before on the device begins when that one was read.
        """
        steps = np.frombuffer(bytes(self._steps), STEP)
        num = steps["num_iterations"]
        begin_s = np.maximum(steps["start_s"], np.concatenate([steps["start_s"][:1], steps["end_s"][:-1]]))
        each_s = (steps["end_s"] - begin_s) / num
        rows = np.repeat(np.arange(len(steps)), num)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(num) - num, num)
        columns = ["running", "waiting", "kv_blocks_used", "kv_tokens_used", "preempted", *COUNTED]
        if self._speculates:
            columns += DRAFT_WORK_COLUMNS
        table = pd.DataFrame({name: steps[name][rows] for name in columns})
        for column in GROWING:
            table[column] += nth * table["decode_seqs"]
        table.insert(0, "replica", np.zeros(len(rows), np.int32))
        table.insert(1, "iteration", np.arange(len(rows)))
        table.insert(2, "start_s", begin_s[rows] + nth * each_s[rows] - self._start_s)
        table.insert(3, "duration_s", each_s[rows])
        table["waits_for_memory"] = np.zeros(len(rows), np.int32)
        return table
