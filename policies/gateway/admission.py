"""Admission control at a gateway: calls the admission policy, and reports first tokens and ends to it."""

from __future__ import annotations

from policies.admission import Admission, AdmissionTraits, Refusal
from policies.gateway.attachments import A, GatewayAttachment, R, RequestAttempt, S
from policies.gateway.gateway import Gateway
from policies.user_code import returned, traits_of


class AdmissionControl(GatewayAttachment[R, A, S]):
    """Calls the admission policy once per attempt, and reports the end of the attempts that it admitted."""

    def __init__(self, admission: Admission, gateway: Gateway[R, A, S]) -> None:
        self._admission = admission
        self._gateway = gateway
        traits = traits_of(admission, AdmissionTraits)
        self._on_first_token, self._on_end = traits.on_first_token, traits.on_end

    @property
    def sees_first_tokens(self) -> bool:
        """True if the policy has a handler of first tokens."""
        return self._on_first_token is not None

    def candidates(self, attempt: RequestAttempt[R, A], serving: list[R], now: float) -> list[R] | None:
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

    def first_token(self, attempt: RequestAttempt[R, A], now: float) -> None:
        if self._on_first_token is not None and not attempt.has_token:
            self._on_first_token(attempt.arrival.request, now)

    def left(self, attempt: RequestAttempt[R, A], now: float) -> None:
        if attempt.is_admitted and self._on_end is not None:
            self._on_end(attempt.arrival.request, now)
        attempt.is_admitted = False
