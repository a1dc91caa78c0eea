"""The routing policies of a run: one per model, each with its own state.

Routers that need output lengths have a predictor of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

from policies.core.request import Request
from policies.prediction import LengthPredictor
from policies.routing import ReplicaView, Routing, RoutingTraits
from policies.user_code.traits import traits_of
from sim.cluster.gateway_attachment import GatewayAttachment, RequestAttempt
from sim.records.requests import FINISHED, RequestLog


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
        return traits_of(self._routing, RoutingTraits).on_first_token is not None

    def __missing__(self, model: str | None) -> Router:
        policy = self._routing if model is None else deepcopy(self._routing)
        choose, traits = policy.choose, traits_of(policy, RoutingTraits)
        if traits.needs_predictor:
            assert self._length_predictions is not None
            choose = partial(self._length_predictions.choose, policy)
        router = self[model] = Router(policy, choose, traits.on_first_token, traits.on_end)
        return router


class LengthPredictions(GatewayAttachment):
    """Predicted output lengths of requests, from a predictor that learns from complete requests.

    attempts: the attempts in progress, by request id.
    """

    def __init__(
        self, predictor: LengthPredictor, attempts: Mapping[int, RequestAttempt], requests: RequestLog
    ) -> None:
        self._predictor = predictor
        self._attempts = attempts
        self._requests = requests

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        predictor = self._predictor
        attempt = self._attempts[request.request_id]
        truth = attempt.arrival.num_output_tokens if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def choose(self, routing: Routing, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the choice of a routing policy, after passing it the predicted output length."""
        self.predict_for(routing, request)
        return routing.choose(request, replicas, now)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request = attempt.arrival.request
        if self._requests.status[request.request_id] == FINISHED:
            self._predictor.observe(request, self._requests.output_tokens[request.request_id])
