"""The parts of an engine that speculates."""

from __future__ import annotations

from functools import partial

from policies.speculation.engine.drafting import Drafting
from policies.speculation.engine.drafts import Speculation
from realengine.clock import Clock
from realengine.parts import Parts
from realengine.speculation.engine import SpeculatingEngine
from realengine.speculation.host import drafter_of
from realengine.speculation.overlapped import OverlappedSpeculatingEngine
from realengine.speculation.pass_times import PassTimes
from realengine.speculation.runner import DraftRunner
from realengine.speculation.settings import SpeculationSettings


def speculating_parts(settings: SpeculationSettings, clock: Clock, *, overlap: bool) -> tuple[Parts, bool]:
    """Returns the parts of an engine, and whether it overlaps: only with proposers that allow it.

    clock: the engine's, which measures passes for draft-length policies that need their cost.
    """
    host = settings.host or drafter_of(settings.proposer)
    timeout_s = None if settings.host is None else settings.host_timeout_s
    measures = settings.draft_length.needs_cost and settings.estimate is None
    pass_times = PassTimes(settings.proposer, clock.now) if measures else None
    speculation = Speculation(
        proposer=settings.proposer,
        draft_length=settings.draft_length,
        estimate=settings.estimate or pass_times,
        tpot_s=settings.tpot_s,
    )
    overlap = overlap and host is None and settings.proposer.rules.overlaps
    engine = OverlappedSpeculatingEngine if overlap else SpeculatingEngine
    parts = Parts(
        partial(Drafting, speculation),
        partial(DraftRunner, drafts_on_device=host is None, pass_times=pass_times),
        partial(engine, host=host, timeout_s=timeout_s),
    )
    return parts, overlap
