"""An EngineCore that records its decisions and checks after every plan that no KV block is leaked."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from policies.caching.group_pool import GroupPool
from policies.caching.pool import BlockPool
from policies.caching.prefix_pool import PrefixPool
from policies.core.branch_set import num_prompt_block_tokens
from policies.core.engine import EngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import Sequence
from policies.speculation.engine.drafts import DraftPlan

MAX_PLANS = 20_000
"""Limit of plans per run, above which it is taken as endless; these worlds need hundreds or thousands."""


class Decision(NamedTuple):
    """A committed plan as it was when planned, and the number of iterations that it was run for."""

    iteration: int
    start_s: float
    digest: str
    tokens_by_request: dict[int, int]
    admitted: list[int]
    preempted: list[int]
    num_iterations: int


class RecordingCore(EngineCore):
    """Records every committed plan and checks the block tables after every plan and commit."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.decisions: list[Decision] = []
        self.arrival_s: dict[int, float] = {}
        """Arrival times by request id, of the requests that entered this engine."""
        self.first_admitted: list[int] = []
        """Request ids in the order of their first admission."""
        self._has_had_slot: set[Sequence] = set()
        self._num_plans = 0

    def enter(self, seq: Sequence) -> Sequence:
        self.arrival_s[seq.request_id] = seq.request.arrival_s
        return super().enter(seq)

    def plan(self, now: float) -> StepPlan | None:
        plan = super().plan(now)
        self._note_admitted()
        self._num_plans += 1
        assert self._num_plans <= MAX_PLANS, f"after {MAX_PLANS:,} plans, requests have still not ended"
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
            # Blocks of a pool with KV groups have no ids, as the engine refuses them.
            if not isinstance(self.block_pool, GroupPool):
                self._check_block_ids(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        self.decisions.append(self._planned._replace(num_iterations=outcome.iterations))
        progress = super().commit(plan, outcome, now)
        self.check_integrity()
        return progress

    def _note_admitted(self) -> None:
        """Records the sequences that were admitted for the first time since the last plan."""
        new = [seq for seq in self.unfinished if seq.admission and seq not in self._has_had_slot]
        for seq in sorted(new, key=lambda seq: seq.admission):
            self._has_had_slot.add(seq)
            self.first_admitted.append(seq.request_id)

    def _check_block_ids(self, plan: StepPlan) -> None:
        tokens = self._stored_tokens(plan)
        owners: Counter[int] = Counter()
        num_extra = 0  # blocks of branches that are recomputed
        for seq in self.running.values():
            if num_prompt_block_tokens(seq) is not None:
                owners.update({number for table in self.branched.block_ids(seq) for number in table})
                continue
            num_tokens, num_more = self._slots(seq, tokens.get(seq.request_id, 0))
            num_extra += num_more
            ids = self.block_pool.block_ids(seq, num_tokens)
            assert len(ids) == self.block_pool.blocks_held(seq, num_tokens)
            owners.update(ids)
        assert all(1 <= number <= self.block_pool.num_blocks for number in owners)
        shares = type(self.block_pool).num_cached is not BlockPool.num_cached  # a prefix cache shares blocks
        assert shares or all(count == 1 for count in owners.values()), "a KV block has two owners"
        num_extra += 0 if self.residents is None else self.residents.num_blocks
        # Pins keep blocks of prefixes, whether or not a running sequence has them, too.
        pool = self.block_pool
        num_pinned = pool.num_pinned if isinstance(pool, PrefixPool) else 0
        assert 0 <= pool.num_used - num_extra - len(owners) <= num_pinned, "a KV block is leaked"
        for source, target in self.branched.copies(plan):
            assert source in owners, "KV is copied from a block without an owner"
            assert target in owners, "KV is copied to a block without an owner"

    def _stored_tokens(self, plan: StepPlan) -> dict[int, int]:
        """Returns the tokens of a plan of which the KV is stored, by request id."""
        if plan.drafts is None:
            return plan.tokens_by_request
        assert isinstance(plan.drafts, DraftPlan)
        padded = plan.drafts.padded  # their slots are among the extra blocks of the sequence
        return {
            request_id: num - padded.get(request_id, 0) for request_id, num in plan.tokens_by_request.items()
        }

    def _slots(self, seq: Sequence, num_planned: int) -> tuple[int, int]:
        """Returns the KV slots of a sequence with its planned tokens, and the blocks that it has beside."""
        if self.drafts is None:
            return seq.num_held + num_planned, seq.num_extra_blocks
        if seq in self.drafts.decodes:
            return int(self.drafts.decodes.blocks_S[seq.slot]) * self.block_pool.block_size, 0
        num_blocks = self.block_pool.blocks_for(seq.num_held + num_planned) + seq.num_extra_blocks
        return num_blocks * self.block_pool.block_size, 0
