"""The classes of which an engine is made: a feature may bring its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from policies.core.engine import EngineCore
from realengine.engine import Engine
from realengine.runner.runner import Runner


class Parts(NamedTuple):
    """Makes the parts of an engine; the arguments are those of EngineCore, Runner and Engine."""

    core: Callable[..., EngineCore]
    runner: Callable[..., Runner]
    engine: Callable[..., Engine]
