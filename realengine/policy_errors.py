"""Names the user's policy that has failed, and the line of its file; ends an engine that cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from policies.core.engine import EngineCore
from policies.user_code import Policy, failure

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


class CanFail(HasPolicies, Protocol):
    """An engine that can be ended by an error."""

    def fail(self, error: Exception) -> object:
        """Ends all requests with the error, and refuses later ones."""
        ...


E = TypeVar("E", bound=CanFail)


def fatal(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Makes an error of a method end the engine: it is raised, and refuses all further work."""

    @wraps(method)
    def call(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            raise

    return call


def reason_of(error: Exception, policies: Mapping[str, object]) -> str:
    """Returns the sentence about an error that has ended one request."""
    found = failure(error, _named(policies))
    if found is not None:
        return str(found)
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


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
