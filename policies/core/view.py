"""The read-only view of an engine for policies."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from policies.core.sequence import DECODING, ENDING, Sequence, SequenceView
from policies.core.state import EngineState


class StepView:
    """The state of an engine as policies see it; true output lengths are not part of it."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def decoding(self) -> SequenceOf[SequenceView]:
        """Sequences with one uncomputed token each, in the order of their admission."""
        return [seq for seq in self._state.running.values() if seq.state is DECODING]

    @property
    def prefilling(self) -> SequenceOf[SequenceView]:
        """Sequences in prefill, by admission or by the scheduling policy's chunk_rank."""
        state = self._state
        if not state.prefilling:
            return ()
        rank = state.chunk_rank
        if rank is not None:
            return sorted(state.prefilling.values(), key=lambda seq: (rank(seq), seq.request_id))
        return list(state.prefilling.values())

    @property
    def max_tokens_per_pass(self) -> int:
        """Maximum number of tokens that a decode without branches gets in an iteration."""
        return self._state.max_tokens_per_pass

    @property
    def mixes_prefills(self) -> bool:
        """True if a decoding sequence was admitted after one in prefill."""
        prefilling = self._state.prefilling
        for seq in reversed(self._state.running.values()) if prefilling else ():
            if seq.state is DECODING:
                return seq.admission > min(other.admission for other in prefilling.values())
        return False

    @property
    def running(self) -> SequenceOf[SequenceView]:
        """Sequences that hold a slot, in the order of their admission."""
        return list(self._state.running.values())

    @property
    def num_ranks(self) -> int:
        """Number of ranks of data-parallel attention; a view shows one of them."""
        return 1

    @property
    def num_prompts(self) -> int:
        """Number of prompts waiting or in prefill; with several ranks, the number of ranks with any."""
        return len(self._state.prefilling) + self._state.num_waiting

    @property
    def is_decoding(self) -> bool:
        """True if a sequence decodes, in any rank."""
        return bool(self._state.decodes.size or self._state.branched.members)

    @property
    def paused(self) -> SequenceOf[SequenceView]:
        """Paused sequences, in the order in which they were paused."""
        return list(self._state.running_set.paused.values())

    @property
    def waiting(self) -> Iterable[SequenceView]:
        """Sequences without KV, smallest rank first; they may be admitted while iterating.

        Sequences without a slot for their adapter are skipped.
        """
        state = self._state
        return iter(state.candidates()) if len(state.sequences) > len(state.running) else ()

    @property
    def num_decoding(self) -> int:
        """Number of decoding sequences; one with branches counts once."""
        return self._state.decodes.size + len(self._state.branched.members)

    @property
    def num_ending(self) -> int:
        """Number of sequences with a complete output that hold slot and blocks and get no token."""
        return sum(seq.state is ENDING for seq in self._state.ending.values())

    @property
    def num_running(self) -> int:
        """Number of sequences with a slot (in any state), those admitted by this step included."""
        return len(self._state.running)

    @property
    def traffic_has_ended(self) -> bool:
        """True if the driver knows that no request arrives before a request in the engine has ended."""
        return self._state.traffic_has_ended

    @property
    def num_waiting(self) -> int:
        """Number of sequences in the waiting queue."""
        return self._state.num_waiting

    @property
    def serves_past_preempted(self) -> bool:
        """True if the running sequences after one that preempted itself are still served, as in vLLM 0.33."""
        return self._state.release.serves_past_preempted

    @property
    def paces_alone(self) -> bool:
        """True if a policy that paces prompts counts from the engine's last step with prompts (vLLM 0.33)."""
        return self._state.release.paces_alone

    @property
    def num_free_blocks(self) -> int:
        """Free KV blocks after this step's reservations so far; includes blocks of unused adapters."""
        return self._state.num_free_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        """Free blocks of host memory for preempted KV."""
        return self._state.transfers.num_free_swap_blocks

    def num_blocks_held(self, seq: SequenceView) -> int:
        """Counts the KV blocks that a running sequence owns, shared ones included."""
        assert isinstance(seq, Sequence)
        return (
            self._state.block_pool.blocks_held(seq, self._state.running_set.num_pooled(seq))
            + seq.num_extra_blocks
        )

    def num_blocks_missing(self, seq: SequenceView) -> int:
        """Counts the KV blocks that a sequence in prefill still needs for its known tokens."""
        assert isinstance(seq, Sequence)
        return self._state.block_pool.blocks_to_grow(seq, seq.num_computed, seq.num_known)

    def may_start(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence could be admitted if there were a slot and memory for it.

        False: it waits for its adapter, so a preemption would not help it; `waiting` skips it.
        """
        return self._state.may_start(seq)

    def has_room(self, seq: SequenceView) -> bool:
        """Returns whether there is a slot and memory for a waiting sequence now; ignores the budget."""
        assert isinstance(seq, Sequence)
        state = self._state
        if len(state.free_slots) < seq.width:
            return False
        return state.refusal(seq, state.transfers.num_cached(seq), has_preempted=False) is None

    def would_have_room(self, seq: SequenceView, victims: SequenceOf[SequenceView]) -> bool:
        """Returns whether a waiting sequence would have room if these running sequences were preempted.

        Each KV block that they hold counts as free, although others may share it in a prefix cache.
        """
        assert isinstance(seq, Sequence)
        state = self._state
        num_slots = seq.width - len(state.free_slots)
        num_blocks = state.num_blocks_lacking(seq, is_alone=len(victims) == len(state.running))
        for victim in victims:
            if num_slots <= 0 and num_blocks <= 0:
                break
            num_slots -= victim.width
            num_blocks -= self.num_blocks_held(victim)
        return num_slots <= 0 and num_blocks <= 0

    @property
    def num_blocks(self) -> int:
        """Total number of KV blocks."""
        return self._state.block_pool.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._state.block_pool.block_size

    @property
    def num_iterations(self) -> int:
        """Number of iterations that the engine has run."""
        return self._state.block_pool.num_iterations

    def needs_block(self, seq: SequenceView) -> bool:
        """Returns whether the next pass of a decoding sequence needs a new KV block."""
        assert isinstance(seq, Sequence)
        if seq.branches is not None:
            return seq.branches.blocks_to_append() > 0
        return self._state.decodes.needs_block(seq)

    def num_unread(self, seq: SequenceView) -> int:
        """Returns 1 if the newest token of a running sequence was not read before this step, else 0.

        An engine that plans ahead either counts that token already (vLLM) or does not (SGLang).
        """
        assert isinstance(seq, Sequence)
        return self._state.num_unread(seq)

    def num_found(self, seq: SequenceView) -> int:
        """Counts the tokens of a waiting sequence with KV in the cache or another tier."""
        assert isinstance(seq, Sequence)
        transfers = self._state.transfers
        num_cached = transfers.num_cached(seq)
        return num_cached + transfers.num_loadable(seq, num_cached)

    def num_matched(self, seq: SequenceView) -> int:
        """Counts tokens like `num_found`, plus those of a last page that is computed again."""
        assert isinstance(seq, Sequence)
        if self._state.loads_kv or seq.num_swapped:
            return self.num_found(seq)
        return min(self._state.block_pool.num_matched(seq), seq.num_known - 1)

    def num_free_found(self, seq: SequenceView) -> int:
        """Counts the free KV blocks with cached tokens of a waiting sequence; its admission takes them."""
        assert isinstance(seq, Sequence)
        num_cached = self._state.transfers.num_cached(seq)
        return self._state.block_pool.num_free_found(seq, num_cached)

    def num_blocks_to_admit(self, seq: SequenceView) -> int:
        """Counts the free KV blocks that a waiting sequence takes for its known tokens, cached ones included.

        Blocks of its cached tokens that running sequences hold are not free.
        """
        assert isinstance(seq, Sequence)
        pool = self._state.block_pool
        num_cached = self._state.transfers.num_cached(seq)
        num_shared = pool.num_tables * pool.blocks_for(num_cached) - pool.num_free_found(seq, num_cached)
        return pool.blocks_to_admit(seq) - num_shared

    def finds_planned(self, seq: SequenceView) -> bool:
        """Returns whether a waiting sequence would find KV in the cache that this step has yet to compute."""
        assert isinstance(seq, Sequence)
        state = self._state
        num_cached = state.transfers.num_cached(seq)
        if not num_cached:
            return False
        owners = [state.running_set.running.get(owner) for owner in state.block_pool.owners_found(seq)]
        return bool(owners) and all(owner is not None and owner.num_computed < num_cached for owner in owners)

    @property
    def last_end_s(self) -> float:
        """Time at which the last iteration ended, in seconds; -inf before the first end."""
        return self._state.last_end_s

    @property
    def max_num_seqs(self) -> int:
        """Slots: the number of sequences that may hold KV at once."""
        return self._state.max_num_seqs
