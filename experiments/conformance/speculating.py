"""Worlds whose engines speculate: any rules, any trees, any acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from experiments.conformance.recording_core import RecordingCore
from experiments.conformance.worlds import World
from policies.core.engine import EngineCore
from policies.speculation import DraftLength, SlotRules, TokenTree
from policies.speculation.draft_lengths import Fixed
from policies.speculation.engine.drafting import Drafting
from policies.speculation.engine.drafts import Speculation
from sim.engine.replica_pool import ReplicaPool
from sim.speculation import Acceptance
from sim.speculation.acceptance.iid import Iid
from sim.speculation.passes import Passes


@dataclass(frozen=True, kw_only=True)
class ToyProposer:
    """A proposer with any rules."""

    method: ClassVar[str] = "toy"
    num_speculative_tokens: int = 3
    tree: TokenTree | None = None
    rules: SlotRules = field(default_factory=SlotRules)
    draft: object = None


@dataclass(frozen=True, kw_only=True)
class SpeculatingWorld(World):
    """A `World` in which every replica speculates."""

    proposer: ToyProposer = field(default_factory=ToyProposer)
    draft_length: DraftLength = field(default_factory=Fixed)
    acceptance: Acceptance = field(default_factory=lambda: Iid(rate=0.6))
    tpot_s: float | None = None

    def _core(
        self, cores: list[RecordingCore], *, num_blocks: int | None = None, **settings: Any
    ) -> EngineCore:
        speculation = Speculation(
            proposer=self.proposer,
            draft_length=self.draft_length,
            estimate=lambda num_seqs, num_context, num_drafts: 1.0 + 0.01 * num_seqs * num_drafts,
            tpot_s=self.tpot_s,
        )
        return super()._core(
            cores, num_blocks=num_blocks, new_drafts=partial(Drafting, speculation), **settings
        )

    def _pool(
        self, cores: list[RecordingCore], *, core: Mapping[str, Any] | None = None, **settings: Any
    ) -> ReplicaPool:
        new_passes = partial(Passes, self.acceptance, self.proposer)
        return super()._pool(cores, core=core, new_passes=new_passes, **settings)
