"""An engine that keeps a diary of what it decides, and checks that no block goes astray."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from policies.caching.pool import BlockPool
from policies.core.branch_set import tokens_in_own_name
from policies.core.engine import EngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import Sequence

MAX_PLANS = 20_000
"""After which a run is taken for one that never ends: these worlds take hundreds, or thousands."""


class Decision(NamedTuple):
    """A committed plan: what it was when it was made, and for how many iterations it was run."""

    iteration: int
    start_s: float
    digest: str
    tokens_by_request: dict[int, int]
    admitted: list[int]
    preempted: list[int]
    num_iterations: int


class DiaryCore(EngineCore):
    """Writes every committed plan down, and checks after every plan and commit that no block went astray."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.decisions: list[Decision] = []
        self.arrival_s: dict[int, float] = {}
        """By request id, of those that came here."""
        self.first_admitted: list[int] = []
        """Request ids, in the order in which they first got a slot."""
        self._has_had_slot: set[Sequence] = set()
        self._num_plans = 0

    def enter(self, seq: Sequence) -> Sequence:
        self.arrival_s[seq.request_id] = seq.request.arrival_s
        return super().enter(seq)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._note_admitted()
        self._num_plans += 1
        assert self._num_plans <= MAX_PLANS, f"{MAX_PLANS} plans, and requests are left: they never end"
        if plan is not None:
            self._planned = Decision(
                plan.index,
                now,
                plan.digest(),
                plan.tokens_by_request,
                [seq.request_id for seq in plan.admitted],
                [seq.request_id for seq in plan.preempted],
                0,
            )
            self._check_block_ids(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        self.decisions.append(self._planned._replace(num_iterations=outcome.iterations))
        progress = super().commit(plan, outcome, now)
        self.check_integrity()
        return progress

    def _note_admitted(self) -> None:
        """Write down which sequences have got a slot for the first time since the last plan."""
        new = [seq for seq in self.unfinished if seq.admission and seq not in self._has_had_slot]
        for seq in sorted(new, key=lambda seq: seq.admission):
            self._has_had_slot.add(seq)
            self.first_admitted.append(seq.request_id)

    def _check_block_ids(self, plan: StepPlan) -> None:
        tokens = plan.tokens_by_request
        owners: Counter[int] = Counter()
        num_unasked = 0  # blocks of branches that are computed again
        for seq in self.running.values():
            if tokens_in_own_name(seq) is not None:
                owners.update({number for table in self.branched.block_ids(seq) for number in table})
                continue
            num_unasked += seq.num_apart
            num_tokens = seq.num_held + tokens.get(seq.request_id, 0)
            ids = self.block_ids(seq, num_tokens)
            assert len(ids) == self.pool.blocks_held(seq, num_tokens)
            owners.update(ids)
        assert set(owners) <= set(range(1, self.pool.num_blocks + 1))
        shares = type(self.pool).num_cached is not BlockPool.num_cached  # it finds what others computed
        assert shares or all(count == 1 for count in owners.values()), "a block is owned twice"
        num_unasked += 0 if self.residents is None else self.residents.num_blocks
        assert len(owners) == self.pool.num_used - num_unasked, "a block is leaked"
        for source, target in self.branched.copies(plan):
            assert source in owners, "a copy of a block that nobody owns"
            assert target in owners, "a copy into a block that nobody owns"
