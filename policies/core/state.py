"""The components of an engine, and how a sequence moves between them.

    enqueue -> waiting -> start -> running -> finish -> end
                  ^                   |
                  +------- stop <-----+

`EngineCore` decides when a sequence moves, the step builder moves it for policies, and `StepView` shows the
state to them. LoRA adapters, which may share the KV memory, are a value of the state (`residents`): a
sequence is admitted only if its adapter is resident or can be loaded, and unused adapters are evicted for
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sized
from functools import partial
from typing import Protocol

from policies.caching.pool import BlockPool
from policies.core.decode_set import DecodeSet
from policies.core.limits import Bounds, Limits, RejectedError, StopAfter
from policies.core.plan import AdapterUse, Cause, Chunk, Migrant, StepPlan
from policies.core.release import VLLM_0_32, Release
from policies.core.request import Request
from policies.core.running_set import RunningSet
from policies.core.sequence import (
    ACTIVE_STATES,
    DECODING,
    ENDED,
    ENDING,
    WAITING,
    FinishReason,
    Sequence,
    SequenceView,
)
from policies.core.transfers import Transfers
from policies.core.waiting_queue import AdapterQueue, WaitingQueue

Rank = Callable[[SequenceView], tuple[float, ...]]


class Residents(Protocol):
    """The LoRA adapters of an engine; `policies.adapters.serving.Residents` documents each method."""

    num_blocks: int
    has_changed: bool

    @property
    def is_loading(self) -> bool: ...
    def check(self, name: str | None) -> int: ...
    def join_queue(self, seq: SequenceView) -> None: ...
    def leave_queue(self, seq: SequenceView) -> None: ...
    def may_start(self, seq: SequenceView) -> bool: ...
    def open_adapters(self) -> Collection[str | None] | None: ...
    def num_missing(self, seq: SequenceView) -> int: ...
    def num_idle_blocks(self, exclude: SequenceView | None = None) -> int: ...
    def must_wait(self, seq: SequenceView) -> bool: ...
    def start(self, seq: Sequence) -> None: ...
    def stop(self, seq: Sequence) -> None: ...
    def give_way(self) -> None: ...
    def evict_until(self, is_enough: Callable[[], bool], keep: str | None = None) -> bool: ...
    def use(self, decodes: Iterable[SequenceView], chunks: Iterable[Chunk]) -> AdapterUse | None: ...
    def take_puts(self) -> tuple[tuple[str, int | None], ...]: ...
    def check_integrity(self, running: Iterable[SequenceView]) -> None: ...


class EngineState:
    """The queue, the running set, the KV pool and the transfers of one engine.

    rank, chunk_rank: as in `Scheduling`; chunk_rank=None: prefills are in the order of admission.
    swaps: whether preempted KV moves to host memory. residents: the LoRA adapters; None: none are served.
    Other arguments as in `EngineCore`.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        waiting: WaitingQueue,
        rank: Rank,
        chunk_rank: Rank | None,
        *,
        swaps: bool,
        max_num_seqs: int,
        max_model_len: int,
        num_swap_blocks: int,
        names_blocks: bool,
        preempts_newest: bool = False,
        release: Release = VLLM_0_32,
        decodes: DecodeSet | None = None,
        residents: Residents | None = None,
    ) -> None:
        self.block_pool = block_pool
        self.residents = residents
        self.num_watermark_blocks = block_pool.num_watermark_blocks
        if residents is not None and type(waiting) is WaitingQueue:  # other orders use their own queues
            waiting = AdapterQueue()
        self.waiting = waiting
        self.rank = rank
        self.chunk_rank = chunk_rank
        self.swaps = swaps
        self.max_num_seqs = max_num_seqs
        self.limits = Limits(block_pool, max_num_seqs, max_model_len)
        self.sequences: dict[int, Sequence] = {}
        """Waiting and running sequences by request id, in the order in which they were added."""
        self.on_end: list[Callable[[Sequence], None]] = []
        """Callbacks for every sequence that has ended."""
        self.num_preemptions = 0
        self.release = release
        """The rules that differ between schedulers and their releases."""
        self.looks_up = False
        """Whether the scheduling policy looks up the cached prefixes of waiting sequences."""
        self.last_plan: StepPlan | None = None
        """The plan that was committed last; None if nothing could be computed after it."""
        self.plan_before: StepPlan | None = None
        """The plan before `last_plan`; `last_plan` itself if it had several iterations."""
        self.max_tokens_per_pass = 1
        """Maximum number of tokens that a decode without branches gets in an iteration."""
        self.traffic_has_ended = False
        """Whether no request arrives before a request in the engine has ended."""
        self.last_end_s = float("-inf")
        """Time at which the last iteration ended, in seconds."""
        self.running_set = RunningSet(block_pool, max_num_seqs, decodes)
        self.running_set.preempts_newest = preempts_newest
        self.running = self.running_set.running  # its attributes that every step reads
        self.prefilling: Mapping[int, Sequence] = self.running_set.prefilling
        self.loading = self.running_set.loading
        self.decodes = self.running_set.decodes
        self.ending = self.running_set.ending
        self.branched = self.running_set.branched
        self.free_slots: Sized = self.running_set.free_slots
        self.num_reserved = 0
        """Free KV blocks that are unavailable now, such as those of other ranks of data-parallel attention.
        """
        self.transfers = Transfers(block_pool, self.branched, num_swap_blocks, names_blocks)
        self.loads_kv = type(block_pool).num_loadable is not BlockPool.num_loadable
        """Whether the pool may have KV in other tiers."""
        self.notes_chunks = type(block_pool).computed is not BlockPool.computed
        """Whether the pool needs to be notified of computed chunks."""

    # Queries.

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return len(self.sequences) - len(self.running)

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that are not in use, including those of unused adapters."""
        num_free = self.block_pool.num_free
        return num_free if self.residents is None else num_free + self.residents.num_idle_blocks()

    @property
    def is_transferring(self) -> bool:
        """True while KV or an adapter is loaded, or KV is sent to another engine; an idle engine waits."""
        is_loading = self.residents is not None and self.residents.is_loading
        return is_loading or bool(self.loading or self.running_set.leaving)

    def bounds_of(self, request: Request, stop_after: StopAfter) -> Bounds:
        """Returns the number of known tokens at which a request would end, and the reason.

        Raises RejectedError if it can never be served: its adapter is unknown or too little KV memory is
        left.
        """
        if self.residents is not None:
            return self.limits.of(request, stop_after, self.residents.check(request.adapter))
        if request.adapter is not None:
            raise RejectedError(f"adapter={request.adapter}: must be null, as the engine serves no adapters")
        return self.limits.of(request, stop_after)

    def candidates(self) -> Iterable[SequenceView]:
        """Returns the waiting sequences that may be admitted, smallest rank first."""
        waiting, residents = self.waiting, self.residents
        if residents is None:
            return waiting
        by_adapter = waiting.of(residents.open_adapters) if isinstance(waiting, AdapterQueue) else waiting
        return filter(residents.may_start, by_adapter)

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence could be admitted if there were a slot and KV memory."""
        return self.residents is None or self.residents.may_start(seq)

    def refusal(self, seq: Sequence, num_cached: int, has_preempted: bool) -> Cause | None:
        """Returns the reason why a waiting sequence cannot start, adapter or KV memory; None if it can.

        num_cached: its tokens that the cache holds. has_preempted: whether this step has preempted sequences.
        """
        residents = self.residents
        if residents is None:
            return self._refusal_of_memory(seq, num_cached, has_preempted)
        if not residents.may_start(seq):
            return Cause.adapter
        if has_preempted:
            return Cause.memory
        num_missing = residents.num_missing(seq)
        seq.num_adapter_blocks = num_missing - residents.num_idle_blocks(seq)
        cause = self._refusal_of_memory(seq, num_cached, has_preempted)
        seq.num_adapter_blocks = num_missing
        return cause

    def _refusal_of_memory(self, seq: Sequence, num_cached: int, has_preempted: bool) -> Cause | None:
        pool, is_alone = self.block_pool, not self.running
        if self.num_reserved:
            pool.num_watermark_blocks, is_alone = self._num_kept_free(is_alone), False
        if has_preempted or not pool.can_admit(seq, num_cached, is_alone):
            return Cause.memory
        return None

    def num_blocks_lacking(self, seq: Sequence, is_alone: bool) -> int:
        """Counts the KV blocks that must become free before a waiting sequence can start; <= 0: none.

        They include those of its adapter. is_alone: whether no other sequence will run then. Tokens in the
        cache count as missing.
        """
        pool, residents, num_idle = self.block_pool, self.residents, 0
        if residents is not None:
            seq.num_adapter_blocks = residents.num_missing(seq)
            num_idle = residents.num_idle_blocks(seq)
        return pool.blocks_to_admit(seq) + self._num_kept_free(is_alone) - pool.num_free - num_idle

    def _num_kept_free(self, is_alone: bool) -> int:
        """Returns the blocks that must stay free when a sequence starts."""
        return self.num_reserved + (0 if is_alone else self.num_watermark_blocks)

    def cause_if_untried(self) -> Cause:
        """Returns why the first waiting sequence waits, if no policy has tried to admit it."""
        if self.residents is None:
            return Cause.policy
        first = next(iter(self.waiting), None)  # None: a queue may have no sequence to admit
        is_skipped = first is not None and not self.residents.may_start(first)
        return Cause.adapter if is_skipped else Cause.policy

    def migrant(self, request_id: int) -> Migrant | None:
        """Returns the data with which another engine continues a sequence; None if it has no KV to copy."""
        seq = self.running.get(request_id)
        if seq is None or seq.num_dropped or seq.request.branching is not None:
            return None
        if seq.state not in ACTIVE_STATES or request_id in self.ending:
            return None
        return Migrant(seq.request, seq.num_known, seq.num_computed, self.transfers.blocks(seq))

    def num_unread(self, seq: Sequence) -> int:
        """Returns 1 if the newest token of a sequence comes from a step that has not been read, else 0.

        Such tokens exist with `Ends.one_step_late`, while the next step is planned.
        """
        if not self.running_set.reads_late or seq.state not in (DECODING, ENDING):
            return 0
        return int(_gives_a_token(self.last_plan, seq))

    def cache_lags(self, seq: Sequence) -> bool:
        """Returns whether the newest computed token of a decoding sequence was unread when it was planned.

        Its content was unknown then, so it enters the cache only with the sequence's next step.
        """
        return _gives_a_token(self.last_plan, seq) and _gives_a_token(self.plan_before, seq)

    # Changes.

    def give_way(self) -> None:
        """Loads another adapter after a step in which nothing could run, if that allows sequences to start.

        The end of the load is an event, at which the policies decide again.
        """
        if self.residents is not None:
            self.residents.give_way()

    def make_room(self, num_blocks: int) -> bool:
        """Evicts unused adapters, if necessary, and returns whether num_blocks are free."""
        num_needed = num_blocks + self.num_reserved
        if self.block_pool.num_free >= num_needed:
            return True
        if self.residents is None:
            return False
        return self.residents.evict_until(lambda: self.block_pool.num_free >= num_needed)

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """Adds the computation of branches and of adapters to a plan.

        decoded: decoding sequences, by request id. If adapters changed, the plan holds for one iteration.
        """
        if self.branched.members:
            self.branched.plan(plan, decoded)
        residents = self.residents
        if residents is None:
            return
        idle = set(plan.idle)
        decoding = [seq for seq in plan.decoding if seq not in idle]
        plan.adapters = residents.use([*decoding, *plan.branched], plan.chunks)
        plan.adapter_puts = residents.take_puts()
        if residents.has_changed:
            residents.has_changed = False
            plan.horizon = 1

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the waiting queue."""
        self.waiting.push(seq)
        if self.residents is not None:
            self.residents.join_queue(seq)

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting sequence."""
        if self.residents is not None:
            self.residents.leave_queue(seq)
        self.waiting.remove(seq)
        self.transfers.free_swapped(seq)
        self.end(seq, reason)

    def rerank(self, seq: Sequence) -> None:
        """Recomputes a sequence's rank with the scheduling policy."""
        if seq.state is not WAITING:
            seq.rank = self.rank(seq)
            return
        self.waiting.remove(seq)
        seq.rank = self.rank(seq)
        self.waiting.push(seq)

    def start(self, seq: Sequence, num_cached: int) -> None:
        """Starts a waiting sequence: it gets a slot, KV for num_cached tokens, and loads from other tiers.

        Its adapter is loaded if necessary.
        """
        residents, lacks_adapter = self.residents, False
        if residents is not None:
            fits = partial(self.block_pool.can_admit, seq, num_cached, not self.running)
            residents.evict_until(fits, keep=seq.request.adapter)
            lacks_adapter = residents.must_wait(seq)
        num_loaded = 0
        if self.loads_kv or seq.num_swapped:
            num_loaded = self.transfers.num_loadable(seq, num_cached)
        self.waiting.remove(seq)
        self.running_set.admit(seq, num_cached, num_loaded, lacks_adapter)
        if num_loaded:
            self.transfers.load(seq, num_cached)
        elif seq.num_swapped:  # the cache here has all the KV of this migrant
            self.transfers.free_swapped(seq)
        if residents is not None:
            residents.start(seq)
            seq.num_transfers += lacks_adapter

    def stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """Moves a running sequence back to waiting; its KV is freed or swapped out to host memory."""
        if self.residents is not None:
            self.residents.stop(seq)
        num_unread = self.num_unread(seq) if self.release.discards_unread else 0
        is_recomputing = self.branched.is_recomputing(seq)  # a swap would lose the order of its blocks
        if self.decodes.holds_planned and seq.state is DECODING:
            num_planned = 0
        num_branched = self.running_set.leave(seq, WAITING)
        self._note_cached(seq)
        seq.num_lost = seq.stored_computed
        if swap and not seq.num_dropped and not is_recomputing:
            self.block_pool.settle()  # its blocks are named now
            self.transfers.swap_out(seq, is_branched=num_branched is not None)
        self.running_set.release(seq, num_branched, num_planned)
        if seq.num_loading:
            self.transfers.drop_loads(seq)
        seq.num_transfers = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if seq.request.branching is not None:
            self.branched.stop(seq, had_joined=num_branched is not None)
        seq.stored_known -= num_unread
        seq.stored_computed = seq.num_dropped = 0
        seq.rank = self.rank(seq)
        self.enqueue(seq)

    def finish(self, seq: Sequence, reason: FinishReason, num_planned: int = 0) -> None:
        """Ends a running sequence; num_planned tokens of a plan in flight will not be computed."""
        if self.residents is not None:
            self.residents.stop(seq)
        if self.decodes.holds_planned and seq.state is DECODING:
            num_planned = 0
        num_branched = self.running_set.leave(seq, ENDED)
        if not num_planned:
            self._note_cached(seq)
        self.running_set.release(seq, num_branched, num_planned)
        if seq.num_swapped:
            self.transfers.free_swapped(seq)
        self.end(seq, reason)

    def _note_cached(self, seq: Sequence) -> None:
        """Stores whether the cache has all tokens of a departed sequence; drafts keep their own count."""
        if seq.num_unread and (
            self.last_plan is None or not (self.decodes.holds_planned or self.cache_lags(seq))
        ):
            seq.num_unread = 0

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """Marks a sequence that has left the queue or the running set as ended, and calls the listeners."""
        seq.state = ENDED
        seq.finish_reason = reason
        del self.sequences[seq.request_id]
        for listener in self.on_end:
            listener(seq)

    def check_integrity(self) -> None:
        """Asserts that no block is lost, no slot has two owners, and no adapter in use was evicted."""
        residents = self.residents
        self.running_set.check_integrity(0 if residents is None else residents.num_blocks)
        assert len(self.sequences) == len(self.running) + len(self.waiting)
        if residents is not None:
            residents.check_integrity(self.running.values())


def _gives_a_token(plan: StepPlan | None, seq: Sequence) -> bool:
    """Returns whether a plan decodes a sequence or has a chunk of its prompt."""
    if plan is None:
        return False
    return (plan.num_decodes > 0 and seq not in plan.idle) or any(chunk.seq is seq for chunk in plan.chunks)
