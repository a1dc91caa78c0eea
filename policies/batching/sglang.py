"""Continuous batching as in SGLang's scheduler: prefill first, admission by an estimate of future tokens.

As soon as waiting requests fit, an iteration computes only prompts; otherwise it decodes (`mixed_chunk`:
decodes join the prompts). Only the last prompt of an iteration may be cut, at max_num_batched_tokens; the
rest of it comes first in the next iteration.
Admission: a request needs memory for its prompt, its longest possible output (at most 4096 tokens) and one
page, in addition to the tokens that the running requests may still need: their longest possible remaining
outputs times new_token_ratio. The ratio is 0.7 at first (times schedule_conservativeness) and falls linearly
to 14 % of that during 600 iterations of decodes. A request that does not fit closes admission until a request
leaves. Memory pressure: a decode without free memory retracts the requests with the fewest output tokens (of
these, the one with the longest prompt), and raises the ratio to the share of their output that the other
requests have produced. With scheduling=queue_order they wait behind all others, as in SGLang.

An engine that overlaps the host with the GPU (`event_loop_overlap`, SGLang's default) has not read the tokens
of the last step when it decides. Its estimates and retractions therefore count one output token less for each
sequence of that step, and a sequence that has ended with it holds its slot and its place in the estimate. If
memory is short while there is such a sequence, nothing is retracted: the step waits for its memory.

A cache with eviction evicts ahead: everything possible before a retraction, then room for 20 tokens per
remaining sequence, and one block per sequence before a decode. In one of 32 admission attempts, the prefixes
that waiting requests would find are marked as used (`SchedulePolicy._touch_waiting_prefixes`). Source: SGLang
0.5.23, `managers/scheduler.py` (`get_next_batch_to_run`, `update_running_batch`, `_reqs_finishing_inflight`),
`managers/schedule_policy.py`, `managers/schedule_batch.py` (`check_decode_mem`, `retract_decode`,
`release_req`), and `mem_cache/allocation.py`.

Horizon: decodes repeat until a request ends or arrives, because nothing else opens admission.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from fieldlimits import Checked, Positive, PositiveInt, check
from policies.core.sequence import DECODING, ENDING, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView

INITIAL_RATIO = 0.7
MIN_SHARE_OF_RATIO = 0.14
NUM_DECAY_STEPS = 600
NUM_STEPS_AFTER_RETRACTION = 20
"""Output tokens per remaining request that the ratio after a retraction covers."""
MAX_NEW_TOKENS_COUNTED = 4096
"""Maximum number of output tokens in the memory estimate."""
SHARE_WITH_RANKS = 0.3
"""Factor of schedule_conservativeness with data-parallel attention."""
NUM_PASSES_PER_REFRESH = 32
"""Number of admission attempts per marking of waiting requests' cached prefixes as used."""
MAX_REFRESHED = 128
"""Number of waiting requests at the front of the queue whose prefixes are marked; the first is marked last.
"""
MIN_IDLE_S = 1e-3
"""Seconds without an iteration after which the engine counts as idle, which restores the initial ratio."""


@dataclass(slots=True)
class _State:
    """The state of the policy across steps."""

    ratio: float
    is_full: bool = False
    """Whether admission is closed until a request leaves."""
    num_expected: int = 0
    """Number of decoding sequences in the next step if none ends."""
    num_passes: int = 0
    """Number of steps that have tried to admit requests."""
    decodes_since: int | None = None
    """Iteration since which the engine only decodes; None: its last step had prompts."""


