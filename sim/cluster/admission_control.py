"""Admission control at the gateway: calls the policy before routing, and reports ends of requests to it."""

from __future__ import annotations

from policies.admission import Admission, AdmissionTraits, Refusal
from policies.user_code.decisions import returned
from policies.user_code.traits import traits_of
from sim.cluster.gateway import Gateway
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.request_attempt import RequestAttempt
from sim.engine.replica import Replica


class AdmissionControl(GatewayAttachment):
    """Calls the admission policy once per attempt, and reports the end of the attempts that it admitted."""

    def __init__(self, admission: Admission, gateway: Gateway) -> None:
        self._admission = admission
        self._gateway = gateway
        self._on_end = traits_of(admission, AdmissionTraits).on_end

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        if attempt.is_admitted:
            return serving
        refusal = self._admission.refusal(attempt.arrival.request, serving, now)
        if refusal is not None:
            if not isinstance(refusal, Refusal):
                rule = "must return None, which admits the request, or a policies.admission.Refusal"
                raise returned(self._admission, "refusal", refusal, rule)
            self._gateway.fail(attempt, refusal.reason, refusal.retry_after_s)
            return None
        attempt.is_admitted = True
        return serving

    def left(self, attempt: RequestAttempt, now: float) -> None:
        if attempt.is_admitted and self._on_end is not None:
            self._on_end(attempt.arrival.request, now)
        attempt.is_admitted = False
