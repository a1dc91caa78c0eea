"""The event log of a replica: events of sequences, with the causes of their waiting times.

A wait begins with the arrival or a preemption of a sequence, and ends when it is scheduled or ends. It is
split by cause, in seconds:

    arrival     reaches the engine    first plan with it             load begins      scheduled
       |-- frontend --|----- iteration -----|-- slot, ..., adapter --|--- load ---|
                                   preempted |-- slot, ..., adapter --|--- load ---|

Between two plans, all sequences in the queue wait for the cause that the first of the two plans reports
(`Cause`). One clock per cause is therefore enough: a wait is the difference of two readings, for any queue
length. A period with one cause is added once, for any number of plans: leaping and stepping give
bit-identical sums.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from policies.core.engine import EngineCore
from policies.core.plan import Cause, StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import ACTIVE_STATES, ENDED, PREFILLING, WAITING, Sequence
from sim.records.event_rows import NO_WAIT, TIERS, Event, EventRows


class EventLog:
    """The events of one replica, logged as they happen.

    frontend_s: seconds from the arrival of a request until it reaches the engine, unless its id is in
    frontend_times, from which they are then taken. after: the log of the crashed engine that this one
    continues.
    """

    def __init__(
        self,
        frontend_s: float = 0.0,
        frontend_times: dict[int, float] | None = None,
        after: EventLog | None = None,
    ) -> None:
        self._frontend_s, self._frontend_times = frontend_s, frontend_times
        self.rows: EventRows = EventRows() if after is None else after.rows
        self.new: list[Sequence] = []  # in the engine, included in no plan yet
        self._adopted_s: dict[int, float] = {}  # time at which another replica sent it, by request id
        self._waits: dict[int, _Wait] = {}  # by request id, after the first plan
        self.paused: dict[int, Sequence] = {}  # as of the latest plan
        self._num_lost = 0  # already logged preemptions of steps without work
        # The clocks of the causes: that of `cause` runs since `_since_s`, the others are stopped.
        self._total_s = [0.0] * len(Cause)
        self.cause: Cause | None = None  # the queue's waiting cause, as of the latest plan
        self._since_s = 0.0
        self.is_quiet = True
        """Whether no sequence waits for its first plan, the queue has no waiting cause, and none is paused.
        """

    def continued(self) -> EventLog:
        """Returns a log without rows that continues from the current state.

        This one must not be used further.
        """
        made = EventLog(self._frontend_s, self._frontend_times)
        made.new, made._waits = self.new.copy(), self._waits.copy()
        made._adopted_s, made.paused, made._num_lost = self._adopted_s, self.paused, self._num_lost
        made._total_s, made.cause, made._since_s = self._total_s, self.cause, self._since_s
        made.is_quiet = self.is_quiet
        return made

    def cut(self) -> EventRows:
        """Returns all rows so far, and removes them from this log."""
        taken, self.rows = self.rows, EventRows()
        return taken

    def enter(self, seq: Sequence, sent_s: float | None = None) -> None:
        """Adds a sequence that has reached the engine. sent_s: time at which a replica sent it, or None."""
        self.new.append(seq)
        self.is_quiet = False
        if sent_s is not None:
            self._adopted_s[seq.request_id] = sent_s

    def hand_over(self, seq: Sequence, now: float) -> None:
        """Logs that a sequence stops here because another replica continues it after a KV transfer."""
        self.rows.add(Event.hand_over, now, seq.request_id, seq.num_computed, seq.num_known)

    def take_back(self, seq: Sequence, now: float) -> None:
        """Logs that a transferred sequence continues here because the other replica had no room for it."""
        self._log(Event.unpause, seq, now)

    def has_live(self, request_id: int, since_s: float) -> None:
        """Records that a sequence has all its KV here.

        Its wait began when another replica stopped decoding it.
        """
        self._waits[request_id] = _Wait(since_s, None, is_adopted=True)

    def withdraw_live(self, request_id: int) -> None:
        """Removes a sequence that another replica continues to decode."""
        self._waits.pop(request_id, None)

    def planned(self, core: EngineCore, plan: StepPlan | None, transfers: list[Transfer], now: float) -> None:
        """Logs the events of a plan and its transfers; None: there is nothing to compute."""
        cause = core.waits_for if plan is None else plan.waits_for
        preempted = core.lost if plan is None else plan.preempted
        if self.new:
            self._begin_waits(now, not preempted)
        if self._waits or preempted or self._num_lost:
            self._admit_and_preempt(plan, preempted, now)
        for transfer in transfers:
            self._transfer(transfer, now)
        if core.residents is not None:
            for seq in core.loading.values():
                self._await_adapter(seq, now)
        if cause is not self.cause:
            if self.cause is not None:
                self._total_s[self.cause] += now - self._since_s
            self.cause, self._since_s = cause, now
        if core.paused or self.paused:
            self._compare_paused(core.paused, now)
        self.is_quiet = cause is None and not self.paused

    def _admit_and_preempt(self, plan: StepPlan | None, preempted: SequenceOf[Sequence], now: float) -> None:
        """Logs the admissions and preemptions of a plan, which may admit and preempt the same sequence."""
        if plan is not None:
            just_lost = preempted[self._num_lost :]
            for seq in plan.admitted:
                if seq.request_id in self._waits and (seq.state in ACTIVE_STATES or seq in just_lost):
                    self._admit(seq, now)  # otherwise already logged, or preempted without any work
        if preempted or self._num_lost:
            for seq in preempted[self._num_lost :]:
                self._preempt(seq, now)
            self._num_lost = len(preempted) if plan is None else 0
            for seq in plan.admitted if plan is not None else ():
                if seq.request_id in self._waits and seq.state in ACTIVE_STATES:
                    self._admit(seq, now)

    def loaded(self, seq: Sequence, now: float) -> None:
        """Logs that the KV for which a sequence waited has arrived."""
        self.rows.add(Event.loaded, now, seq.request_id, seq.num_found, seq.num_known)

    def prefilled(self, seq: Sequence, now: float) -> None:
        """Logs the next token of a sequence after a preemption."""
        self.rows.add(Event.prefilled, now, seq.request_id)

    def leave(self, seq: Sequence, now: float, *, is_lost: bool = False) -> None:
        """Logs that a sequence is aborted, is lost in a crash, or is unfinished when the run ends."""
        wait = self._waits.pop(seq.request_id, None)
        if wait is not None:
            self._log(Event.lost if is_lost else Event.unserved, seq, now, self._split(wait, now))
        elif seq.state is WAITING:  # no plan has included it
            sent_s = self._adopted_s.get(seq.request_id)
            self.left_unseen(seq.request, now, is_lost=is_lost, sent_s=sent_s)
        elif is_lost:
            self._log_lost(Event.lost, seq, now)

    def timed_out(self, seq: Sequence, now: float) -> None:
        """Logs that a sequence that has just left was timed out by its client, which may retry."""
        self._log_lost(Event.timed_out, seq, now)

    def _log_lost(self, event: Event, seq: Sequence, now: float) -> None:
        """Adds a row with the output tokens that are lost."""
        self.rows.add(event, now, seq.request_id, seq.num_emitted_tokens, seq.num_known)

    def left_unseen(
        self, request: Request, now: float, *, is_lost: bool = False, sent_s: float | None = None
    ) -> None:
        """Logs the end of a request that no plan has included or that has not reached the engine.

        sent_s: time at which another replica sent it, or None.
        """
        if sent_s is None:
            taken_s = self._taken_s(request.request_id)
            frontend_s = min(now - request.arrival_s, taken_s)
            iteration_s = max(now - (request.arrival_s + taken_s), 0.0)
        else:
            frontend_s, iteration_s = 0.0, now - sent_s
        event = Event.lost if is_lost else Event.unserved
        waited_s = (frontend_s, iteration_s, *NO_WAIT[2:])
        self.rows.add(event, now, request.request_id, 0, request.prompt.num_tokens, waited_s)

    def _taken_s(self, request_id: int) -> float:
        """Returns and removes the seconds of a request in the front end."""
        if self._frontend_times is None:
            return self._frontend_s
        return self._frontend_times.pop(request_id, self._frontend_s)

    def _begin_waits(self, now: float, at_once: bool) -> None:
        """Begins the waits of sequences that arrived since the latest plan, or logs their admission.

        at_once: sequences with KV were admitted by this plan, which has preempted no sequence.
        """
        reading = None
        for seq in self.new:
            request_id, state, frontend_s = seq.request_id, seq.state, self._taken_s(seq.request_id)
            iteration_s = now - (seq.request.arrival_s + frontend_s)
            is_adopted = request_id in self._adopted_s
            if is_adopted:
                frontend_s, iteration_s = 0.0, now - self._adopted_s.pop(request_id)
            if not at_once or state is not PREFILLING:
                if state is not ENDED:
                    if reading is None:
                        reading = self._read(now)
                    wait = _Wait(now, reading, frontend_s, iteration_s, is_adopted=is_adopted)
                    self._waits[request_id] = wait
            elif is_adopted:
                waited_s = (frontend_s, iteration_s, *NO_WAIT[2:])
                self.rows.add(Event.adopt, now, request_id, seq.num_found, seq.num_known, waited_s)
            else:
                self.rows.admit(now, request_id, seq.num_found, seq.stored_known, frontend_s, iteration_s)
        self.new.clear()

    def _read(self, now: float) -> list[float]:
        """Returns the readings of the clocks in seconds, by cause."""
        reading = self._total_s.copy()
        if self.cause is not None:
            reading[self.cause] += now - self._since_s
        return reading

    def _admit(self, seq: Sequence, now: float) -> None:
        """Logs that a sequence is scheduled, and ends its wait."""
        wait = self._waits.pop(seq.request_id)
        event, num_recomputed = Event.adopt if wait.is_adopted else Event.admit, 0
        if not wait.is_first:
            event = Event.resume_swapped if wait.is_swapped else Event.resume
            num_recomputed = max(0, seq.num_lost - seq.num_found)
        waited_s = self._split(wait, now)
        tokens = (seq.num_found, seq.num_known)
        self.rows.add(event, now, seq.request_id, *tokens, waited_s, recomputed_tokens=num_recomputed)

    def _preempt(self, seq: Sequence, now: float) -> None:
        num_swapped = seq.num_swapped
        event = Event.preempt_swap if num_swapped else Event.preempt
        by = -1 if seq.displaced_by is None else seq.displaced_by
        waited_s, wait = NO_WAIT, self._waits.get(seq.request_id)
        if wait is None:
            self._waits[seq.request_id] = _Wait(now, self._read(now), is_first=False)
        elif wait.reading is None:  # preempted by the first step after its load
            waited_s = self._split(wait, now)
            self._waits[seq.request_id] = _Wait(now, self._read(now), is_first=wait.is_first)
        # otherwise it is preempted by the step that admitted it
        tokens = (num_swapped or seq.num_lost, seq.num_known)
        self.rows.add(event, now, seq.request_id, *tokens, waited_s, by=by)

    def _transfer(self, transfer: Transfer, now: float) -> None:
        """Logs a copy between tiers that begins; the sequence that waits for it has slot and blocks."""
        seq = transfer.seq
        if seq is None:
            tier = TIERS.index(transfer.target)
            self.rows.add(Event.store, now, -1, transfer.num_tokens, tier=tier)
            return
        if transfer.source == "live":  # it does not wait: another replica continues to decode it
            self.withdraw_live(seq.request_id)
            return
        wait = self._waits[seq.request_id]
        is_swapped = seq.num_swapped > 0 and transfer.source not in ("remote", "mirror")
        event = Event.swap_in if is_swapped else Event.load
        tier, waited_s = TIERS.index(transfer.source), self._split(wait, now)
        self.rows.add(event, now, seq.request_id, transfer.num_tokens, seq.num_known, waited_s, tier=tier)
        self._waits[seq.request_id] = _Wait(
            now, None, is_first=wait.is_first, is_swapped=is_swapped, is_adopted=wait.is_adopted
        )

    def _await_adapter(self, seq: Sequence, now: float) -> None:
        """Logs that a sequence has a slot and waits for its adapter, unless that is already logged."""
        wait = self._waits[seq.request_id]
        if wait.reading is not None:
            waited_s = self._split(wait, now)
            self._log(Event.load, seq, now, waited_s)
            self._waits[seq.request_id] = _Wait(now, None, is_first=wait.is_first)

    def _split(self, wait: _Wait, now: float) -> tuple[float, ...]:
        """Returns the seconds of a wait that ends now, in the order of `WAITS`."""
        begin = wait.reading
        if begin is None:
            return (*NO_WAIT[:-1], now - wait.start_s)
        if now == wait.start_s:
            return (wait.frontend_s, wait.iteration_s, *NO_WAIT[2:])
        end = self._read(now)
        _, *by_cause_s = (b - a for a, b in zip(begin, end, strict=True))
        return (wait.frontend_s, wait.iteration_s, *by_cause_s, 0.0)

    def _log(self, event: Event, seq: Sequence, now: float, waited_s: tuple[float, ...] = NO_WAIT) -> None:
        """Adds a row without token counts."""
        self.rows.add(event, now, seq.request_id, 0, seq.num_known, waited_s)

    def _compare_paused(self, paused: dict[int, Sequence], now: float) -> None:
        """Logs which sequences this plan has paused and resumed."""
        if paused.keys() == self.paused.keys():
            return
        for request_id, seq in self.paused.items():
            if request_id not in paused and seq.slot is not None:  # otherwise it was preempted, or has ended
                self._log(Event.unpause, seq, now)
        for request_id, seq in paused.items():
            if request_id not in self.paused:
                self._log(Event.pause, seq, now)
        self.paused = dict(paused)


class _Wait:
    """A wait in progress: its start, and the readings of the clocks of the causes at its start.

    reading None: its KV is being loaded. is_first: no plan has scheduled the request here yet. is_adopted:
    another replica has computed a part of it.
    """

    __slots__ = ("frontend_s", "is_adopted", "is_first", "is_swapped", "iteration_s", "reading", "start_s")

    def __init__(
        self,
        start_s: float,
        reading: list[float] | None,
        frontend_s: float = 0.0,
        iteration_s: float = 0.0,
        is_first: bool = True,
        is_swapped: bool = False,
        is_adopted: bool = False,
    ) -> None:
        self.start_s = start_s
        self.reading = reading
        self.frontend_s = frontend_s
        self.iteration_s = iteration_s
        self.is_first = is_first
        self.is_swapped = is_swapped
        self.is_adopted = is_adopted
