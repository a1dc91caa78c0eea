"""Makers of engines with asynchronous scheduling, static batches and draft tokens, for tests."""

from __future__ import annotations

from functools import partial
from typing import Any

from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.speculation.engine.drafting import Drafting
from policies.speculation.engine.drafts import Speculation

async_core = partial(EngineCore, ends=Ends.one_step_late)
"""An engine that plans a step before it has read the one before."""
batch_core = partial(EngineCore, ends=Ends.with_batch)
"""An engine whose static batches end as a whole."""


def speculative_core(*, speculation: Speculation, **settings: Any) -> EngineCore:
    """Returns an engine that verifies draft tokens."""
    return EngineCore(new_drafts=partial(Drafting, speculation), **settings)


def async_speculative_core(*, speculation: Speculation, **settings: Any) -> EngineCore:
    """Returns an engine that verifies draft tokens, and plans a step before it has read the one before."""
    return async_core(new_drafts=partial(Drafting, speculation), **settings)
