"""The components of an engine, and how a sequence moves between them.

    enqueue -> waiting -> start -> running -> finish -> end
                  ^                   |
                  +------- stop <-----+

`EngineCore` decides when a sequence moves, the step builder moves it for policies, and `StepView` shows the
state to them. Other users of the KV memory, such as LoRA adapters, attach as a subclass
(policies/adapters/state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized

from policies.caching.pool import BlockPool
from policies.core.decode_set import DecodeSet
from policies.core.limits import Bounds, Limits, RejectedError, StopAfter
from policies.core.plan import Cause, Migrant, StepPlan
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
from policies.core.waiting_queue import WaitingQueue

Rank = Callable[[SequenceView], tuple[float, ...]]


class EngineState:
    """The queue, the running set, the KV pool and the transfers of one engine.

    rank, chunk_rank: as in `Scheduling`; chunk_rank=None: prefills are in the order of admission.
    swaps: whether preempted KV is moved to host memory. Other arguments as in `EngineCore`.
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
    ) -> None:
        self.block_pool = block_pool
        self.num_watermark_blocks = block_pool.num_watermark_blocks
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
        """The plan before `last_plan`; that plan itself if it was one of several iterations."""
        self.max_tokens_per_pass = 1
        """Maximum number of tokens that a decode without branches gets in an iteration."""
        self.traffic_has_ended = False
        """Whether no request arrives before one of those in the engine has ended."""
        self.last_end_s = float("-inf")
        """Time at which the last iteration ended, in seconds."""
        self.running_set = RunningSet(block_pool, max_num_seqs, decodes)
        self.running_set.preempts_newest = preempts_newest
        self.running = self.running_set.running  # attributes of it that every step reads
        self.prefilling: Mapping[int, Sequence] = self.running_set.prefilling
        self.loading = self.running_set.loading
        self.decodes = self.running_set.decodes
        self.ending = self.running_set.ending
        self.branched = self.running_set.branched
        self.free_slots: Sized = self.running_set.free_slots
        self.num_reserved = 0
        """Free KV blocks that are not to be taken now, as those of other ranks of data-parallel attention."""
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
        """KV blocks that are not in use."""
        return self.block_pool.num_free

    @property
    def is_transferring(self) -> bool:
        """True while KV is being loaded or copied to another engine; an idle engine then waits for it."""
        return bool(self.loading or self.running_set.leaving)

    def bounds_of(self, request: Request, stop_after: StopAfter) -> Bounds:
        """Returns the number of known tokens at which a request would end, and the reason.

        Raises RejectedError if it can never be served.
        """
        if request.adapter is not None:
            raise RejectedError(f"adapter={request.adapter}: must be null, as the engine serves no adapters")
        return self.limits.of(request, stop_after)

    def candidates(self) -> Iterable[SequenceView]:
        """Returns the waiting sequences that may be admitted, smallest rank first."""
        return self.waiting

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence could be admitted if there were a slot and KV memory."""
        return True

    def refusal(self, seq: Sequence, num_cached: int, has_preempted: bool) -> Cause | None:
        """Returns the reason why a waiting sequence cannot get KV memory now; None if it can.

        num_cached: its tokens that the cache holds. has_preempted: whether this step has preempted sequences.
        """
        pool, is_alone = self.block_pool, not self.running
        if self.num_reserved:
            pool.num_watermark_blocks, is_alone = self._num_kept_free(is_alone), False
        if has_preempted or not pool.can_admit(seq, num_cached, is_alone):
            return Cause.memory
        return None

    def num_blocks_lacking(self, seq: Sequence, is_alone: bool) -> int:
        """Counts the KV blocks that must become free before a waiting sequence can start; <= 0: none.

        is_alone: whether no other sequence will run then. Tokens in the cache count as missing.
        """
        pool = self.block_pool
        return pool.blocks_to_admit(seq) + self._num_kept_free(is_alone) - pool.num_free

    def _num_kept_free(self, is_alone: bool) -> int:
        """Returns the blocks that must stay free when a sequence starts."""
        return self.num_reserved + (0 if is_alone else self.num_watermark_blocks)

    def cause_if_untried(self) -> Cause:
        """Returns the reason why the first waiting sequence waits, if no policy has tried to admit it."""
        return Cause.policy

    def migrant(self, request_id: int) -> Migrant | None:
        """Returns the data with which another engine continues a sequence; None if it has no KV to copy."""
        seq = self.running.get(request_id)
        if seq is None or seq.num_dropped or seq.request.branching is not None:
            return None
        if seq.state not in ACTIVE_STATES or request_id in self.ending:
            return None
        return Migrant(seq.request, seq.num_known, seq.num_computed, self.transfers.blocks(seq))

    def num_unread(self, seq: Sequence) -> int:
        """Returns 1 if the newest token of a sequence is of a step that has not been read, else 0.

        Such tokens exist with `Ends.one_step_late`, while the next step is planned.
        """
        if not self.running_set.reads_late or seq.state not in (DECODING, ENDING):
            return 0
        return int(_gives_a_token(self.last_plan, seq))

    def cache_lags(self, seq: Sequence) -> bool:
        """Returns whether the newest computed token of a decoding sequence was unread when it was planned.

        Its content was unknown then, so that it is not in the cache before the next step with the sequence.
        """
        return _gives_a_token(self.last_plan, seq) and _gives_a_token(self.plan_before, seq)

    # Changes.

    def give_way(self) -> None:
        """Begins a transfer, if one may let sequences start, after a step in which nothing could run.

        Its end is an event, at which the policies decide again.
        """

    def make_room(self, num_blocks: int) -> bool:
        """Reclaims memory for sequences, if necessary, and returns whether num_blocks are free."""
        return self.block_pool.num_free - self.num_reserved >= num_blocks

    def complete(self, plan: StepPlan, decoded: dict[int, Sequence]) -> None:
        """Adds the computation besides the decode set and chunks to a plan.

        decoded: decoding sequences, by request id.
        """
        if self.branched.members:
            self.branched.plan(plan, decoded)

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the waiting queue."""
        self.waiting.push(seq)

    def withdraw(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a waiting sequence."""
        self.waiting.remove(seq)
        self.transfers.free_swapped(seq)
        self.end(seq, reason)

    def rerank(self, seq: Sequence) -> None:
        """Asks the scheduling policy for a sequence's rank again."""
        if seq.state is not WAITING:
            seq.rank = self.rank(seq)
            return
        self.waiting.remove(seq)
        seq.rank = self.rank(seq)
        self.waiting.push(seq)

    def start(self, seq: Sequence, num_cached: int, lacks_adapter: bool = False) -> None:
        """Starts a waiting sequence: it gets a slot, KV for num_cached tokens, and loads from other tiers."""
        num_loaded = 0
        if self.loads_kv or seq.num_swapped:
            num_loaded = self.transfers.num_loadable(seq, num_cached)
        self.waiting.remove(seq)
        self.running_set.admit(seq, num_cached, num_loaded, lacks_adapter)
        if num_loaded:
            self.transfers.load(seq, num_cached)
        elif seq.num_swapped:  # the cache here has all the KV of this migrant
            self.transfers.free_swapped(seq)

    def stop(self, seq: Sequence, num_planned: int, swap: bool) -> None:
        """Moves a running sequence back to waiting; its KV is freed or swapped out to host memory."""
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
        """Notes whether the cache has all tokens of a sequence that has left; drafts count their own."""
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
        """Asserts that blocks free + owned = all, and that every slot has at most one owner."""
        self.running_set.check_integrity(self._num_extra_blocks)
        assert len(self.sequences) == len(self.running) + len(self.waiting)

    @property
    def _num_extra_blocks(self) -> int:
        """Number of KV blocks that belong to no sequence."""
        return 0


def _gives_a_token(plan: StepPlan | None, seq: Sequence) -> bool:
    """Returns whether a plan decodes a sequence or has a chunk of its prompt."""
    if plan is None:
        return False
    return (plan.num_decodes > 0 and seq not in plan.idle) or any(chunk.seq is seq for chunk in plan.chunks)
