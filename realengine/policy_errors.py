"""Names the user's policy that has failed in the engine, and the line of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from policies.core.engine import EngineCore
from policies.user_code.failure import Policy, failure

P = ParamSpec("P")
R = TypeVar("R")


class HasPolicies(Protocol):
    """An object that calls policies."""

    @property
    def policies(self) -> Mapping[str, object]:
        """The policies by their settings' names; None: there is none."""
        ...


S = TypeVar("S", bound=HasPolicies)


def policies_named(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Makes a method raise PolicyError in place of an error that a policy of the core has caused."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            found = failure(error, _named(self.policies))
            if found is None:
                raise
            raise found from error

    return call


def policies_of(core: EngineCore) -> dict[str, object]:
    """Returns the policies of every engine by their settings' names."""
    return {
        "batching": core.batching,
        "scheduling": core.scheduling,
        "caching": core.block_pool,
        "predictor": core.predictor,
        "adapters": core.residents,
    }


def _named(policies: Mapping[str, object]) -> Iterator[Policy]:
    for key, policy in policies.items():
        if policy is not None:
            yield Policy(key, type(policy).__name__, type(policy), policy)
