"""FastServe: skip-join multi-level feedback queue (Wu et al., "Fast Distributed Inference Serving", 2023).

A sequence may use quantum_tokens x 2^i tokens of service in level i (0 is the first), then it moves one level
down. A new request skips the levels whose quantum its prefill alone would use up. The paper measures service
in time; a policy knows no durations, so here a prompt token and an output token are one token of service
each, and tokens computed again after a preemption none. Within a level the order is that of arrival.
Of the running and waiting sequences, the first max_active run; other decodes are paused and keep their KV. A
waiting sequence of a better level that finds no slot or no memory preempts those of worse levels, the worst
first. It preempts no prefill under way, and no sequence that has got no token since its KV was loaded:
promotions could undo each other's work for ever.
With preemption_mode=swap, paused KV moves to host memory, worst first, as soon as free blocks fall below
min_free_share (the paper's proactive swapping; loading it back ahead of time is not modelled). A sequence
without service for starvation_s goes to the first level.
Assumes nothing about lengths; long answers soon give way to short ones.
An admitted sequence shares its first iteration with the decode that it displaces, beyond max_active.
Memory pressure: the worst level is preempted. Horizon: while a sequence waits or is paused, until the first
quantum in use ends, the next promotion, or, with swapping, before free blocks could fall below the share.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from policies.core.plan import FOREVER
from policies.core.sequence import SequenceState
from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting import WaitingQueue
from policies.scheduling import Scheduling
from policies.scheduling.alarms import Alarms
from policies.scheduling.displacement import displace

_STANDING = (SequenceState.waiting, SequenceState.paused)
_MOVABLE = (SequenceState.decoding, SequenceState.paused)


def _service(seq: SequenceView) -> int:
    """Tokens served: prompt tokens computed, then output tokens as well."""
    return seq.num_known if seq.num_output_tokens else seq.num_computed


_Key = tuple[tuple[float, ...], int]  # rank, request id


@dataclass(slots=True, eq=False)
class _Place:
    """Level of a sequence, the service at which it leaves the level, and when its service stopped."""

    seq: SequenceView
    level: int
    ends_at: int
    still_since_s: float
    num_preemptions: int = 0  # as of still_since_s
    key: _Key | None = None  # its key in `movable`
    look: int = 0  # number of its valid entry in `looks`


@dataclass(slots=True)
class _Memory:
    """The memory of the policy. The cost of a step depends on what has changed, not on all that run."""

    places: dict[int, _Place] = field(default_factory=dict)  # by request id
    movable: list[tuple[tuple[float, ...], int, _Place]] = field(default_factory=list)  # decoding and paused
    looks: list[tuple[int, int, _Place]] = field(default_factory=list)  # heap: iteration, number, place
    num_looks: int = 0
    alarms: Alarms = field(default_factory=Alarms)  # promotions
    num_places: int = 0  # number of movable sequences that run ...
    others: list[_Key] = field(default_factory=list)  # ... beside these: prefills and loads
    num_admitted: int = 0  # by this step
    queue: LevelQueue | None = None
    step: StepBuilder | None = None
    now: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlfq(Scheduling):
    """The best level first; a sequence that has used up its quantum goes down a level."""

    quantum_tokens: int = 64
    """Quantum of the first level in tokens of service; each further level has twice as many."""
    num_levels: int = 8
    """Number of levels; the last has no end."""
    starvation_s: float = 30.0
    """Time without service in seconds after which a sequence goes to the first level."""
    max_active: int | None = None
    """Maximum number of sequences that run at once, of those that hold KV; null: all of them."""
    min_free_share: float = 0.05
    """Share of free KV blocks below which paused KV moves to host memory (preemption_mode=swap)."""

    _memory: _Memory = field(init=False, default_factory=_Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        for name in ("quantum_tokens", "num_levels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        if not self.starvation_s > 0:
            raise ValueError(f"starvation_s={self.starvation_s}: must be > 0 s")
        if self.max_active is not None and self.max_active < 1:
            raise ValueError(f"max_active={self.max_active}: must be >= 1; null for no limit")
        if not 0 <= self.min_free_share < 1:
            raise ValueError(f"min_free_share={self.min_free_share}: must be a share, >= 0 and < 1")

    @property
    def starvation_bound_s(self) -> float | None:
        """starvation_s: a sequence in the first level goes before later arrivals."""
        return self.starvation_s

    def level_of(self, num_tokens: int) -> int:
        """The first level whose quantum covers num_tokens tokens, or the last."""
        quanta = -(-num_tokens // self.quantum_tokens)
        return min((quanta - 1).bit_length(), self.num_levels - 1)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (level, arrival)."""
        memory, arrival_s = self._memory, seq.request.arrival_s
        place = memory.places.get(seq.request_id)
        if place is None:
            level = self.level_of(seq.num_prompt_tokens)
            place = _Place(seq, level, self._quantum(level), arrival_s)
            memory.places[seq.request_id] = place
            memory.alarms.set(arrival_s + self.starvation_s, seq)
        elif seq.num_preemptions > place.num_preemptions:
            place.num_preemptions = seq.num_preemptions
            self._leave(place)
            self._stand_still(place)
        self._settle(place)
        return (place.level, arrival_s)

    def queue(self) -> WaitingQueue:
        """Returns a queue that offers only sequences that are among the first max_active."""
        self._memory.queue = LevelQueue(self)
        return self._memory.queue

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Updates levels; decides which sequences may be admitted, which run, and whose KV is swapped out."""
        memory = self._memory
        memory.step, memory.now = step, now
        for seq in memory.alarms.ring(now):
            self._promote(seq, step)
        self._look(view, step)
        limit = view.max_num_seqs if self.max_active is None else self.max_active
        if view.num_waiting or view.paused or view.num_running > limit:
            self._make_way(view, step, limit)
            if self.max_active is not None:
                self._pause_all_but(view, step, limit)
            if self.preemption_mode == "swap":
                self._swap_out(view, step)
            self._hold(view, step)
        memory.num_admitted = 0

    def on_end(self, seq: SequenceView) -> None:
        """Forgets a sequence that has ended."""
        self._leave(self._memory.places.pop(seq.request_id))

    def is_next(self, seq: SequenceView) -> bool:
        """Whether a waiting sequence is among the first that may run."""
        memory = self._memory
        if self.max_active is None:
            return True
        key = (seq.rank, seq.request_id)
        num_ahead = min(bisect_left(memory.movable, key), memory.num_places)
        num_ahead += sum(other < key for other in memory.others)
        return num_ahead + memory.num_admitted < self.max_active

    def note_admission(self) -> None:
        """Counts an admission if a step is being made; the next step is then decided anew."""
        memory = self._memory
        if memory.step is not None and memory.step.is_open:
            memory.num_admitted += 1
            memory.step.hold(1)

    def _quantum(self, level: int) -> int:
        return self.quantum_tokens << level if level < self.num_levels - 1 else FOREVER

    def _settle(self, place: _Place) -> bool:
        """Moves a sequence down for the service that it got; returns whether that changed its level."""
        service = _service(place.seq)
        if service < place.ends_at:
            return False
        while service >= place.ends_at:
            place.level += 1
            place.ends_at += self._quantum(place.level)
        return True

    def _look(self, view: StepView, step: StepBuilder) -> None:
        """Updates sequences that may have used up their quantum, and finds those that began to decode.

        A decoding sequence gets at most one token per iteration: it need not be checked before as many
        iterations have passed as its quantum has tokens left.
        """
        memory, prefilling = self._memory, view.prefilling
        for seq in prefilling:
            self._demote(memory.places[seq.request_id], step)
        looks, num_iterations = memory.looks, view.num_iterations
        while looks and looks[0][0] <= num_iterations:
            _, number, place = heappop(looks)
            if self._counts(number, place):
                self._demote(place, step)
                self._look_later(place, num_iterations)
        if len(memory.movable) + len(prefilling) == view.num_running:
            return
        for seq in view.running:
            if seq.state in _MOVABLE:
                place = memory.places[seq.request_id]
                if place.key is None:
                    self._demote(place, step)
                    self._enter(place)
                    self._look_later(place, num_iterations)

    def _look_later(self, place: _Place, num_iterations: int) -> None:
        """Schedules the next check of a sequence for the earliest iteration in which its quantum can end."""
        memory = self._memory
        memory.num_looks += 1
        place.look = memory.num_looks
        due = num_iterations + 1
        if place.seq.width == 1:  # branches get several tokens at once
            due = num_iterations + place.ends_at - place.seq.num_known
        heappush(memory.looks, (due, place.look, place))

    def _demote(self, place: _Place, step: StepBuilder) -> None:
        """Updates the level of a sequence, and its rank if the level has changed."""
        if self._settle(place):
            self._rerank(place, step)

    def _rerank(self, place: _Place, step: StepBuilder) -> None:
        was_movable = place.key is not None
        self._leave(place)
        step.rerank(place.seq)
        if was_movable:
            self._enter(place)

    def _enter(self, place: _Place) -> None:
        """Adds a sequence to the movable ones."""
        place.key = (place.seq.rank, place.seq.request_id)
        insort(self._memory.movable, (*place.key, place))

    def _leave(self, place: _Place) -> None:
        """Removes a sequence from the movable ones, if it is among them."""
        if place.key is not None:
            del self._memory.movable[bisect_left(self._memory.movable, place.key)]
            place.key = None
            place.look = 0

    def _stand_still(self, place: _Place) -> None:
        place.still_since_s = self._memory.now
        self._memory.alarms.set(self._memory.now + self.starvation_s, place.seq)

    def _promote(self, seq: SequenceView, step: StepBuilder) -> None:
        """Moves a sequence to the first level if it still has had no service for starvation_s."""
        memory = self._memory
        place = memory.places[seq.request_id]
        if seq.state in _STANDING and place.still_since_s + self.starvation_s <= memory.now:
            place.level, place.ends_at = 0, _service(seq) + self._quantum(0)
            self._stand_still(place)
            self._rerank(place, step)

    def _make_way(self, view: StepView, step: StepBuilder, limit: int) -> None:
        """Preempts worse levels for the first waiting sequence, if it may run."""
        memory = self._memory
        assert memory.queue is not None
        head = memory.queue.first
        if head is None:
            return
        movable, (level, _) = memory.movable, head.rank
        first = bisect_left(movable, ((level + 1,),))  # first of the worse levels
        if first == len(movable):
            return
        if view.num_running - len(view.paused) >= limit:
            key = (head.rank, head.request_id)
            running = (seq for seq in view.running if seq.state is not SequenceState.paused)
            if sum((seq.rank, seq.request_id) < key for seq in running) >= limit:
                return
        worse = [place.seq for _, _, place in reversed(movable[first:])]
        served = [seq for seq in worse if seq.num_computed > seq.num_found]
        if len(served) < len(worse):
            step.hold(1)
        displace(view, step, head, served)

    def _pause_all_but(self, view: StepView, step: StepBuilder, limit: int) -> None:
        """Lets the first decodes run and pauses the others; prefills under way go on."""
        memory, movable = self._memory, self._memory.movable
        memory.num_places = num_places = max(0, limit - len(view.prefilling))
        for _, _, place in movable[:num_places]:
            if place.seq.state is SequenceState.paused:
                step.resume(place.seq)
                self._look_later(place, view.num_iterations)
        for _, _, place in movable[num_places:]:
            if place.seq.state is SequenceState.decoding:
                step.pause(place.seq)
                self._stand_still(place)
        memory.others = []
        if view.num_running > len(movable):
            others = (seq for seq in view.running if seq.state not in _MOVABLE)
            memory.others = [(seq.rank, seq.request_id) for seq in others]

    def _swap_out(self, view: StepView, step: StepBuilder) -> None:
        """Moves paused KV to host memory while free blocks are short."""
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
        """Bounds the horizon by the end of the first quantum in use and the next promotion."""
        memory, num_iterations = self._memory, FOREVER
        looks = memory.looks
        while looks and not self._counts(*looks[0][1:]):
            heappop(looks)
        if looks:
            num_iterations = looks[0][0] - view.num_iterations
        for seq in view.prefilling:
            if not seq.num_output_tokens and memory.places[seq.request_id].ends_at <= seq.num_prompt_tokens:
                num_iterations = 1  # it was promoted: its quantum ends within the prompt
        step.hold(num_iterations, memory.alarms.next_s)

    @staticmethod
    def _counts(number: int, place: _Place) -> bool:
        return place.look == number and place.seq.state is SequenceState.decoding


class LevelQueue(WaitingQueue):
    """A queue by rank that offers only sequences that may run."""

    def __init__(self, policy: Mlfq) -> None:
        super().__init__()
        self._policy = policy

    @property
    def first(self) -> SequenceView | None:
        """The first waiting sequence, whether it may run or not."""
        return self._heap[0][3] if self._heap else None

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        super().remove(seq)
        self._policy.note_admission()

    def __iter__(self) -> Iterator[SequenceView]:
        for seq in super().__iter__():
            if not self._policy.is_next(seq):
                return
            yield seq
