"""Records the activity of one replica: its iterations, its events, and the times of its requests.

`LastTokens` holds the times at which the sequences of an engine produced their latest tokens. Sequences that
decode together share one time. The iteration log derives inter-token latencies from the ends of iterations;
only the gaps that differ from those of the other sequences are logged one by one.
"""

from __future__ import annotations

from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Final

from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan, Transfer
from policies.core.sequence import COMPUTING, DECODING, ENDED, LOADING, PAUSED, Sequence
from sim.engine.frontend import Pending
from sim.engine.iteration_times import RunningStep
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
    parents of branches. passes: the passes of a replica that speculates.
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
        """Returns whether a plan without transfers changes nothing that `planned` records."""
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
        """Records completed iterations; returns the outcome for the core, which commits them next."""
        core, plan, tokens = self._core, step.plan, self.tokens
        outcome, num_separate_gaps = _OUTCOMES[step.num_iterations], 0
        if self._has_batches:  # each sequence has its own gaps
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

        is_lost: the cause is a failed KV transfer from another replica, not its client. Returns the time of
        its latest token, s; NaN if it has none.
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
        """Closes the records and starts empty ones; returns the closed records.

        requests: a copy of the log, in which the progress of unfinished requests is recorded.
        """
        own, events, after = self.requests, self.events, self.events.continued()
        self.requests = requests
        self.stopped(pending, now)
        self.requests, self.events = own, after
        return self.iterations.cut(), events.rows

    def discard(self) -> None:
        """Drops the logs of iterations and events, and starts empty ones."""
        self.iterations.cut()
        self.events = self.events.continued()
        self.lost_engines.clear()


_BYTES = 4  # per parent that is drawn


