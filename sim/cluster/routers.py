"""The routing policies of a run: one for each model, each with a memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

from policies.core.request import Request
from policies.routing import Routing


class Hooks(NamedTuple):
    """The events of which a policy wants to be told, if any."""

    first_token: Callable[[Request, float], None] | None
    end: Callable[[Request, float], None] | None

    @classmethod
    def of(cls, policy: object) -> Hooks:
        """Those that a policy defines."""
        return cls(getattr(policy, "on_first_token", None), getattr(policy, "on_end", None))


class Router(NamedTuple):
    """A routing policy, and what it wants to be told."""

    policy: Routing
    tell: Hooks
    needs_length: bool
    """Whether it asks for how long an answer is expected to be."""


class Routers:
    """Copies of one policy by model; requests that name no model share the policy itself."""

    def __init__(self, routing: Routing) -> None:
        self._routing = routing
        self._by_model: dict[str | None, Router] = {}

    @property
    def see_first_tokens(self) -> bool:
        """Whether the policy wants to know of them."""
        return Hooks.of(self._routing).first_token is not None

    def of_model(self, model: str | None) -> Router:
        """The router of a model's requests."""
        router = self._by_model.get(model)
        if router is None:
            policy = self._routing if model is None else deepcopy(self._routing)
            router = self._by_model[model] = Router(
                policy, Hooks.of(policy), getattr(policy, "needs_predictor", False)
            )
        return router
