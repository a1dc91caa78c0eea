"""The routing policies that a gateway calls, one per model, each with its own state.

Routers that need output lengths have a predictor of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from policies.core.request import Request
from policies.gateway.attachments import A, GatewayAttachment, R, RequestAttempt, S
from policies.prediction import LengthPredictor
from policies.routing import ReplicaView, Routing, RoutingTraits
from policies.user_code import traits_of


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

    def __init__(
        self, routing: Routing, length_predictions: LengthPredictions[Any, Any, Any] | None = None
    ) -> None:
        super().__init__()
        self._routing = routing
        self._length_predictions = length_predictions

    @property
    def see_first_tokens(self) -> bool:
        """True if the policy has a handler of first tokens."""
        return traits_of(self._routing, RoutingTraits).on_first_token is not None

    def __missing__(self, model: str | None) -> Router:
        policy = self._routing if model is None else deepcopy(self._routing)
        choose, traits = policy.choose, traits_of(policy, RoutingTraits)
        if traits.needs_predictor:
            assert self._length_predictions is not None
            choose = partial(self._length_predictions.choose, policy)
        router = self[model] = Router(policy, choose, traits.on_first_token, traits.on_end)
        return router


class LengthPredictions(GatewayAttachment[R, A, S]):
    """Predicted output lengths of requests, from a predictor that learns from complete requests.

    attempts: the attempts in progress, by request id. true_length: the true output length of a request, for a
    predictor that needs it. output_length: that of a request that is complete; None for another end.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        attempts: Mapping[int, RequestAttempt[R, A]],
        *,
        true_length: Callable[[A], int],
        output_length: Callable[[int], int | None],
    ) -> None:
        self._predictor = predictor
        self._attempts = attempts
        self._true_length = true_length
        self._output_length = output_length

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        predictor = self._predictor
        attempt = self._attempts[request.request_id]
        truth = self._true_length(attempt.arrival) if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def choose(self, routing: Routing, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the choice of a routing policy, after passing it the predicted output length."""
        self.predict_for(routing, request)
        return routing.choose(request, replicas, now)

    def left(self, attempt: RequestAttempt[R, A], now: float) -> None:
        request = attempt.arrival.request
        num_tokens = self._output_length(request.request_id)
        if num_tokens is not None:
            self._predictor.observe(request, num_tokens)
