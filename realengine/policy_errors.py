"""Names the user's policy that has failed in the engine, and the line of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from policies.core.engine import EngineCore
from policies.user_code.failure import Policy, failure

P = ParamSpec("P")
R = TypeVar("R")


class HasCore(Protocol):
    """An object with an engine's core."""

    core: EngineCore


S = TypeVar("S", bound=HasCore)


def policies_named(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method raise PolicyError in place of an error that a policy of the core has caused."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            found = failure(error, _policies_of(self.core))
            if found is None:
                raise
            raise found from error

    return call


def _policies_of(core: EngineCore) -> Iterator[Policy]:
    policies = {
        "batching": core.batching,
        "scheduling": core.scheduling,
        "caching": core.block_pool,
        "predictor": core.predictor,
        "adapters": core.residents,
    }
    for key, policy in policies.items():
        if policy is not None:
            yield Policy(key, type(policy).__name__, type(policy), policy)
