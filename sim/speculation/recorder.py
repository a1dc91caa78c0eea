"""Records the activity of a replica that speculates."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.recorder import Recorder
from sim.engine.running_step import RunningStep
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog
from sim.speculation.log import DraftLog
from sim.speculation.shapes import pairs_of
from sim.speculation.verdict_table import VerdictTable


class DraftRecorder(Recorder):
    """The logs of one replica that speculates; it also says what is accepted.

    Of the running step, accepted, computed [iterations, sequences]: accepted draft tokens, computed tokens
    before each iteration. contexts, pairs [iterations]: context tokens of all decodes, and query-key pairs of
    draft tokens. num_blocks [iterations]: see `Drafting.num_iterations_of`.
    """

    def __init__(
        self,
        replica: int,
        core: EngineCore,
        requests: RequestLog,
        frontend_s: float,
        seed: int,
        verdicts: VerdictTable,
        frontend_times: dict[int, float] | None = None,
    ) -> None:
        super().__init__(replica, core, requests, frontend_s, seed, frontend_times)
        self._verdicts = verdicts
        self.accepted: Ints = np.zeros((0, 0), np.int64)
        self.computed: Ints = np.zeros((0, 0), np.int64)
        self.contexts = self.pairs = self.num_blocks = np.zeros(0, np.int64)

    def _new_log(self, replica: int, block_size: int, serves_adapters: bool) -> IterationLog:
        return DraftLog(replica, block_size, serves_adapters)

    def expect(self, plan: StepPlan, drafts: DraftPlan, accepted: Ints, num_blocks: Ints) -> None:
        """Sets what the iterations of a plan accept, and the KV blocks that they take."""
        num_seqs, num_iterations = len(drafts.seqs), len(accepted)
        computed: Ints = drafts.num_computed[np.newaxis]
        self.contexts = contexts = np.array([plan.num_decode_context_tokens])
        if num_iterations > 1:
            computed = np.concatenate((computed, drafts.totals[: num_iterations - 1]))
            self.contexts = contexts = np.add.reduce(computed, axis=1) + num_seqs
        self.accepted, self.computed, self.num_blocks = accepted, computed, num_blocks
        self.pairs = pairs_of(drafts, computed, contexts - num_seqs)

    def decoded_after(self, plan: StepPlan, num_iterations: int) -> Iterable[tuple[Sequence, int]]:
        """Returns the tokens that each decoding sequence has got after num_iterations of a running plan."""
        drafts, last = plan.drafts, num_iterations - 1
        assert isinstance(drafts, DraftPlan)
        if not drafts.seqs:
            return ()
        num_computed = np.minimum(self.computed[last] + self.accepted[last] + 1, drafts.end)
        return zip(drafts.seqs, (num_computed - self.computed[0]).tolist(), strict=True)

    def ran(self, step: RunningStep) -> StepOutcome:
        """Records iterations that have run; returns the outcome for the core, which commits them next."""
        core, plan, tokens, log = self._core, step.plan, self.tokens, self.iterations
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        assert isinstance(log, DraftLog)
        assert core.drafts is not None
        num_iterations, num_apart = step.num_iterations, 0
        accepted, last = self.accepted[:num_iterations], num_iterations - 1
        if tokens.apart or plan.idle or self._paused:
            num_apart = tokens.log_gaps(plan, step.ends_s[0], log)
        if core.running_set.ending:
            num_apart += core.running_set.num_surplus(plan)
        surplus: Ints = self.computed[last] + accepted[last] - drafts.end
        has_surplus = np.count_nonzero(surplus >= 0) > 0
        proposed = self._verdicts.proposed(drafts, accepted[last])
        log.add_passes(
            step,
            core,
            tokens.last_decode_s,
            num_apart,
            accepted=accepted,
            contexts=self.contexts[:num_iterations],
            pairs=self.pairs[:num_iterations],
            surplus=np.maximum(surplus + 1, 0) if has_surplus else None,
            num_proposed=None if proposed is None else int(proposed.sum()),
            num_new_blocks=self.num_blocks,
        )
        core.drafts.take_blocks_of(plan, num_iterations)
        self._verdicts.ran(drafts, num_iterations)
        if drafts.seqs:
            tokens.last_decode_s = step.end_s
        if plan.chunks:
            num_prefills = self.requests.prefill_iterations
            for chunk in plan.chunks:
                num_prefills[chunk.seq.request_id] += num_iterations
        return StepOutcome(num_iterations, accepted=accepted, proposed=proposed)
