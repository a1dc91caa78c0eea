"""Chunked prefill that waits until every data-parallel attention rank has a prompt: SGLang's prefill delayer.

With data-parallel attention all ranks run a step together, because they share the experts: a rank without a
prompt waits in a dummy batch while another one computes its prompt. Prompts that could start are therefore
delayed, while sequences decode, until every rank has one, or until max_delay_passes iterations have passed
since the first of them could start (`--prefill-delayer-max-delay-passes`). Each rank may then compute as many
prompt tokens as its share of max_num_batched_tokens. With attention_data_parallel_size, ranks have their own
prompts and agree in every iteration, as in SGLang; without it, n prompts count as n ranks. Memory pressure:
as chunked. Horizon: as chunked with a threshold; a delay repeats until it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import NonNegativeInt, PositiveInt, Unit
from policies.batching.chunked import Chunked
from policies.core.step import StepBuilder
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillDelayer(Chunked):
    """Chunked prefill of as many prompts at once as there are attention ranks."""

    num_ranks: PositiveInt = 8
    """Number of ranks (attention_data_parallel_size of the run), which is the number of prompts computed at
    once.
    """
    max_delay_passes: Annotated[NonNegativeInt, Unit("iterations")] = 30
    """Maximum number of iterations for which prompts are delayed; 0: none."""
    _waiting_since: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Number of the iteration in which the current delay began, by the request that was first at that time.
    """

    def __post_init__(self) -> None:
        Chunked.__post_init__(self)
        if self.max_num_batched_tokens < self.num_ranks:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= "
                f"num_ranks={self.num_ranks}, a token for each rank"
            )

    @property
    def _mixes_prefills(self) -> bool:
        """True, because a short prompt may decode before an older one of another rank is computed."""
        return True

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Gives the budget to running sequences, then to new ones unless these are delayed."""
        step.budget(self._budget)
        max_chunk = self._budget if view.num_ranks > 1 else max(1, self._budget // self.num_ranks)
        num_running = view.num_running
        self._serve_running(view, step, max_chunk)
        if view.num_running < num_running:  # one was preempted
            return
        num_left = self._num_passes_left(view)
        if num_left:
            step.repeat(num_left)
            return
        self._admit_waiting(view, step, max_chunk)
        if not self._may_admit_later(view, step):
            step.repeat()

    def _num_passes_left(self, view: StepView) -> int:
        """Returns the number of iterations for which prompts must wait; 0: they may start."""
        has_free_rank = view.is_decoding and view.num_prompts < self.num_ranks
        may_delay = view.num_waiting and not view.prefilling and has_free_rank
        first = next(iter(view.waiting), None) if may_delay else None  # the scheduling may hold all back
        if first is None:
            self._waiting_since.clear()
            return 0
        since = self._waiting_since.get(first.request_id, view.num_iterations)
        self._waiting_since.clear()
        self._waiting_since[first.request_id] = since
        return max(0, since + self.max_delay_passes - view.num_iterations)
