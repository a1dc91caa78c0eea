"""Records the activity of one replica: its iterations, its events, and the times of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan, Transfer
from policies.core.sequence import DECODING, LOADING, Sequence
from sim.engine.intake import Pending
from sim.engine.last_tokens import LastTokens
from sim.engine.running_step import RunningStep
from sim.records.event_rows import EventRows
from sim.records.events import EventLog
from sim.records.iterations import IterationLog
from sim.records.requests import FINISHED, RequestLog
from sim.records.run import EngineRecord

if TYPE_CHECKING:
    from sim.speculation.passes import Passes


class _Outcomes(dict[int, StepOutcome]):
    """The outcomes of steps by their number of iterations, each made once."""

    def __missing__(self, num_iterations: int) -> StepOutcome:
        self[num_iterations] = outcome = StepOutcome(num_iterations)
        return outcome


_OUTCOMES: Final = _Outcomes()


class Recorder:
    """The logs of one replica.

    replica: its index. frontend_s, frontend_times: see `EventLog`. seed: for random draws, such as the
    parents of branches. passes: of a replica that speculates.
    """

    def __init__(
        self,
        replica: int,
        core: EngineCore,
        requests: RequestLog,
        frontend_s: float,
        seed: int,
        frontend_times: dict[int, float] | None = None,
        passes: Passes | None = None,
    ) -> None:
        self.replica = replica
        self._passes = passes
        self.requests = requests
        self.iterations = IterationLog(
            replica, core.block_pool.block_size, core.residents is not None, passes is not None
        )
        self.events = EventLog(frontend_s, frontend_times)
        self.lost_engines: list[EngineRecord] = []
        """Records of the engines that this replica has lost in crashes, in order."""
        self._frontend_s, self._frontend_times = frontend_s, frontend_times
        self.tokens = LastTokens(core, requests, seed)
        self._follow(core)

    def _follow(self, core: EngineCore) -> None:
        self._core = core
        self._paused = core.paused
        self._has_batches = core.batches is not None

    def _is_as_before(self, plan: StepPlan) -> bool:
        """Returns whether a plan without transfers changes nothing that is recorded at plans."""
        events = self.events
        if plan.admitted or events.new or plan.waits_for is not events.cause or plan.preempted:
            return False
        core = self._core
        return not (self._paused or events.paused or (core.residents is not None and core.loading))

    def planned(self, plan: StepPlan | None, transfers: list[Transfer], now: float) -> None:
        """Records a plan and its transfers; None: there is nothing to compute.

        Need not be called for a plan that `is_unasked`, without transfers, while the events are quiet.
        """
        if plan is not None and not transfers and self._is_as_before(plan):
            return
        core = self._core
        self.events.planned(core, plan, transfers, now)
        if plan is None:
            for seq in core.lost:
                self.tokens.preempted(seq)
            return
        for seq in plan.preempted:
            self.tokens.preempted(seq)
        for seq in plan.admitted:
            self._scheduled(seq, now)

    def _scheduled(self, seq: Sequence, now: float) -> None:
        """Records the admission of a sequence, which may have been preempted before."""
        self.requests.schedule(seq, now)
        if seq.state is DECODING and seq.request.branching is None:  # swapped in
            self.tokens.emit(seq, self.requests.last_token_s[seq.request_id])

    def ran(self, step: RunningStep) -> StepOutcome:
        """Records iterations that have run; returns the outcome for the core, which commits them next."""
        core, plan, tokens = self._core, step.plan, self.tokens
        outcome, num_separate_gaps = _OUTCOMES[step.num_iterations], 0
        if self._has_batches:  # each sequence has gaps of its own
            tokens.log_all_gaps(plan, step.end_s, self.iterations)
            num_separate_gaps = plan.num_decodes - plan.num_branches
        elif tokens.apart or plan.idle or self._paused:
            num_separate_gaps = tokens.log_gaps(plan, step.ends_s[0], self.iterations)
        if core.may_branch:
            num_separate_gaps += plan.num_branches
            parents = tokens.advance_branches(plan, step.end_s, self.iterations)
            outcome = outcome._replace(parents=parents)
        if core.ending:
            num_separate_gaps += core.running_set.num_surplus(plan)
        self.iterations.add(step, core, tokens.last_decode_s, num_separate_gaps)
        if plan.num_decodes > plan.num_branches:
            tokens.last_decode_s = step.end_s
        if plan.chunks:
            num_prefills = self.requests.prefill_iterations
            for chunk in plan.chunks:
                num_prefills[chunk.seq.request_id] += step.num_iterations
        if self._passes is not None:
            assert self.iterations.drafts is not None
            return self._passes.ran(core, step, self.iterations.drafts)
        return outcome

    def prefilled(self, seq: Sequence, now: float) -> None:
        """Records the token that a prefill, or a recomputation, has produced."""
        requests, request_id = self.requests, seq.request_id
        emitted_s = now
        if seq.num_output_tokens == 1:
            requests.first_token_s[request_id] = now
        else:  # resumed after a preemption: the gap spans its absence
            num_new = seq.num_emitted_tokens - requests.output_tokens[request_id]
            if not num_new:  # the token that its preemption has discarded (`Release.discards_unread`)
                emitted_s = requests.last_token_s[request_id]
            for _ in range(num_new):
                self.iterations.add_gap(request_id, requests.last_token_s[request_id], now)
            self.events.prefilled(seq, now)
        self.tokens.emit(seq, emitted_s)

    def finished(self, seq: Sequence, now: float) -> None:
        """Records that the output of a request is complete."""
        self.tokens.forget(seq)
        self.requests.end(seq, FINISHED, now, now)

    def aborts(self, seq: Sequence, now: float, *, is_lost: bool) -> float:
        """Records that a sequence is about to be aborted.

        is_lost: because its KV cannot be transferred from another replica, not because of its client. Returns
        the time of its latest token, s; NaN if it has none.
        """
        last_token_s = self.tokens.last_s(seq)
        self.events.leave(seq, now, is_lost=is_lost)
        self.tokens.forget(seq)
        return last_token_s

    def migrated(self, seq: Sequence) -> None:
        """Records that a sequence continues in another replica."""
        self.tokens.forget(seq)

    def stopped(self, pending: list[Pending], now: float) -> None:
        """Records the progress of the requests that are unfinished when the run ends."""
        for seq in self._core.unfinished:
            if self.requests.replica[seq.request_id] == self.replica:  # else it continues in another replica
                self.requests.record_progress(seq, self.tokens.last_s(seq))
            self.events.leave(seq, now)
        for entry in pending:
            self.events.left_unseen(entry.request, now, sent_s=entry.sent_s)

    def crashed(self, lost: list[Sequence], pending: list[Pending], core: EngineCore, now: float) -> None:
        """Records a crash that loses sequences and pending requests; `core` replaces the engine."""
        for seq in lost:
            self.requests.record_progress(seq, self.tokens.last_s(seq))
            if seq.state is not LOADING:
                self.requests.lose_kv(seq.request_id, seq.num_computed)
            self.events.leave(seq, now, is_lost=True)
        for entry in pending:
            self.events.left_unseen(entry.request, now, is_lost=True, sent_s=entry.sent_s)
        self.lost_engines.append(EngineRecord.of(self._core, now))
        self.events = EventLog(self._frontend_s, self._frontend_times, after=self.events)
        self._follow(core)
        self.tokens.reset(core)

    @property
    def num_bytes(self) -> int:
        """Memory of the logs of iterations and events, bytes."""
        return self.iterations.num_bytes + self.events.rows.num_bytes

    def cut(self, requests: RequestLog, pending: list[Pending], now: float) -> tuple[IterationLog, EventRows]:
        """Ends the records now, and goes on with empty ones; returns those up to now.

        requests: a copy of the log, in which the progress of unfinished requests is recorded.
        """
        own, events, after = self.requests, self.events, self.events.continued()
        self.requests = requests
        self.stopped(pending, now)
        self.requests, self.events = own, after
        return self.iterations.cut(), events.rows

    def discard(self) -> None:
        """Drops the logs of iterations and events, and goes on with empty ones."""
        self.iterations.cut()
        self.events = self.events.continued()
        self.lost_engines.clear()