@dataclass(slots=True)
class _Budget:
    """The tokens that the prompts of an iteration may still use."""

    chunk: float
    """Tokens of the iteration."""
    prompt: float
    """Prompt tokens after which no further prompt is taken."""
    promised: float
    """Memory promised to requests in tokens, in addition to the blocks that they hold."""
    due: float
    """The part of `promised` that this iteration uses."""
    num_prompts: int = 0

    @property
    def is_spent(self) -> bool:
        """True if the iteration has all its tokens."""
        return self.prompt <= 0 or self.chunk <= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sglang(Checked):
    """Prompts before decodes; admits by the tokens that requests are expected to need."""

    max_num_batched_tokens: PositiveInt = 8192
    """Prompt tokens of one iteration, at which a prompt is cut (SGLang's --chunked-prefill-size)."""
    enable_chunked_prefill: bool = True
    """Whether prompts are split; if not, only max_prefill_tokens limits an iteration."""
    max_prefill_tokens: PositiveInt = 16384
    """Number of prompt tokens after which an iteration takes no further prompt."""
    schedule_conservativeness: Positive = 1.0
    """Factor of the ratio: larger values admit fewer requests, so that fewer are retracted."""
    mixed_chunk: bool = False
    """Whether decodes join iterations with prompts."""
    _state: _State = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        if self.mixed_chunk and not self.enable_chunked_prefill:
            raise ValueError("mixed_chunk=true: must be false where enable_chunked_prefill=false")
        object.__setattr__(self, "_state", _State(self._first_ratio))

    @property
    def _first_ratio(self) -> float:
        return min(INITIAL_RATIO * self.schedule_conservativeness, 1.0)

    def of_rank(self, size: int) -> Sglang:
        """Returns the policy of one of `size` ranks of data-parallel attention, like SGLang's server."""
        return replace(
            self,
            max_num_batched_tokens=max(1, self.max_num_batched_tokens // size),
            schedule_conservativeness=self.schedule_conservativeness * SHARE_WITH_RANKS,
        )

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Computes prompts if any wait and fit, else decodes."""
        state = self._state
        self._note_last_step(view, now)
        state.num_expected = _batch_size(view)
        if view.prefilling or (view.num_waiting and not state.is_full):
            self._prefill(view, step)
        if not step.num_tokens:
            self._decode(view, step)
            return
        is_ending = state.num_expected > view.num_decoding
        joins = self.mixed_chunk and _num_blocks_due(view) <= view.num_free_blocks
        if joins:
            self._decode_all(view, step)
        elif self.mixed_chunk:
            step.evict_ahead(_num_blocks_due(view))  # in vain, as above
        if joins or not view.num_decoding or (self.mixed_chunk and is_ending):
            state.is_full = False  # SGLang keeps the mark with its batch of decodes, and there is none now

    def _decode(self, view: StepView, step: StepBuilder) -> None:
        """Decodes all sequences, after a retraction if memory is short.

        No sequence decodes while memory is short and sequences with a complete output are about to free
        memory.
        """
        state, num_decoding = self._state, view.num_decoding
        if num_decoding > view.num_free_blocks and _num_blocks_due(view) > view.num_free_blocks:
            step.evict_ahead(_num_blocks_due(view))  # not enough: SGLang evicts everything possible
            if num_decoding < _batch_size(view):
                return
            self._retract(view, step)
        if num_decoding:
            state.decodes_since = view.num_iterations
        self._decode_all(view, step)
        step.repeat()

    def _decode_all(self, view: StepView, step: StepBuilder) -> None:
        """Decodes all sequences.

        Like SGLang, makes room for one page each, even if a sequence needs none yet.
        """
        step.evict_ahead(view.num_decoding)
        step.decode_all()

    def _note_last_step(self, view: StepView, now: float) -> None:
        """Lowers the ratio for the decodes since the last call, and opens admission if a request has left."""
        state = self._state
        if state.decodes_since is not None:
            lowest = self._first_ratio * MIN_SHARE_OF_RATIO
            decay = (self._first_ratio - lowest) / NUM_DECAY_STEPS
            for _ in range(view.num_iterations - state.decodes_since):
                if state.ratio == lowest:
                    break
                state.ratio = max(state.ratio - decay, lowest)
            state.decodes_since = None
        size = _batch_size(view)
        if size < state.num_expected or view.prefilling or not size:
            state.is_full = False
        if not view.num_running and now - view.last_end_s > MIN_IDLE_S:
            state.ratio = self._first_ratio

    def _prefill(self, view: StepView, step: StepBuilder) -> None:
        """Schedules the last split prompt, then waiting requests."""
        state = self._state
        size = _batch_size(view)
        num_slots = view.max_num_seqs - size
        if num_slots <= 0 and not view.prefilling:
            state.is_full = True
            return
        if view.num_waiting:
            if state.num_passes % NUM_PASSES_PER_REFRESH == 0:
                for seq in reversed(list(islice(view.waiting, MAX_REFRESHED))):
                    step.refresh(seq)
            state.num_passes += 1
        num_mixed = size if self.mixed_chunk else 0
        limit = self.max_num_batched_tokens if self.enable_chunked_prefill else inf
        expected = sum([_num_new_tokens(seq, view) * state.ratio for seq in _batch(view)])
        budget = _Budget(
            limit - num_mixed, self.max_prefill_tokens - num_mixed, num_mixed + expected, num_mixed
        )
        for seq in view.prefilling:
            room = int(view.num_free_blocks * view.block_size - budget.promised)
            num_tokens = int(min(budget.chunk, room if room > 0 else inf, seq.num_uncomputed))
            num_free = view.num_free_blocks
            if step.prefill(seq, num_tokens):
                self._charge(seq, num_tokens, num_free, view, budget)
        for seq in view.waiting:
            if budget.is_spent:
                break
            state.is_full |= budget.num_prompts >= num_slots
            if state.is_full or not self._admit(seq, view, step, budget):
                break

    def _admit(self, seq: SequenceView, view: StepView, step: StepBuilder, budget: _Budget) -> bool:
        """Admits a waiting request if it fits; returns whether the next one may be tried."""
        page, num_found = view.block_size, view.num_found(seq)
        num_tokens = seq.num_known - num_found
        num_free = view.num_free_blocks - view.num_free_found(seq)
        needed = num_tokens + _num_new_tokens(seq, view) + page
        if needed >= num_free * page - budget.promised and (view.num_running or budget.num_prompts):
            self._state.is_full = budget.num_prompts > 0 or _batch_size(view) > 0
            return False
        num_paged = -(-num_tokens // page) * page
        if not self.enable_chunked_prefill:
            if budget.num_prompts and num_paged >= budget.prompt:
                return False
        elif num_paged > budget.chunk:
            num_tokens = (num_found + int(budget.chunk) // page * page) // page * page - num_found
            if num_tokens <= 0 and not view.num_running:
                num_tokens = int(budget.chunk)  # a page exceeds the limit: nothing else could run
        if num_tokens <= 0:
            return False
        if not step.admit(seq, num_tokens):
            step.hold(1)  # there is no room for its drafts, which the estimate above ignores
            return False
        self._charge(seq, num_tokens, num_free, view, budget)
        room = view.num_free_blocks * page
        if room <= budget.promised or room <= budget.due:
            self._state.is_full = True
        return not (self._state.is_full or budget.is_spent)

    def _charge(
        self, seq: SequenceView, num_tokens: int, num_free: int, view: StepView, budget: _Budget
    ) -> None:
        """Charges the tokens of a prompt, which has reduced the free blocks from num_free."""
        page = view.block_size
        num_pages = -(-num_tokens // page)
        num_due = (num_pages + 1 - (num_free - view.num_free_blocks)) * page
        budget.promised += num_due
        budget.due += num_due
        if num_tokens == seq.num_uncomputed:
            budget.promised += min(seq.max_num_tokens - seq.num_prompt_tokens, MAX_NEW_TOKENS_COUNTED)
            self._state.num_expected += 1
        budget.prompt -= num_pages * page
        budget.chunk -= num_pages * page
        budget.num_prompts += 1

    def _retract(self, view: StepView, step: StepBuilder) -> None:
        """Preempts sequences until the others can decode. This opens admission and raises the ratio."""
        state = self._state
        kept = sorted(
            view.decoding,
            key=lambda seq: (seq.num_output_tokens - view.num_unread(seq), -seq.num_prompt_tokens),
            reverse=True,
        )
        while len(kept) > 1 and sum(map(view.needs_block, kept)) > view.num_free_blocks:
            step.preempt(kept.pop())
            step.evict_ahead(-(-NUM_STEPS_AFTER_RETRACTION * len(kept) // view.block_size))
        num_reached = sum(seq.num_output_tokens - view.num_unread(seq) for seq in kept)
        num_longest = sum(seq.max_num_tokens - seq.num_prompt_tokens for seq in kept)
        granted = NUM_STEPS_AFTER_RETRACTION * len(kept)
        state.ratio = min(1.0, (num_reached + granted) / (num_longest + 1))
        state.decodes_since = view.num_iterations + 1  # the ratio does not decrease for this iteration
        state.num_expected = len(kept)
        state.is_full = False


def _batch_size(view: StepView) -> int:
    """Counts the sequences in SGLang's running batch: decoding and just ended ones."""
    return view.num_decoding + view.num_ending


def _batch(view: StepView) -> list[SequenceView]:
    """Returns the sequences in SGLang's running batch, in the order of their admission."""
    return [seq for seq in view.running if seq.state in (DECODING, ENDING)]


def _num_new_tokens(seq: SequenceView, view: StepView) -> int:
    """Returns the number of output tokens counted in the memory estimate; unread tokens are not counted."""
    return min(seq.max_num_tokens - seq.num_known + view.num_unread(seq), MAX_NEW_TOKENS_COUNTED)


def _num_blocks_due(view: StepView) -> int:
    """Counts the blocks that the decoding sequences need for their next tokens."""
    return sum(map(view.needs_block, view.decoding))
