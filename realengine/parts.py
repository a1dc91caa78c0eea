"""The classes of which an engine is made: a feature may bring its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.caching.pool import BlockPool
from policies.speculation.engine.drafting import Drafting
from realengine.engine import Engine
from realengine.runner.runner import Runner


class Parts(NamedTuple):
    """Makes the parts of an engine; the arguments are those of Runner and Engine."""

    new_drafts: Callable[[BlockPool], Drafting] | None
    """Makes the part of the core that verifies draft tokens; None: no drafts."""
    runner: Callable[..., Runner]
    engine: Callable[..., Engine]