class LastTokens:
    """Times of the latest tokens of one engine, or of the engine that replaced it after a crash."""

    __slots__ = ("_branched_s", "_core", "_requests", "_seed", "apart", "last_decode_s")

    def __init__(self, core: EngineCore, requests: RequestLog, seed: int) -> None:
        self.last_decode_s = 0.0
        """Time of the latest token of decoding sequences that are not in `apart` and have no branches, s."""
        self.apart: dict[Sequence, float] = {}
        """Time of the latest token, s, of sequences that produced it in a prefill or before a swap-out."""
        self._core = core
        self._requests = requests
        self._seed = seed
        self._branched_s: dict[int, float] = {}  # by request id, for sequences with branches

    def reset(self, core: EngineCore) -> None:
        """Forgets all sequences; `core` replaces the engine that has crashed."""
        self._core = core
        self.apart.clear()
        self._branched_s.clear()

    def emit(self, seq: Sequence, time_s: float) -> None:
        """Sets the time of a token that a sequence has produced in a prefill or before a swap-out."""
        if seq.request.branching is None:
            self.apart[seq] = time_s
        else:
            self._branched_s[seq.request_id] = time_s

    def forget(self, seq: Sequence) -> None:
        """Removes a sequence that has ended or leaves the replica."""
        self.apart.pop(seq, None)
        self._branched_s.pop(seq.request_id, None)

    def last_s(self, seq: Sequence) -> float:
        """Returns the time at which a sequence produced its latest token, s; NaN if it has none."""
        if seq in self.apart:
            return self.apart[seq]
        if seq.request_id in self._branched_s:
            return self._branched_s[seq.request_id]
        is_emitting = seq.state in (COMPUTING, DECODING, PAUSED)
        if is_emitting and seq.request.branching is None and seq not in self._core.arrived:
            return self.last_decode_s
        return self._requests.last_token_s[seq.request_id]

    def preempted(self, seq: Sequence) -> None:
        """Stores the time of the latest token of a preempted sequence, where its next gap begins."""
        if seq.state is ENDED:  # aborted before a plan could list it
            return
        requests, request_id = self._requests, seq.request_id
        last_s = self._branched_s.pop(request_id, self.last_decode_s)
        last_s = self.apart.pop(seq, last_s)
        # Without a new token since the last preemption, the stored time stays valid.
        num_emitted = seq.num_emitted_tokens
        if seq.request.branching is None:  # a token that is discarded and computed again counts once
            num_emitted = max(num_emitted, seq.num_lost + 1 - seq.num_prompt_tokens)
        if num_emitted > requests.output_tokens[request_id]:
            requests.last_token_s[request_id] = last_s
            requests.output_tokens[request_id] = num_emitted

    def log_gaps(self, plan: StepPlan, end_s: float, log: IterationLog) -> int:
        """Logs the gaps at the end of a plan's first iteration that differ from those of the other sequences.

        Returns their number. A sequence with a complete output, which an asynchronous engine holds for one
        more step, or a static batch until its end, has no further gap, even if it is idle in that step.
        """
        core = self._core
        if plan.num_decodes == plan.num_branches:
            return 0
        kept: dict[Sequence, float] = {}
        if plan.idle or core.paused:
            for seq in chain(plan.idle, core.paused.values()):
                if seq.finish_reason is None and seq.request.branching is None:
                    kept[seq] = self.last_s(seq)
        num_logged = 0
        for seq, emitted_s in self.apart.items():
            if seq.finish_reason is not None:
                kept[seq] = emitted_s
            elif seq not in kept:
                num_logged += 1
                log.add_gap(seq.request_id, emitted_s, end_s)
        self.apart = kept
        return num_logged

    def log_all_gaps(self, plan: StepPlan, end_s: float, log: IterationLog) -> None:
        """Logs the gaps of a plan's sequences one by one, because others decode at other times."""
        apart = self.apart
        for seq in plan.decoding:
            if seq.finish_reason is None:  # else aborted on the way
                log.add_gap(seq.request_id, self.last_s(seq), end_s)
                apart[seq] = end_s

    def advance_branches(self, plan: StepPlan, end_s: float, log: IterationLog) -> dict[int, tuple[int, ...]]:
        """Logs the gaps of branches that get a token; returns the parents of new branches, by request id."""
        for seq in plan.branched:
            since_s = self.last_s(seq)
            for _ in range(seq.width):
                log.add_gap(seq.request_id, since_s, end_s)
            self._branched_s[seq.request_id] = end_s
        served = [*plan.branched] + [chunk.seq for chunk in plan.chunks if chunk.completes]
        choices = ((seq.request_id, chosen_parents(self._seed, seq)) for seq in served)
        return {request_id: parents for request_id, parents in choices if parents is not None}


def draw_parents(seed: int, request_id: int, num_tokens: int, width: int) -> tuple[int, ...]:
    """Returns, for each of `width` new branches of a beam or tree search, the old branch that it continues.

    They are drawn at random, as no model computes scores: all equally likely, independently of each other. In
    a real beam search the best hypotheses have more children, so its branches share more tokens. num_tokens:
    the number of the output token at which the branches are chosen. The result depends only on the arguments,
    on every machine.
    """
    drawn = b""
    while len(drawn) < width * _BYTES:
        name = f"{seed}/parents/{request_id}/{num_tokens}/{len(drawn)}"
        drawn += blake2b(name.encode(), digest_size=64).digest()
    words = (drawn[i * _BYTES : (i + 1) * _BYTES] for i in range(width))
    return tuple(int.from_bytes(word, "little") % width for word in words)


def chosen_parents(seed: int, seq: Sequence) -> tuple[int, ...] | None:
    """Returns the parents of a sequence's branches at its next token; None: the branches are unchanged."""
    branching = seq.request.branching
    if branching is None or branching.every is None:
        return None
    num_before = seq.num_output_tokens
    if not num_before or num_before % branching.every:  # the first token is sampled from the prompt alone
        return None
    return draw_parents(seed, seq.request_id, num_before + 1, seq.width)
