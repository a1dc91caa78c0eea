"""Our core with speculation, and with the policies that stand for vLLM's settings of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import Sequence
from policies.speculation import DraftLength, Proposer
from policies.speculation.draft_lengths import ByBatchSize, Fixed
from policies.speculation.engine.drafting import Drafting
from policies.speculation.engine.drafts import DraftPlan
from policies.speculation.engine.drafts import Speculation as CoreSpeculation
from policies.speculation.proposers import DraftModel, Eagle, Eagle3, Medusa, Mtp, Ngram, Suffix
from tests.parity.drafts_script import Speculation
from tests.parity.lockstep import OurEngine, Settings

NEVER = 2**62
"""The place of a stop token that does not come."""


def proposer_of(speculation: Speculation) -> Proposer:
    """Returns the proposer that stands for vLLM's settings; it needs no draft model to be scheduled."""
    if speculation.method == "mtp":
        return Mtp(
            draft=None,
            num_speculative_tokens=speculation.num_speculative_tokens,
            num_nextn_predict_layers=speculation.num_modules,
        )
    classes = (DraftModel, Eagle, Eagle3, Medusa, Ngram, Suffix)
    proposer = next(cls for cls in classes if cls.method == speculation.method)
    return proposer(draft=None, num_speculative_tokens=speculation.num_speculative_tokens)


def draft_length_of(speculation: Speculation) -> DraftLength:
    """Returns the policy that stands for vLLM's settings."""
    if speculation.by_batch_size is None:
        return Fixed()
    return ByBatchSize(num_speculative_tokens_per_batch_size=speculation.by_batch_size)


class OurSpeculativeEngine(OurEngine):
    """An engine that speculates, which is told the scripted acceptances."""

    def _new_core(self, settings: Settings, **parts: Any) -> EngineCore:
        self._script = script = settings.speculation
        speculation = CoreSpeculation(proposer=proposer_of(script), draft_length=draft_length_of(script))
        ends = Ends.one_step_late if self._is_async else Ends.at_once
        new_drafts = partial(Drafting, speculation)
        return EngineCore(ends=ends, new_drafts=new_drafts, release=settings.release, **parts)

    def _drafts(self, plan: StepPlan) -> dict[int, int]:
        return plan.drafts.by_request()

    def _run(
        self, plan: StepPlan, max_iterations: int, late: list[Sequence]
    ) -> tuple[StepOutcome, list[Sequence]]:
        drafts = plan.drafts
        if self._script.finds_fewer:
            max_iterations = 1
        accepted, num_left = self._accepted(drafts, max_iterations, late)
        num_iterations = 1
        if max_iterations > 1:
            num_iterations = self.core.drafts.num_iterations_of(plan, accepted)[0]
        has_stopped = (accepted + 1).cumsum(axis=0) >= num_left
        stops = has_stopped[:num_iterations].any(axis=1)
        if stops.any():
            num_iterations = int(np.argmax(stops)) + 1
        accepted = accepted[:num_iterations]
        self.core.drafts.take_blocks_of(plan, num_iterations)
        stopped = [drafts.seqs[index] for index in np.flatnonzero(has_stopped[num_iterations - 1])]
        for chunk in plan.chunks:
            arrival = self._arrivals[chunk.seq.request_id]
            is_last = chunk.completes and chunk.seq.num_output_tokens + 1 == arrival.num_output_tokens
            if is_last and arrival.end == "sampled" and chunk.seq not in late:
                stopped.append(chunk.seq)
        proposed = self._proposed(drafts, accepted)
        return StepOutcome(num_iterations, accepted=accepted, proposed=proposed), stopped

    def _accepted(
        self, drafts: DraftPlan, num_iterations: int, late: list[Sequence]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the accepted draft tokens up to a stop token, and by sequence the tokens to that one."""
        num_left = np.full(len(drafts.seqs), NEVER)
        accepted = np.zeros((num_iterations, len(drafts.seqs)), np.int64)
        for index, (seq, depth) in enumerate(zip(drafts.seqs, drafts.depth.tolist(), strict=True)):
            arrival = self._arrivals[seq.request_id]
            position = seq.num_output_tokens
            end = arrival.num_output_tokens if arrival.end == "sampled" and seq not in late else NEVER
            num_left[index] = end - position
            for iteration in range(num_iterations):
                num = self._script.num_accepted(seq.request_id, position, depth)
                accepted[iteration, index] = num = max(min(num, end - position - 1), 0)
                position += num + 1
        return accepted, num_left

    def _proposed(self, drafts: DraftPlan, accepted: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Returns the draft tokens that the proposer finds for the next pass of each sequence."""
        if not self._script.finds_fewer:
            return None
        num_completing = len(drafts.next_seqs) - len(drafts.seqs)
        num_new = [*(accepted.sum(axis=0) + len(accepted)).tolist(), *[1] * num_completing]
        found = [
            self._script.num_found(seq.request_id, seq.num_output_tokens + num, asked)
            for seq, num, asked in zip(drafts.next_seqs, num_new, drafts.next_drafts.tolist(), strict=True)
        ]
        return np.array(found, np.int64)
