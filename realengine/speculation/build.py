"""The core of an engine that speculates, and what the engine does with its draft tokens."""

from __future__ import annotations

from typing import Any

from policies.speculation.engine.async_core import AsyncSpeculativeCore
from policies.speculation.engine.core import Speculating, SpeculativeCore
from policies.speculation.engine.drafts import Speculation
from realengine.clock import Clock
from realengine.speculation.drafting import Drafting
from realengine.speculation.host import drafter_of
from realengine.speculation.pass_times import PassTimes
from realengine.speculation.settings import SpeculationSettings


def speculating_core(
    settings: SpeculationSettings, clock: Clock, *, overlap: bool, vocab_size: int, **others: Any
) -> tuple[Speculating, Drafting]:
    """Returns a core, and the engine's part in its draft tokens.

    clock: the engine's, which measures passes for draft-length policies that need their cost. overlap:
    whether the engine launches a pass before it reads the one before, if the proposer allows it. others: as
    of EngineCore.
    """
    host = settings.host or drafter_of(settings.proposer)
    measures = settings.draft_length.needs_cost and settings.estimate is None
    pass_times = PassTimes(settings.proposer, clock.now) if measures else None
    speculation = Speculation(
        proposer=settings.proposer,
        draft_length=settings.draft_length,
        estimate=settings.estimate or pass_times,
        tpot_s=settings.tpot_s,
    )
    reads_late = overlap and host is None and settings.proposer.rules.overlaps
    core = (AsyncSpeculativeCore if reads_late else SpeculativeCore)(speculation=speculation, **others)
    timeout_s = None if settings.host is None else settings.host_timeout_s
    drafting = Drafting(
        core,
        host=host,
        timeout_s=timeout_s,
        pass_times=pass_times,
        reads_late=reads_late,
        vocab_size=vocab_size,
    )
    return core, drafting
