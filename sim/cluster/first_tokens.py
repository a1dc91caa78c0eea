"""Reports first tokens of requests, if a policy or the timeout of a client depends on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.cluster.request_attempt import RequestAttempt
from sim.cluster.routers import Routers
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock
from sim.engine.replica import Replica


class FirstTokens:
    """Notifies routers, the admission policy and clients of the first token of each request.

    notify_admission: the hook of the admission policy. is_waited_for: whether the timeout of the clients ends
    with the first token. attempts: the attempts in progress, by request id.
    """

    def __init__(
        self,
        routers: Routers,
        notify_admission: Callable[[Request, float], None] | None,
        *,
        is_waited_for: bool,
        attempts: Mapping[int, RequestAttempt],
        clock: Clock,
    ) -> None:
        self._routers = routers
        self._notify_admission = notify_admission
        self._is_wanted = is_waited_for or notify_admission is not None or routers.see_first_tokens
        self._attempts = attempts
        self._clock = clock
        self._of_replica: dict[int, FirstTokensOfReplica] = {}
        self.on_notify: Callable[[int], None] | None = None
        """Is called with the id of each request of which the policies are notified."""

    def attach_to(self, replica: Replica) -> None:
        """Attaches a listener for first tokens to a replica, if any policy or client needs them."""
        if self._is_wanted:
            listener = self._of_replica[replica.index] = FirstTokensOfReplica(self.notify)
            replica.attach(listener)

    def resumes(self, request_id: int, replica: Replica) -> None:
        """Marks a request as continued in a replica after the crash of another one."""
        if replica.index in self._of_replica:
            self._of_replica[replica.index].resumes(request_id)

    def notify(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request, from any replica."""
        attempt = self._attempts[request_id]
        request, now = attempt.arrival.request, self._clock.now
        notify_router = self._routers[request.model].on_first_token
        if notify_router is not None:
            notify_router(request, now)
        if self._notify_admission is not None and not attempt.has_token:
            self._notify_admission(request, now)
        attempt.has_token = True
        if self.on_notify is not None:
            self.on_notify(request_id)


class FirstTokensOfReplica(Attachment):
    """Calls on_first_token(request_id) with every first token that a replica produces for an attempt."""

    def __init__(self, on_first_token: Callable[[int], None]) -> None:
        self._on_first_token = on_first_token
        self._resumed: set[int] = set()  # ids of continued requests that have no token from here yet

    def resumes(self, request_id: int) -> None:
        """Marks a request as continued here: its next token counts as its first from this replica."""
        self._resumed.add(request_id)

    def prefilled(self, seq: Sequence, now: float) -> None:
        if seq.request_id in self._resumed:
            self._resumed.remove(seq.request_id)
        elif seq.num_output_tokens != 1:
            return
        self._on_first_token(seq.request_id)

    def left(self, seq: Sequence) -> None:
        self._resumed.discard(seq.request_id)

    def crashed(self, now: float) -> None:
        self._resumed.clear()
