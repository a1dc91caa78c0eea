"""The server of llama.cpp: a fixed number of slots, one batch of at most n_batch tokens (late 2025).

As in tools/server of llama.cpp, an iteration takes one token from every generating slot, then prompts in the
order of the slots, with at most n_batch tokens in total. The lowest free slot takes the next waiting request;
llama.cpp chooses the slot with the most similar last prompt, or the longest idle one. A new prompt in a low
slot therefore overtakes the rest of an older one in a higher slot.
Context: llama.cpp splits n_ctx evenly, n_ctx / n_parallel tokens per slot (with a unified KV cache one slot
may use all of it). Set engine.max_model_len to a slot's share. A prompt that leaves no token for the output
is refused, as in llama.cpp ("exceeds the available context size"; older versions removed its middle). An
output ends when the slot is full, as in llama.cpp without context shift, the default.
Memory pressure: with KV memory for n_parallel slots there is none. If it is smaller, llama.cpp ends requests
with an error; here the sequence of largest rank is preempted and recomputed later.
Horizon: the plan repeats until something changes; while a prompt is in prefill and a request waits for
memory, it holds for one iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt, check
from policies.core.sequence import SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots(Checked):
    """Generating slots go first, then prompts slot by slot."""

    n_parallel: PositiveInt = 4
    """Number of slots; at most engine.max_num_seqs are used."""
    n_batch: int = 2048
    """Maximum number of tokens in one iteration."""

    def __post_init__(self) -> None:
        check(self)
        if self.n_batch < self.n_parallel:
            raise ValueError(
                f"n_batch={self.n_batch}: must be >= n_parallel={self.n_parallel}, one token per slot"
            )

    @property
    def max_unasked_decodes(self) -> int:
        """Number of decodes within the budget."""
        return self.n_batch

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decodes, then continues or admits prompts slot by slot."""
        step.budget(self.n_batch)
        step.decode_all()
        occupant = {seq.slot: seq for seq in view.running if seq.slot is not None}
        num_slots = min(self.n_parallel, view.max_num_seqs)
        num_free = num_slots - sum(seq.width for seq in occupant.values())
        waiting, num_running = iter(view.waiting), view.num_running
        for slot in range(max(num_slots, 1 + max(occupant, default=0))):
            seq = occupant.get(slot)
            if seq is None and num_free > 0:
                num_free -= self._admit_next(waiting, num_free, num_slots, step)
            elif seq is not None and seq.state is SequenceState.prefilling:
                step.prefill(seq, step.tokens_left)
        # The blocks of a prompt may become prefix cache hits of a waiting request, which then fits. An
        # admitted request may get a slot behind a prompt in prefill if ranks share the slots.
        has_more = view.num_waiting and view.prefilling and view.num_running < num_slots
        if not has_more and (view.num_running == num_running or not view.prefilling):
            step.repeat()

    @staticmethod
    def _admit_next(waiting: Iterator[SequenceView], num_free: int, num_slots: int, step: StepBuilder) -> int:
        """Admits the next waiting request. Returns the slots that it takes, or num_free if it must wait.

        A request with more parallel samples than there are slots is admitted to an empty server.
        """
        seq = next(waiting, None)
        if seq is None or num_free < min(seq.width, num_slots) or not step.admit(seq, step.tokens_left):
            return num_free
        return seq.width
