"""FastServe: skip-join multi-level feedback queue (Wu et al., "Fast Distributed Inference Serving", 2023).

A sequence may use quantum_tokens x 2^i tokens of service in level i (0 is the first), then it moves one level
down. A new request skips the levels whose quantum its prefill alone would use up. The paper measures service
in time. A policy knows no durations, so here an output token is one token of service, and a prompt token
counts prompt_token_service (0.01 or less, judged by time); tokens recomputed after a preemption count
nothing. Within a level the order is that of arrival. Of the running and waiting sequences, the first
max_active run; other decodes are paused and keep their KV. A waiting sequence of a better level without a
slot or memory preempts sequences of worse levels, the worst first. It never preempts a sequence in prefill,
or one without a token since its KV was loaded, because then sequences could preempt each other without
progress. A sequence that waits for its adapter preempts none. With preemption_mode=swap, the KV of paused
sequences is moved to host memory, worst first, when free blocks fall below min_free_share (the paper's
proactive swapping; proactive loading is not modelled).
A sequence without service for starvation_s is moved to the first level.
Assumes nothing about lengths; sequences with long outputs soon move below those with short ones. An admitted
sequence shares its first iteration with the decode that it displaces, beyond max_active. Memory pressure: the
worst level is preempted. Horizon: while a sequence waits or is paused, until the first quantum in use ends,
the next promotion, or, with swapping, before free blocks could fall below the share.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from typing import Annotated

from fieldlimits import Ge, Gt, Lt, NonNegative, PositiveInt, Unit
from policies.core.plan import FOREVER
from policies.core.sequence import SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue
from policies.scheduling import Alarms, Scheduling, displace

_UNSERVED = (SequenceState.waiting, SequenceState.paused)
_MOVABLE = (SequenceState.decoding, SequenceState.paused)


_Key = tuple[tuple[float, ...], int]  # rank, request id


@dataclass(slots=True, eq=False)
class _Entry:
    """Level of a sequence, the service at which it leaves the level, and the time of its last service."""

    seq: SequenceView
    level: int
    ends_at: int
    unserved_since_s: float
    num_preemptions: int = 0  # as of unserved_since_s
    key: _Key | None = None  # its key in `movable`
    check: int = 0  # number of its valid entry in `checks`


@dataclass(slots=True)
class _Memory:
    """The state of the policy. A step's time grows with the number of changes, not of running sequences."""

    entries: dict[int, _Entry] = field(default_factory=dict)  # by request id
    movable: list[tuple[tuple[float, ...], int, _Entry]] = field(default_factory=list)  # decoding and paused
    checks: list[tuple[int, int, _Entry]] = field(default_factory=list)  # heap: iteration, number, entry
    num_checks: int = 0
    alarms: Alarms = field(default_factory=Alarms)  # promotions
    num_runnable: int = 0  # number of movable sequences that run
    others: list[_Key] = field(default_factory=list)  # other running sequences: in prefill or loading
    num_admitted: int = 0  # admissions by this step
    queue: LevelQueue | None = None
    step: StepBuilder | None = None
    now: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlfq(Scheduling):
    """The best level goes first; a sequence that has used up its quantum moves down one level."""

    quantum_tokens: PositiveInt = 64
    """Quantum of the first level in tokens of service; each further level has twice as many."""
    prompt_token_service: NonNegative = 1.0
    """Service counted per prompt token, in output tokens."""
    num_levels: PositiveInt = 8
    """Number of levels; the last has no limit."""
    starvation_s: Annotated[float, Gt(0), Unit("s")] = 30.0
    """Seconds without service after which a sequence is moved to the first level."""
    max_active: Annotated[PositiveInt | None, "null for no limit"] = None
    """Maximum number of sequences with KV that run at the same time; null: all of them."""
    min_free_share: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.05
    """Share of free KV blocks below which KV of paused sequences is swapped out (preemption_mode=swap)."""

    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to starvation_s: a sequence in the first level is served before later arrivals."""
        return self.starvation_s

    def level_of(self, num_tokens: int) -> int:
        """Returns the first level with a quantum of at least num_tokens tokens of service, or the last."""
        quanta = -(-num_tokens // self.quantum_tokens)
        return min((quanta - 1).bit_length(), self.num_levels - 1)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (level, arrival)."""
        memory, arrival_s = self._memory, seq.request.arrival_s
        entry = memory.entries.get(seq.request_id)
        if entry is None:
            level = self.level_of(max(1, self._prompt_service(seq.num_prompt_tokens)))
            entry = _Entry(seq, level, self._quantum(level), arrival_s)
            memory.entries[seq.request_id] = entry
            memory.alarms.set(arrival_s + self.starvation_s, seq)
        elif seq.num_preemptions > entry.num_preemptions:
            entry.num_preemptions = seq.num_preemptions
            self._remove_movable(entry)
            self._stop_service(entry)
        self._settle(entry)
        return (entry.level, arrival_s)

    def queue(self) -> WaitingQueue:
        """Returns a queue that yields only sequences among the first max_active."""
        self._memory.queue = LevelQueue(self)
        return self._memory.queue

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Updates levels; decides which sequences may be admitted, may run, or are swapped out."""
        memory = self._memory
        memory.step, memory.now = step, now
        for seq in memory.alarms.pop_due(now):
            self._promote(seq, step)
        self._update_levels(view, step)
        limit = view.max_num_seqs if self.max_active is None else self.max_active
        if view.num_waiting or view.paused or view.num_running > limit:
            self._preempt_for_first(view, step, limit)
            if self.max_active is not None:
                self._pause_others(view, step, limit)
            if self.preemption_mode == "swap":
                self._swap_out(view, step)
            self._hold(view, step)
        memory.num_admitted = 0

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._remove_movable(self._memory.entries.pop(seq.request_id))

    def is_next(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence is among the first that may run."""
        memory = self._memory
        if self.max_active is None:
            return True
        key = (seq.rank, seq.request_id)
        num_ahead = min(bisect_left(memory.movable, key), memory.num_runnable)
        num_ahead += sum(other < key for other in memory.others)
        return num_ahead + memory.num_admitted < self.max_active

    def note_admission(self) -> None:
        """Counts an admission if a step is being built; the next step is then decided again."""
        memory = self._memory
        if memory.step is not None and memory.step.is_open:
            memory.num_admitted += 1
            memory.step.hold(1)

    def _prompt_service(self, num_tokens: int) -> int:
        return math.ceil(self.prompt_token_service * num_tokens)

    def _service(self, seq: SequenceView) -> int:
        """Returns the service of computed prompt tokens, plus output tokens after the prefill."""
        return self._decoded_service(seq) if seq.num_output_tokens else self._prompt_service(seq.num_computed)

    def _decoded_service(self, seq: SequenceView) -> int:
        num_prompt_tokens = seq.num_prompt_tokens
        return self._prompt_service(num_prompt_tokens) + seq.num_known - num_prompt_tokens

    def _quantum(self, level: int) -> int:
        return self.quantum_tokens << level if level < self.num_levels - 1 else FOREVER

    def _settle(self, entry: _Entry) -> bool:
        """Moves a sequence down by its service; returns whether its level has changed."""
        service = self._service(entry.seq)
        if service < entry.ends_at:
            return False
        while service >= entry.ends_at:
            entry.level += 1
            entry.ends_at += self._quantum(entry.level)
        return True

    def _update_levels(self, view: StepView, step: StepBuilder) -> None:
        """Updates sequences that may have used up their quantum, and finds those that began to decode.

        A decoding sequence gets at most max_tokens_per_pass tokens per iteration: it is next checked after as
        many iterations as its quantum has such passes left.
        """
        memory, prefilling = self._memory, view.prefilling
        for seq in prefilling:
            self._demote(memory.entries[seq.request_id], step)
        checks, num_iterations = memory.checks, view.num_iterations
        while checks and checks[0][0] <= num_iterations:
            _, number, entry = heappop(checks)
            if self._is_current(number, entry):
                self._demote(entry, step)
                self._schedule_check(entry, view)
        if len(memory.movable) + len(prefilling) == view.num_running:
            return
        for seq in view.running:
            if seq.state in _MOVABLE:
                entry = memory.entries[seq.request_id]
                if entry.key is None:
                    self._demote(entry, step)
                    self._add_movable(entry)
                    self._schedule_check(entry, view)

    def _schedule_check(self, entry: _Entry, view: StepView) -> None:
        """Schedules the next check of a sequence for the earliest iteration in which its quantum can end."""
        memory = self._memory
        memory.num_checks += 1
        entry.check = memory.num_checks
        due = view.num_iterations + 1
        if entry.seq.width == 1:  # branches get several tokens at once
            num_left = entry.ends_at - self._decoded_service(entry.seq)
            due = view.num_iterations + max(1, num_left // view.max_tokens_per_pass)
        heappush(memory.checks, (due, entry.check, entry))

    def _demote(self, entry: _Entry, step: StepBuilder) -> None:
        """Updates the level of a sequence, and its rank if the level has changed."""
        if self._settle(entry):
            self._rerank(entry, step)

    def _rerank(self, entry: _Entry, step: StepBuilder) -> None:
        was_movable = entry.key is not None
        self._remove_movable(entry)
        step.rerank(entry.seq)
        if was_movable:
            self._add_movable(entry)

    def _add_movable(self, entry: _Entry) -> None:
        """Adds a sequence to the movable ones."""
        entry.key = (entry.seq.rank, entry.seq.request_id)
        insort(self._memory.movable, (*entry.key, entry))

    def _remove_movable(self, entry: _Entry) -> None:
        """Removes a sequence from the movable ones if it is one."""
        if entry.key is not None:
            del self._memory.movable[bisect_left(self._memory.movable, entry.key)]
            entry.key = None
            entry.check = 0

    def _stop_service(self, entry: _Entry) -> None:
        entry.unserved_since_s = self._memory.now
        self._memory.alarms.set(self._memory.now + self.starvation_s, entry.seq)

    def _promote(self, seq: SequenceView, step: StepBuilder) -> None:
        """Moves a sequence to the first level if it has had no service for starvation_s."""
        memory = self._memory
        entry = memory.entries[seq.request_id]
        if seq.state in _UNSERVED and entry.unserved_since_s + self.starvation_s <= memory.now:
            entry.level, entry.ends_at = 0, self._service(seq) + self._quantum(0)
            self._stop_service(entry)
            self._rerank(entry, step)

    def _preempt_for_first(self, view: StepView, step: StepBuilder, limit: int) -> None:
        """Preempts sequences of worse levels for the first waiting one that may start, if it may run."""
        head = self._first_above(view)
        if head is None:
            return
        movable, (level, _) = self._memory.movable, head.rank
        first = bisect_left(movable, ((level + 1,),))  # first of the worse levels
        if view.num_running - len(view.paused) >= limit:
            key = (head.rank, head.request_id)
            running = (seq for seq in view.running if seq.state is not SequenceState.paused)
            if sum((seq.rank, seq.request_id) < key for seq in running) >= limit:
                return
        worse = [entry.seq for _, _, entry in reversed(movable[first:])]
        served = [seq for seq in worse if seq.num_computed > seq.num_found]
        if len(served) < len(worse):
            step.hold(1)
        displace(view, step, head, served)

    def _first_above(self, view: StepView) -> SequenceView | None:
        """Returns the first waiting sequence that may start, if its level beats that of a running one."""
        memory = self._memory
        assert memory.queue is not None
        if not memory.movable:
            return None
        worst_level = memory.movable[-1][0][0]
        better = takewhile(lambda seq: seq.rank[0] < worst_level, memory.queue.by_rank())
        return next(filter(view.may_start, better), None)

    def _pause_others(self, view: StepView, step: StepBuilder, limit: int) -> None:
        """Runs the first decodes and pauses the others; sequences in prefill continue."""
        memory, movable = self._memory, self._memory.movable
        memory.num_runnable = num_runnable = max(0, limit - len(view.prefilling))
        for _, _, entry in movable[:num_runnable]:
            if entry.seq.state is SequenceState.paused:
                step.resume(entry.seq)
                self._schedule_check(entry, view)
        for _, _, entry in movable[num_runnable:]:
            if entry.seq.state is SequenceState.decoding:
                step.pause(entry.seq)
                self._stop_service(entry)
        memory.others = []
        if view.num_running > len(movable):
            others = (seq for seq in view.running if seq.state not in _MOVABLE)
            memory.others = [(seq.rank, seq.request_id) for seq in others]

    def _swap_out(self, view: StepView, step: StepBuilder) -> None:
        """Moves KV of paused sequences to host memory while there are too few free blocks."""
        floor = self.min_free_share * view.num_blocks
        if view.num_free_blocks < floor:
            paused = [p.seq for _, _, p in self._memory.movable if p.seq.state is SequenceState.paused]
            for seq in reversed(paused):
                num_blocks = -(-seq.num_computed // view.block_size)
                if view.num_free_blocks >= floor or num_blocks > view.num_free_swap_blocks:
                    break
                step.preempt(seq, swap=True)
        if not view.paused or view.num_free_blocks < floor:
            return
        if view.prefilling:
            step.hold(1)
        elif view.num_decoding:  # in n iterations each takes at most n // block_size + 1 blocks
            num_blocks_each = int((view.num_free_blocks - floor) // view.num_decoding)
            step.hold(max(1, num_blocks_each * view.block_size))

    def _hold(self, view: StepView, step: StepBuilder) -> None:
        """Limits the horizon to the end of the first quantum in use and the next promotion."""
        memory, num_iterations = self._memory, FOREVER
        checks = memory.checks
        while checks and not self._is_current(*checks[0][1:]):
            heappop(checks)
        if checks:
            num_iterations = checks[0][0] - view.num_iterations
        for seq in view.prefilling:
            if not seq.num_output_tokens and memory.entries[seq.request_id].ends_at <= seq.num_prompt_tokens:
                num_iterations = 1  # after a promotion its quantum ends within the prompt
        step.hold(num_iterations, memory.alarms.next_s)

    @staticmethod
    def _is_current(number: int, entry: _Entry) -> bool:
        return entry.check == number and entry.seq.state is SequenceState.decoding


class LevelQueue(WaitingQueue):
    """A queue by rank that yields only sequences that may run."""

    def __init__(self, policy: Mlfq) -> None:
        super().__init__()
        self._policy = policy

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        super().remove(seq)
        self._policy.note_admission()

    def by_rank(self) -> Iterator[SequenceView]:
        """Yields all sequences, including those that may not run yet."""
        return super().__iter__()

    def __iter__(self) -> Iterator[SequenceView]:
        for seq in self.by_rank():
            if not self._policy.is_next(seq):
                return
            yield seq
