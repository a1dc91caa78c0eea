"""Chunked prefill with prompts only every few iterations: vLLM's prefill_schedule_interval.

While a sequence decodes, prompts start and continue only in iterations whose number is a multiple of
prefill_schedule_interval. The other iterations only decode, and admit requests with all tokens but one in the
cache. If requests still wait after an iteration with prompts, the engine is saturated, and prompts are
computed in every iteration until the queue is empty. vLLM 0.32 has this for data parallel ranks, which wait
for each other in every layer of experts: their iterations have equal numbers, so all ranks compute prompts in
the same iterations. vLLM counts from the last time when all ranks were idle, this policy from the start. vLLM
0.33 also has it for a single engine, which counts from its last iteration with prompts
(`StepView.paces_alone`).
Memory pressure: as chunked.
Horizon: iterations that only decode repeat until the next one that may compute prompts, unless a request
with a cached prompt lacks memory; others as chunked, except that an iteration that leaves an unfinished
prompt and no waiting request is decided again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fieldlimits import PositiveInt
from policies.batching.chunked import Chunked
from policies.core.plan import FOREVER
from policies.core.sequence import DECODING, ENDING
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PacedPrefills(Chunked):
    """Chunked prefill in every prefill_schedule_interval-th iteration."""

    prefill_schedule_interval: PositiveInt = 4
    """Iterations from one that may compute prompts to the next; 1: all, as chunked."""
    _saturated: dict[str, bool] = field(init=False, default_factory=dict, repr=False, compare=False)
    """last: whether requests still waited after the last iteration that could compute prompts."""
    _prompts: dict[str, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """end: iterations up to the last one with prompts; now: 1 if the last plan has prompts."""

    @property
    def max_unasked_decodes(self) -> int:
        """0, because an iteration without waiting requests ends the saturation."""
        return 0

    @property
    def _mixes_prefills(self) -> bool:
        """True, because a sequence with a cached prompt may begin while another prefill pauses."""
        return True

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Gives the budget to running sequences, then to new ones; between two intervals, only to decodes."""
        step.budget(self._budget)
        num_left = self._num_left(view)
        has_decodes = any(seq.state in (DECODING, ENDING) for seq in view.running)
        if num_left and has_decodes and not self._saturated.get("last", False):
            step.decode_all()
            if self._admit_cached(view, step):
                step.repeat(num_left)
            return
        max_chunk = self._max_chunk(view) if self.long_prefill_token_threshold else FOREVER
        num_running = view.num_running
        self._serve_running(view, step, max_chunk)
        if view.num_running == num_running:  # none was preempted
            self._admit_waiting(view, step, max_chunk)
            self._saturated["last"] = view.num_waiting > 0
        self._prompts["now"] = step.computes_prompts
        is_paused_next = has_decodes and view.prefilling and not view.num_waiting
        if not is_paused_next and (max_chunk == FOREVER or not self._may_admit_later(view, step)):
            step.repeat()

    def _num_left(self, view: StepView) -> int:
        """Returns the iterations until the next one that may compute prompts; 0: this one."""
        interval, num_iterations = self.prefill_schedule_interval, view.num_iterations
        if not view.paces_alone:
            return -num_iterations % interval
        if self._prompts.pop("now", False):
            self._prompts["end"] = num_iterations
        return max(self._prompts.get("end", -interval) + interval - num_iterations - 1, 0)

    def _admit_cached(self, view: StepView, step: StepBuilder) -> bool:
        """Admits waiting sequences in order, as long as the cache has all of their tokens but one.

        Returns False if such a sequence is refused, because the cache may have fewer of its tokens later.
        """
        if not self.scheduler_reserve_full_isl:
            step.reserve_first_chunks()
        max_running = view.max_num_seqs if self.max_num_active_seqs is None else self.max_num_active_seqs
        for seq in view.waiting:
            if view.num_running >= max_running or view.num_found(seq) < seq.num_known - 1:
                return True
            if not step.admit(seq, 1):
                return False
        return True
