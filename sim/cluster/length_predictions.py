"""Predicts output lengths for routers that need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.core.request import Request
from policies.prediction import LengthPredictor
from policies.routing import ReplicaView, Routing
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.request_attempt import RequestAttempt
from sim.records.requests import FINISHED, RequestLog


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
