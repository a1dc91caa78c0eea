"""First tokens of requests, told to the gateway where a policy or a client's time limit depends on them."""

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
    """Tells routers, the admission policy and clients about the first token of each request.

    tell_admission: the admission policy's hook. is_waited_for: whether the clients' timeout ends with the
    first token. attempts: those under way, by request id.
    """

    def __init__(
        self,
        routers: Routers,
        tell_admission: Callable[[Request, float], None] | None,
        *,
        is_waited_for: bool,
        attempts: Mapping[int, RequestAttempt],
        clock: Clock,
    ) -> None:
        self._routers = routers
        self._tell_admission = tell_admission
        self._is_wanted = is_waited_for or tell_admission is not None or routers.see_first_tokens
        self._attempts = attempts
        self._clock = clock
        self._of_replica: dict[int, FirstTokensOfReplica] = {}

    def watch(self, replica: Replica) -> None:
        """Let a replica tell of first tokens, if they are wanted."""
        if self._is_wanted:
            watched = self._of_replica[replica.index] = FirstTokensOfReplica(self.tell)
            replica.attach(watched)

    def resumes(self, request_id: int, replica: Replica) -> None:
        """A request goes on in a replica where another one that crashed had got."""
        if replica.index in self._of_replica:
            self._of_replica[replica.index].resumes(request_id)

    def tell(self, request_id: int) -> None:
        """A request has got its first token, from whichever replica."""
        attempt = self._attempts[request_id]
        request, now = attempt.arrival.request, self._clock.now
        tell_router = self._routers[request.model].on_first_token
        if tell_router is not None:
            tell_router(request, now)
        if self._tell_admission is not None and not attempt.has_token:
            self._tell_admission(request, now)
        attempt.has_token = True


class FirstTokensOfReplica(Attachment):
    """Calls on_first_token(request_id) with every first token that a replica produces for an attempt."""

    def __init__(self, on_first_token: Callable[[int], None]) -> None:
        self._on_first_token = on_first_token
        self._resumed: set[int] = set()  # request ids: they go on, and have no token from here yet

    def resumes(self, request_id: int) -> None:
        """A request goes on here where a replica that crashed had got."""
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
