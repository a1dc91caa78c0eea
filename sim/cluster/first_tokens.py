"""First tokens of requests, told to the gateway where a policy or a client's time limit depends on them."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment


class FirstTokens(Attachment):
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
