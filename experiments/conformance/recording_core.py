"""An engine whose decisions are recorded, and whose KV blocks are checked after every plan."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from policies.caching.hybrid import GroupPool
from policies.caching.pool import BlockPool
from policies.caching.prefix import PrefixPool
from policies.core.branch_set import num_prompt_block_tokens
from policies.core.engine import EngineCore
from policies.core.limits import StopAfter
from policies.core.plan import Migrant, Progress, StepOutcome, StepPlan
from policies.core.request import Request
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


class RecordingCore:
    """Wraps an engine: records every committed plan, and checks the block tables after every plan and commit.

    All that it does not define is that of the engine. settings: those of `EngineCore`.
    """

    core: EngineCore
    decisions: list[Decision]
    arrival_s: dict[int, float]
    """Arrival times by request id, of the requests that entered this engine."""
    first_admitted: list[int]
    """Request ids in the order of their first admission."""
    _planned: dict[int, Decision]
    """Plans by their index, until they are committed: a pipeline has several in flight."""
    _has_had_slot: set[Sequence]
    _num_plans: int

    def __init__(self, **settings: Any) -> None:
        own: dict[str, Any] = {"decisions": [], "arrival_s": {}, "first_admitted": [], "_has_had_slot": set()}
        vars(self).update(own, core=EngineCore(**settings), _planned={}, _num_plans=0)

    def __getattr__(self, name: str) -> Any:
        if name == "core":  # of an object that is not complete
            raise AttributeError(name)
        return getattr(self.core, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            object.__setattr__(self, name, value)
        else:
            setattr(self.core, name, value)

    def enter(self, seq: Sequence) -> Sequence:
        """Adds the sequence of a request, as the engine does."""
        self.arrival_s[seq.request_id] = seq.request.arrival_s
        return self.core.enter(seq)

    def add(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Adds a request, as the engine does."""
        return self.enter(self.core.sequence_of(request, stop_after))

    def adopt(self, migrant: Migrant, *settings: Any, **more: Any) -> Sequence:
        """Adds a sequence of another engine, as the engine does."""
        seq = self.core.adopt(migrant, *settings, **more)
        self.arrival_s[seq.request_id] = seq.request.arrival_s
        return seq

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step of the engine, which is recorded and checked."""
        plan = self.core.plan(now)
        self._note_admitted()
        self._num_plans += 1
        assert self._num_plans <= MAX_PLANS, f"after {MAX_PLANS:,} plans, requests have still not ended"
        if plan is not None:
            self._planned[plan.index] = Decision(
                plan.index,
                now,
                plan.digest(),
                plan.tokens_by_request,
                [seq.request_id for seq in plan.admitted],
                [seq.request_id for seq in plan.preempted],
                0,
            )
            # Blocks of a pool with KV groups have no ids, as the engine refuses them.
            if not isinstance(self.core.block_pool, GroupPool):
                self._check_block_ids(plan)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a step, as the engine does, and checks the engine."""
        self.decisions.append(self._planned.pop(plan.index)._replace(num_iterations=outcome.iterations))
        progress = self.core.commit(plan, outcome, now)
        self.core.check_integrity()
        return progress

    def _note_admitted(self) -> None:
        """Records the sequences that were admitted for the first time since the last plan."""
        new = [seq for seq in self.core.unfinished if seq.admission and seq not in self._has_had_slot]
        for seq in sorted(new, key=lambda seq: seq.admission):
            self._has_had_slot.add(seq)
            self.first_admitted.append(seq.request_id)

    def _check_block_ids(self, plan: StepPlan) -> None:
        core, pool = self.core, self.core.block_pool
        tokens = self._stored_tokens(plan)
        owners: Counter[int] = Counter()
        num_extra = 0  # blocks of branches that are recomputed
        for seq in core.running.values():
            if num_prompt_block_tokens(seq) is not None:
                owners.update({number for table in core.branched.block_ids(seq) for number in table})
                continue
            num_tokens, num_more = self._slots(seq, tokens.get(seq.request_id, 0))
            num_extra += num_more
            ids = pool.block_ids(seq, num_tokens)
            assert len(ids) == pool.blocks_held(seq, num_tokens)
            owners.update(ids)
        assert all(1 <= number <= pool.num_blocks for number in owners)
        shares = type(pool).num_cached is not BlockPool.num_cached  # a prefix cache shares blocks
        assert shares or all(count == 1 for count in owners.values()), "a KV block has two owners"
        num_extra += 0 if core.residents is None else core.residents.num_blocks
        # Pins keep blocks of prefixes, whether or not a running sequence has them, too.
        num_pinned = pool.num_pinned if isinstance(pool, PrefixPool) else 0
        assert 0 <= pool.num_used - num_extra - len(owners) <= num_pinned, "a KV block is leaked"
        for source, target in core.branched.copies(plan):
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
        if self.core.drafts is None:
            return seq.num_held + num_planned, seq.num_extra_blocks
        if seq in self.core.drafts.decodes:
            return int(self.core.drafts.decodes.blocks_S[seq.slot]) * self.core.block_pool.block_size, 0
        num_blocks = self.core.block_pool.blocks_for(seq.num_held + num_planned) + seq.num_extra_blocks
        return num_blocks * self.core.block_pool.block_size, 0
