"""The routing policies of a run: one per model, each with its own state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

from policies.core.request import Request
from policies.routing import ReplicaView, Routing
from sim.cluster.length_predictions import LengthPredictions


class Hooks(NamedTuple):
    """The optional event handlers of a policy; None: the policy has no such handler."""

    first_token: Callable[[Request, float], None] | None
    end: Callable[[Request, float], None] | None

    @classmethod
    def of(cls, policy: object) -> Hooks:
        """Returns the handlers that a policy defines."""
        return cls(getattr(policy, "on_first_token", None), getattr(policy, "on_end", None))


class Router(NamedTuple):
    """A routing policy with its entry point and its optional event handlers."""

    policy: Routing
    choose: Callable[[Request, Sequence[ReplicaView], float], int]
    on_first_token: Callable[[Request, float], None] | None
    on_end: Callable[[Request, float], None] | None


class Routers(dict[str | None, Router]):
    """Copies of one policy by model; requests that name no model share the policy itself.

    length_predictions: passes predicted output lengths to a policy that needs them.
    """

    def __init__(self, routing: Routing, length_predictions: LengthPredictions | None) -> None:
        super().__init__()
        self._routing = routing
        self._length_predictions = length_predictions

    @property
    def see_first_tokens(self) -> bool:
        """True if the policy has a handler of first tokens."""
        return Hooks.of(self._routing).first_token is not None

    def __missing__(self, model: str | None) -> Router:
        policy = self._routing if model is None else deepcopy(self._routing)
        choose = policy.choose
        if getattr(policy, "needs_predictor", False):
            assert self._length_predictions is not None
            choose = partial(self._length_predictions.choose, policy)
        router = self[model] = Router(policy, choose, *Hooks.of(policy))
        return router
