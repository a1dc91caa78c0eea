"""Recovery of requests after a crash of their replica: how much of the computed work is kept, and where.

    scratch   Nothing is kept: the request restarts, and its client gets the output from the beginning.
    tokens    The gateway keeps the tokens that it has streamed. The request continues after them in another
              replica, which recomputes the KV of prompt and tokens that it does not have in its cache.
              This is NVIDIA Dynamo's request migration.
    kv        Also, KV is copied to the host memory of another replica while it is computed. That part is read
              from there, the rest is recomputed. This is replication as in DejaVu (Strati et al., ICML 2024),
              where a worker sends the KV of each token to the next worker. If that replica is down, too,
              recovery is as with tokens.

Streamed tokens are never sampled, emitted or counted again. A request that cannot continue in the chosen
replica, because the KV memory of that one is too small, restarts there.

`Recovery` has the settings; `Resends` sends the requests that a crash has lost again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Annotated

from fieldlimits import Checked, OneOf, check
from policies.core.limits import RejectedError
from policies.core.plan import Migrant
from policies.core.request import Request
from sim.cluster.clients import FirstTokens
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.transfer.kv_replication import KvReplication
from sim.transfer.kv_transfers import KvTransfers

WAYS = ("scratch", "tokens", "kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery(Checked):
    """Settings of the recovery of requests after a crash of their replica."""

    way: Annotated[str, OneOf(WAYS)] = "scratch"
    """scratch, tokens or kv; see the module."""
    every_tokens: int | None = None
    """With kv: replication interval in iterations, which are output tokens of each decoding sequence."""

    def __post_init__(self) -> None:
        check(self)
        if self.way != "kv" and self.every_tokens is not None:
            raise ValueError(
                f"every_tokens={self.every_tokens}: must be null, as way={self.way} copies no KV; "
                "or choose way=kv"
            )
        if self.way == "kv" and (self.every_tokens is None or self.every_tokens < 1):
            raise ValueError(f"every_tokens={self.every_tokens}: must be >= 1 with way=kv")

    @property
    def keeps_tokens(self) -> bool:
        """True if a request continues after the tokens that its client already has."""
        return self.way != "scratch"


class Resends(GatewayAttachment):
    """Resends lost requests, each at most max_resends times; after that the attempt fails.

    kv_transfers, kv_replication: None if the run has none.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        max_resends: int,
        recovery: Recovery,
        requests: RequestLog,
        first_tokens: FirstTokens,
    ) -> None:
        # Both are set by `GatewayAssembly`, as they call `restart`.
        self.kv_transfers: KvTransfers | None = None
        self.kv_replication: KvReplication | None = None
        self._gateway = gateway
        self._max_resends = max_resends
        self._recovery = recovery
        self._requests = requests
        self._first_tokens = first_tokens

    def lost(self, request_id: int) -> None:
        """Handles a request that a crash has lost: resends it, or fails the attempt."""
        attempt = self._gateway.attempts[request_id]
        request, transfers = attempt.arrival.request, self.kv_transfers
        if attempt.has_left and attempt.replica is not None and attempt.replica.holds(request_id):
            return  # The replica that crashed was transferring its KV; the target replica aborts the request.
        if attempt.has_left or transfers is None or not transfers.lost(request):
            self.restart(request_id)

    def restart(self, request_id: int, *, is_resend: bool = True) -> None:
        """Restarts a request that no replica has any more, after its streamed tokens or from scratch.

        is_resend: whether the cause is a crash of its replica, not of the replica with a copy of its KV.
        """
        attempt = self._gateway.attempts[request_id]
        self._gateway.release(attempt)
        self._requests.forget_kv_transfer(request_id)
        is_sent = not attempt.has_left and (not is_resend or attempt.num_resends < self._max_resends)
        has_branches = attempt.arrival.request.branching is not None
        attempt.is_resumed = is_sent and self._recovery.keeps_tokens and not has_branches
        if not attempt.is_resumed:
            self._requests.lose(request_id, in_crash=True)
        if attempt.is_given_up:
            self._gateway.abandon(attempt)
        elif attempt.is_timed_out:
            self._gateway.fail(attempt, "timed out")
        elif is_sent:
            attempt.num_resends += is_resend
            self._requests.num_resends += is_resend
            self._gateway.dispatch(attempt)
        else:
            self._gateway.fail(attempt, "its replica crashed")

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        migrant = self._migrant(attempt, replica, request) if attempt.is_resumed else None
        if migrant is None:
            return False
        if isnan(self._requests.first_token_s[request.request_id]):
            replica.count_queued(request.request_id, request.prompt.num_tokens)
        enter = partial(replica.core.adopt, stop_after=attempt.stop_after, tier="mirror")
        replica.expect(migrant.request, replica.known_s(request, attempt.stop_after), enter, migrant)
        self._requests.num_resumed += 1
        self._first_tokens.resumes(request.request_id, replica)
        if migrant.num_computed:
            assert self.kv_replication is not None
            self.kv_replication.expect(request.request_id, replica)
        return True

    def failing(self, attempt: RequestAttempt) -> None:
        if attempt.is_resumed:
            self._restart_from_scratch(attempt)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request_id = attempt.arrival.request.request_id
        if self.kv_replication is not None:
            self.kv_replication.ended(request_id)
        self._requests.lost_kv.pop(request_id, None)

    def _migrant(self, attempt: RequestAttempt, replica: Replica, request: Request) -> Migrant | None:
        """Returns the state with which a request continues in a replica; None: it restarts from scratch.

        None if nothing was kept, or if the replica has too little KV memory. At least two tokens are left to
        compute, so that the next token comes from a prefill.
        """
        request_id, arrival = request.request_id, attempt.arrival
        num_known = request.prompt.num_tokens + self._requests.output_tokens[request_id]
        num_left = 0 if self.kv_replication is None else self.kv_replication.num_left(request_id)
        num_computed = max(0, min(num_left, num_known - 2))
        if num_known == request.prompt.num_tokens and not num_computed:
            return None
        try:
            replica.core.check_migrant(request, num_known, arrival.num_output_tokens)
            if self.kv_transfers is not None:
                self.kv_transfers.check(replica, request, num_known)
        except RejectedError:
            self._restart_from_scratch(attempt)
            return None
        return Migrant(request, num_known, num_computed)

    def _restart_from_scratch(self, attempt: RequestAttempt) -> None:
        """Drops the tokens and the KV that were kept of a request, which then restarts from scratch."""
        request_id = attempt.arrival.request.request_id
        attempt.is_resumed = False
        self._requests.lose(request_id, in_crash=True)
        if self.kv_replication is not None:
            self.kv_replication.ended(request_id)
