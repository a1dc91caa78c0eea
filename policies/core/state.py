"""What an engine consists of, and how a sequence moves between its parts.

    enqueue -> waiting -> start -> running -> finish -> end
                  ^                   |
                  +------- stop <-----+

`EngineCore` decides when, the step builder acts on it for policies, `StepView` shows it to them. What shares
the KV memory with sequences, such as LoRA adapters, attaches as a subclass (policies/adapters/serving.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.caching.pool import BlockPool
from policies.core.limits import Bounds, Limits, RejectedError, StopAfter
from policies.core.plan import Cause, Migrant, StepPlan
from policies.core.request import Request
from policies.core.running_set import RunningSet
from policies.core.sequence import AT_WORK, ENDED, WAITING, FinishReason, Sequence
from policies.core.sequence_view import SequenceView
from policies.core.transfers import Transfers
from policies.core.waiting import WaitingQueue

Rank = Callable[[SequenceView], tuple[float, ...]]


class EngineState:
    """The queue, the running set, the KV pool and the transfers of one engine.

    rank, chunk_rank: as in `Scheduling`; None: begun prefills come in the order of admission. swaps: whether
    preempted KV moves to host memory. Other arguments as in `EngineCore`.
    """

    def __init__(
        self,
        pool: BlockPool,
        waiting: WaitingQueue,
        rank: Rank,
        chunk_rank: Rank | None,
        *,
        swaps: bool,
        max_num_seqs: int,
        max_model_len: int,
        num_swap_blocks: int,
        names_blocks: bool,
    ) -> None:
        self.pool = pool
        self.waiting = waiting
        self.rank = rank
        self.chunk_rank = chunk_rank
        self.swaps = swaps
        self.max_num_seqs = max_num_seqs
        self.limits = Limits(pool, max_num_seqs, max_model_len)
        self.sequences: dict[int, Sequence] = {}
        """Waiting or running, by request id, in the order of their intake."""
        self.on_end: list[Callable[[Sequence], None]] = []
        """Callbacks, called with every sequence that has ended."""
        self.num_preemptions = 0
        self.running_set = RunningSet(pool, max_num_seqs)
        self.running = self.running_set.running  # its parts that are looked at in every step
        self.prefilling = self.running_set.prefilling
        self.loading = self.running_set.loading
        self.decodes = self.running_set.decodes
        self.branched = self.running_set.branched
        self.free_slots = self.running_set.free_slots
        self.transfers = Transfers(pool, self.branched, num_swap_blocks, names_blocks)
        self._loads_kv = type(pool).num_loadable is not BlockPool.num_loadable
        self.notes_chunks = type(pool).computed is not BlockPool.computed
        """Whether the pool wants to know of chunks that were computed."""

    # What may be asked.

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self.sequences) - len(self.running)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are not in use."""
        return self.pool.num_free

    @property
    def is_awaiting(self) -> bool:
        """Whether KV is on its way, in or out: an engine with nothing to compute then waits for it."""
        return bool(self.loading or self.running_set.leaving)

    def bounds_of(self, request: Request, stop_after: StopAfter) -> Bounds:
        """At how many known tokens a request would end. Raises RejectedError if it can never be served."""
        if request.adapter is not None:
            raise RejectedError(f"adapter={request.adapter}: must be null, as the engine serves no adapters")
        return self.limits.of(request, stop_after)

    def candidates(self) -> Iterable[SequenceView]:
        """Sequences that wait and may be admitted, smallest rank first."""
        return self.waiting

    def refusal(self, seq: Sequence, num_cached: int, is_squeezed: bool) -> Cause | None:
        """Why a waiting sequence cannot have KV memory now; None: it can.

        num_cached: tokens that a cache has of it. is_squeezed: the step has taken KV from others already.
        """
        if is_squeezed or not self.pool.can_admit(seq, num_cached, not self.running):
            return Cause.memory
        return None

    def waits_unasked_for(self) -> Cause:
        """Why the first of the waiting has to wait, if no policy has tried to admit it."""
        return Cause.policy

    def migrant(self, request_id: int) -> Migrant | None:
        """What another engine needs to go on with a sequence; None: there is no KV that could be copied."""
        seq = self.running.get(request_id)
        if seq is None or seq.num_dropped or seq.request.branching is not None:
            return None
        if seq.state not in AT_WORK:
            return None
        return Migrant(seq.request, seq.num_known, seq.num_computed, self.transfers.blocks(seq))

    # What changes.

    def make_room(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, once what can give way to sequences has done so."""
        return self.pool.num_free >= num_blocks

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """Enter into a plan what goes beside its decode set and its chunks. decoded: those that decode."""
        if self.branched.members:
            self.branched.plan(plan, decoded)

    def enqueue(self, seq: Sequence) -> None:
        """A sequence waits from now on."""
        self.waiting.push(seq)

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that waits."""
        self.waiting.remove(seq)
        self.transfers.free_swapped(seq)
        self.end(seq, reason)

    def rerank(self, seq: Sequence) -> None:
        """Ask the scheduling policy for a sequence's rank again."""
        if seq.state is not WAITING:
            seq.rank = self.rank(seq)
            return
        self.waiting.remove(seq)
        seq.rank = self.rank(seq)
        self.waiting.push(seq)

    def start(self, seq: Sequence, num_cached: int, lacks_adapter: bool = False) -> None:
        """From waiting to running: a slot, KV for num_cached tokens, and loads of what other tiers hold."""
        num_loaded = 0
        if self._loads_kv or seq.num_swapped:
            num_loaded = self.transfers.num_loadable(seq, num_cached)
        self.waiting.remove(seq)
        self.running_set.seat(seq, num_cached, num_loaded, lacks_adapter)
        if num_loaded:
            self.transfers.load(seq, num_cached)
        elif seq.num_swapped:  # a migrant that has found all its KV here
            self.transfers.free_swapped(seq)

    def stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """From running back to waiting, its KV freed, or on its way to host memory."""
        is_recomputing = self.branched.is_recomputing(seq)  # its blocks are not in an order that swaps keep
        num_branched = self.running_set.leave(seq, WAITING)
        seq.num_lost = seq.stored_computed
        if swap and not seq.num_dropped and not is_recomputing:
            self.transfers.swap_out(seq, is_branched=num_branched is not None)
        self.running_set.release(seq, num_branched, num_planned)
        if seq.num_loading:
            self.transfers.drop_loads(seq)
        seq.num_transfers = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.request.branching is not None:
            self.branched.stop(seq, had_joined=num_branched is not None)
        seq.stored_computed = seq.num_dropped = 0
        seq.rank = self.rank(seq)
        self.enqueue(seq)

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """End a running sequence; num_planned tokens of a plan in flight will not be computed."""
        num_branched = self.running_set.leave(seq, ENDED)
        self.running_set.release(seq, num_branched, num_planned)
        if seq.num_swapped:
            self.transfers.free_swapped(seq)
        self.end(seq, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """A sequence has left the queue, or the running set, for good."""
        seq.state = ENDED
        seq.finish_reason = reason
        del self.sequences[seq.request_id]
        for listener in self.on_end:
            listener(seq)

    def check_integrity(self) -> None:
        """Assert: blocks free + owned = all, every slot has at most one owner."""
        self.running_set.check_integrity(self._num_blocks_apart)
        assert len(self.sequences) == len(self.running) + len(self.waiting)

    @property
    def _num_blocks_apart(self) -> int:
        """KV blocks of what is not a sequence."""
        return 0
