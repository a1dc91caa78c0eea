"""The routing policies of a run: one for each model, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

from policies.core.request import Request
from policies.routing import ReplicaView, Routing
from sim.cluster.length_predictions import LengthPredictions


class Hooks(NamedTuple):
    """The events of which a policy wants to be told, if any."""

    first_token: Callable[[Request, float], None] | None
    end: Callable[[Request, float], None] | None

    @classmethod
    def of(cls, policy: object) -> Hooks:
        """Those that a policy defines."""
        return cls(getattr(policy, "on_first_token", None), getattr(policy, "on_end", None))


class Router(NamedTuple):
    """A routing policy, how it is asked, and what it wants to be told."""

    policy: Routing
    choose: Callable[[Request, Sequence[ReplicaView], float], int]
    on_first_token: Callable[[Request, float], None] | None
    on_end: Callable[[Request, float], None] | None


class Routers(dict[str | None, Router]):
    """Copies of one policy by model; requests that name no model share the policy itself.

    lengths: tells a policy that needs it how long answers are expected to be.
    """

    def __init__(self, routing: Routing, length_predictions: LengthPredictions | None) -> None:
        super().__init__()
        self._routing = routing
        self._length_predictions = length_predictions

    @property
    def see_first_tokens(self) -> bool:
        """Whether the policy wants to know of them."""
        return Hooks.of(self._routing).first_token is not None

    def __missing__(self, model: str | None) -> Router:
        policy = self._routing if model is None else deepcopy(self._routing)
        choose = policy.choose
        if getattr(policy, "needs_predictor", False):
            assert self._length_predictions is not None
            choose = partial(self._length_predictions.choose, policy)
        router = self[model] = Router(policy, choose, *Hooks.of(policy))
        return router
