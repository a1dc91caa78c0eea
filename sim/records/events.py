"""What happened to each sequence, and why it had to wait: a compact log for each replica.

A wait begins on arrival or with a preemption and ends with work on the sequence, or with its end. It is split
by cause, in seconds:

    arrival    known to the engine    first plan that sees it        load begins      work begins
       |-- frontend --|----- iteration -----|-- slot, ..., adapter --|--- load ---|
                                   preempted |-- slot, ..., adapter --|--- load ---|

Between two plans everybody in the queue waits for the cause that the first of the two plans names (`Cause`).
So one clock a cause is enough: a wait is the difference of two readings, whatever the length of the queue. A
stretch of one cause is added up once, however many plans it had: leaping and stepping give the same bits.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.core.engine import EngineCore
from policies.core.plan import Cause, StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import AT_WORK, ENDED, PREFILLING, WAITING, Sequence

WAITS = ("frontend", "iteration", "slot", "budget", "memory", "policy", "adapter", "load")
"""Causes of a wait. frontend: the engine does not know the request yet; load: its KV is on its way from
another tier, or its adapter is; the others: `policies.core.plan.Cause`."""
WAIT_COLUMNS = tuple(f"wait_{cause}_s" for cause in WAITS)
TIERS = ("", "gpu", "host", "disk", "remote", "mirror")


class Event(IntEnum):
    """What happened; after it what `tokens` and `of_tokens` mean, 0 where nothing is said."""

    arrive = 0  # tokens: of the prompt
    first_token = 1
    load = 2  # got slot and blocks; tokens: KV on its way from `tier`, of all known; 0: its adapter is
    swap_in = 3  # the same for KV that a preemption had swapped out
    loaded = 4  # that KV is there
    admit = 5  # work on it begins; tokens: KV that need not be computed, of all known tokens
    resume = 6  # the same after a preemption; recomputed_tokens: computed a second time
    resume_swapped = 7  # the same, its KV having been swapped in
    prefilled = 8  # all that it lost is computed again, and a token more is out
    preempt = 9  # lost slot and KV; tokens: computed so far, of all known tokens; by: who needed the room
    preempt_swap = 10  # the same, its KV moved to host memory
    pause = 11  # a policy makes it stand still; it keeps slot and KV
    unpause = 12
    store = 13  # of no sequence; tokens: KV copied to `tier`, swapped out or stored by the cache
    unserved = 14  # the wait of a request that was given up, or that still waited when the run ended
    end = 15
    lost = 16  # its replica crashed; the wait until then, if it was waiting
    hand_over = 17  # it is to go on in another replica; tokens: whose KV is here, of all known tokens
    adopt = 18  # work goes on in that other replica; tokens: whose KV is there, of all known tokens
    timed_out = 19  # its client has left, and may come again; tokens: of the answer, lost


ROW = np.dtype(
    [
        ("time_s", "<f8"),
        ("request_id", "<i8"),
        ("event", "<i1"),
        ("tier", "<i1"),
        ("tokens", "<i4"),
        ("of_tokens", "<i4"),
        ("recomputed_tokens", "<i4"),
        ("by", "<i8"),
        *((name, "<f8") for name in WAIT_COLUMNS),
    ]
)
_PACK = Struct(f"<dqbbiiiq{len(WAITS)}d").pack
_NO_WAIT = (0.0,) * len(WAITS)
_ADMIT = int(Event.admit)
_ADOPT = int(Event.adopt)


class EventLog:
    """The events of one replica, told by what drives it.

    frontend_s: from a request's arrival until the engine knows it. after: of the engine that crashed before.
    """

    def __init__(self, frontend_s: float = 0.0, after: EventLog | None = None) -> None:
        self._frontend_s = frontend_s
        self._rows: bytearray = bytearray() if after is None else after._rows
        self.new: list[Sequence] = []  # known to the engine, seen by no plan yet
        self._adopted_s: dict[int, float] = {}  # of these, by request id: when another replica sent it
        self._waits: dict[int, _Wait] = {}  # of those seen, by request id
        self.paused: dict[int, Sequence] = {}  # as of the last plan
        self._num_lost = 0  # preemptions of steps without work that are noted already
        # The clocks of the causes: `cause` has been running since `_since_s`, the others stand still.
        self._total_s = [0.0] * len(Cause)
        self.cause: Cause | None = None  # why the queue waits, as the last plan said
        self._since_s = 0.0

    def enter(self, seq: Sequence, sent_s: float | None = None) -> None:
        """The engine knows a request from now on. sent_s: when another replica has handed it over."""
        self.new.append(seq)
        if sent_s is not None:
            self._adopted_s[seq.request_id] = sent_s

    def hand_over(self, seq: Sequence, now: float) -> None:
        """A sequence is to go on in another replica."""
        row = (now, seq.request_id, Event.hand_over, 0, seq.num_computed, seq.num_known, 0, -1)
        self._rows += _PACK(*row, *_NO_WAIT)

    def planned(self, core: EngineCore, plan: StepPlan | None, transfers: list[Transfer], now: float) -> None:
        """The engine has made a plan, or found nothing to do; it asked for those transfers."""
        cause = core.waits_for if plan is None else plan.waits_for
        preempted = core.lost if plan is None else plan.preempted
        if self.new:
            self._meet(now, not preempted)
        if plan is not None:
            just_lost = preempted[self._num_lost :]
            for seq in plan.admitted:
                if seq.request_id in self._waits and (seq.state in AT_WORK or seq in just_lost):
                    self._admit(seq, now)  # else noted already, or preempted without any work
        if preempted or self._num_lost:
            for seq in preempted[self._num_lost :]:
                self._preempt(seq, now)
            self._num_lost = len(preempted) if plan is None else 0
            for seq in plan.admitted if plan is not None else ():
                if seq.request_id in self._waits and seq.state in AT_WORK:
                    self._admit(seq, now)
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

    def loaded(self, seq: Sequence, now: float) -> None:
        """The KV that a sequence was waiting for is there."""
        self._rows += _PACK(
            now, seq.request_id, Event.loaded, 0, seq.num_found, seq.num_known, 0, -1, *_NO_WAIT
        )

    def prefilled(self, seq: Sequence, now: float) -> None:
        """A sequence that had been preempted has got its next token."""
        self._rows += _PACK(now, seq.request_id, Event.prefilled, 0, 0, 0, 0, -1, *_NO_WAIT)

    def leave(self, seq: Sequence, now: float, *, is_lost: bool = False) -> None:
        """A sequence is given up, lost in a crash, or the run ends, before it has ended."""
        wait = self._waits.pop(seq.request_id, None)
        if wait is not None:
            self._log(Event.lost if is_lost else Event.unserved, seq, now, self._split(wait, now))
        elif seq.state is WAITING:  # no plan has seen it
            sent_s = self._adopted_s.get(seq.request_id)
            self.never_met(seq.request, now, is_lost=is_lost, sent_s=sent_s)
        elif is_lost:
            self._log_lost(Event.lost, seq, now)

    def timed_out(self, seq: Sequence, now: float) -> None:
        """A sequence that has just left was given up by a client that may come again."""
        self._log_lost(Event.timed_out, seq, now)

    def _log_lost(self, event: Event, seq: Sequence, now: float) -> None:
        """A row with the tokens that were answered in vain."""
        row = (now, seq.request_id, event, 0, seq.num_emitted_tokens, seq.num_known, 0, -1)
        self._rows += _PACK(*row, *_NO_WAIT)

    def never_met(
        self, request: Request, now: float, *, is_lost: bool = False, sent_s: float | None = None
    ) -> None:
        """A request leaves that no plan has seen, or that has not even reached the engine.

        sent_s: when another replica handed it over, if one did.
        """
        if sent_s is None:
            frontend_s = min(now - request.arrival_s, self._frontend_s)
            iteration_s = max(now - (request.arrival_s + self._frontend_s), 0.0)
        else:
            frontend_s, iteration_s = 0.0, now - sent_s
        event = Event.lost if is_lost else Event.unserved
        row = (now, request.request_id, event, 0, 0, request.prompt.num_tokens, 0, -1)
        self._rows += _PACK(*row, frontend_s, iteration_s, *_NO_WAIT[2:])

    def table(self) -> NDArray[np.void]:
        """What was logged, in that order: a structured array of `ROW`. Nothing is logged any more."""
        return np.frombuffer(self._rows, ROW)

    def _meet(self, now: float, at_once: bool) -> None:
        """A plan sees for the first time those who came since the last one.

        at_once: those that hold KV were admitted by it, and nobody was preempted.
        """
        reading = None
        for seq in self.new:
            state, frontend_s = seq.state, self._frontend_s
            iteration_s = now - (seq.request.arrival_s + frontend_s)
            is_adopted = seq.request_id in self._adopted_s
            if is_adopted:
                frontend_s, iteration_s = 0.0, now - self._adopted_s.pop(seq.request_id)
            if at_once and state is PREFILLING:
                event = _ADOPT if is_adopted else _ADMIT
                row = (now, seq.request_id, event, 0, seq.num_found, seq.num_known, 0, -1)
                self._rows += _PACK(*row, frontend_s, iteration_s, *_NO_WAIT[2:])
            elif state is not ENDED:
                if reading is None:
                    reading = self._read(now)
                wait = _Wait(now, reading, frontend_s, iteration_s, is_adopted=is_adopted)
                self._waits[seq.request_id] = wait
        self.new.clear()

    def _read(self, now: float) -> list[float]:
        """Seconds so far by cause."""
        reading = self._total_s.copy()
        if self.cause is not None:
            reading[self.cause] += now - self._since_s
        return reading

    def _admit(self, seq: Sequence, now: float) -> None:
        """Work on a sequence begins."""
        wait = self._waits.pop(seq.request_id)
        event, num_recomputed = Event.adopt if wait.is_adopted else Event.admit, 0
        if not wait.is_first:
            event = Event.resume_swapped if wait.is_swapped else Event.resume
            num_recomputed = max(0, seq.num_lost - seq.num_found)
        known = seq.num_known
        row = (now, seq.request_id, event, 0, seq.num_found, known, num_recomputed, -1)
        self._rows += _PACK(*row, *self._split(wait, now))

    def _preempt(self, seq: Sequence, now: float) -> None:
        num_swapped = seq.num_swapped
        event = Event.preempt_swap if num_swapped else Event.preempt
        by = -1 if seq.displaced_by is None else seq.displaced_by
        row = (now, seq.request_id, event, 0, num_swapped or seq.num_lost, seq.num_known, 0, by)
        wait = self._waits.get(seq.request_id)
        if wait is None:
            self._rows += _PACK(*row, *_NO_WAIT)
            self._waits[seq.request_id] = _Wait(now, self._read(now), is_first=False)
        elif wait.reading is None:  # its KV had come, and the first step that could have used it took it back
            self._rows += _PACK(*row, *self._split(wait, now))
            self._waits[seq.request_id] = _Wait(now, self._read(now), is_first=wait.is_first)
        else:  # the very step that admitted it took it back
            self._rows += _PACK(*row, *_NO_WAIT)

    def _transfer(self, transfer: Transfer, now: float) -> None:
        """A copy between tiers begins; who waits for it has got slot and blocks."""
        seq = transfer.seq
        if seq is None:
            tier = TIERS.index(transfer.target)
            self._rows += _PACK(now, -1, Event.store, tier, transfer.num_tokens, 0, 0, -1, *_NO_WAIT)
            return
        wait = self._waits[seq.request_id]
        is_swapped = seq.num_swapped > 0 and transfer.source not in ("remote", "mirror")
        event = Event.swap_in if is_swapped else Event.load
        row = (
            now,
            seq.request_id,
            event,
            TIERS.index(transfer.source),
            transfer.num_tokens,
            seq.num_known,
            0,
            -1,
        )
        self._rows += _PACK(*row, *self._split(wait, now))
        self._waits[seq.request_id] = _Wait(
            now, None, is_first=wait.is_first, is_swapped=is_swapped, is_adopted=wait.is_adopted
        )

    def _await_adapter(self, seq: Sequence, now: float) -> None:
        """A sequence has got its slot, and waits for its adapter, unless that is noted already."""
        wait = self._waits[seq.request_id]
        if wait.reading is not None:
            waited_s = self._split(wait, now)
            self._log(Event.load, seq, now, waited_s)
            self._waits[seq.request_id] = _Wait(now, None, is_first=wait.is_first)

    def _split(self, wait: _Wait, now: float) -> tuple[float, ...]:
        """Seconds of a wait that ends now, in the order of `WAITS`."""
        begin = wait.reading
        if begin is None:
            return (*_NO_WAIT[:-1], now - wait.start_s)
        if now == wait.start_s:
            return (wait.frontend_s, wait.iteration_s, *_NO_WAIT[2:])
        end = self._read(now)
        _, *by_cause_s = (b - a for a, b in zip(begin, end, strict=True))
        return (wait.frontend_s, wait.iteration_s, *by_cause_s, 0.0)

    def _log(self, event: Event, seq: Sequence, now: float, waited_s: tuple[float, ...] = _NO_WAIT) -> None:
        """A row without counts."""
        self._rows += _PACK(now, seq.request_id, event, 0, 0, seq.num_known, 0, -1, *waited_s)

    def _compare_paused(self, paused: dict[int, Sequence], now: float) -> None:
        """Note who stands still since this plan, and who no longer does."""
        if paused.keys() == self.paused.keys():
            return
        for request_id, seq in self.paused.items():
            if request_id not in paused and seq.slot is not None:  # else it was preempted, or has ended
                self._log(Event.unpause, seq, now)
        for request_id, seq in paused.items():
            if request_id not in self.paused:
                self._log(Event.pause, seq, now)
        self.paused = dict(paused)


class _Wait:
    """A wait under way, seen by a plan: since when, and what the clocks of the causes read then.

    reading None: its KV is on its way. is_first: no work was done on the request yet.
    is_adopted: but in another replica.
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


def logged_events(logs: list[EventLog]) -> pd.DataFrame:
    """The rows of all replicas' logs, with the replica's index; events and tiers as numbers."""
    parts = [log.table() for log in logs] or [np.zeros(0, ROW)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in ROW.names or ()}
    replica = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    return pd.DataFrame({"replica": replica, **columns}, copy=False)


def waits_by_request(events: pd.DataFrame, request_ids: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """Seconds that each request waited, by column of `WAIT_COLUMNS`, over all its waits."""
    mine = events["request_id"].to_numpy()
    size = int(max(request_ids.max(initial=-1), mine.max(initial=-1))) + 1
    waited = mine >= 0
    ids = mine[waited]
    return {
        name: np.bincount(ids, events[name].to_numpy()[waited], minlength=size)[request_ids].astype(
            np.float64
        )
        for name in WAIT_COLUMNS
    }
