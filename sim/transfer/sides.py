"""The two sides of a KV transfer: the attachments of a prefill replica and of a decode replica.

Both call the gateway, by the interface that `sim.cluster.transfer_gateway` implements.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from policies.core.limits import StopAfter
from policies.core.plan import Migrant, StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import Routing
from sim.engine.attachment import Attachment
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica


class KvSource(Protocol):
    """The interface of transfers that the side of the receiving replica calls."""

    def fetch(self, request_id: int, num_tokens: int, *, had_room_at_once: bool) -> None:
        """Starts the copy of num_tokens tokens of KV to a replica with slot and blocks for them.

        had_room_at_once: whether the replica had slot and blocks as soon as it was chosen.
        """
        ...


class KvTransferControl(KvSource, Protocol):
    """The interface of `sim.transfer.kv_transfers.KvTransfers` that both sides call."""

    def found(self, request_id: int) -> None:
        """Completes the transfer of a sequence all KV of which was in the cache of the decode replica."""
        ...

    def begin(self, source: Replica, migrant: Migrant, prefill_s: float, now: float) -> None:
        """Begins the transfer of a sequence that has completed its prefill.

        prefill_s: its share of the duration of the iterations, in seconds.
        """
        ...


class PrefillSide(Attachment):
    """Begins a KV transfer for every sequence that completes its prefill on a prefill replica."""

    def __init__(self, replica: Replica, kv_transfers: KvTransferControl) -> None:
        self._replica = replica
        self._kv_transfers = kv_transfers
        self._prefill_s: dict[int, float] = {}  # by request id: share of its chunks in the iterations' time

    def ending(self, step: RunningStep, now: float) -> None:
        """Divides the time of the iterations among their prompts, in proportion to the tokens."""
        chunks = step.plan.chunks
        if not chunks:
            return
        start_s = step.start_s
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        for end_s in step.ends_s[: step.num_iterations]:
            for chunk in chunks:
                request_id, share = chunk.seq.request_id, chunk.num_tokens / num_tokens
                self._prefill_s[request_id] = self._prefill_s.get(request_id, 0.0) + share * (end_s - start_s)
            start_s = end_s

    def transfers_prefilled(self, seq: Sequence, now: float) -> bool:
        if seq.finish_reason is not None:  # it has ended with its first token
            return False
        replica = self._replica
        migrant = replica.core.begin_kv_transfer(seq.request_id)
        assert migrant is not None, f"{seq!r} cannot be transferred"
        replica.recorder.events.hand_over(seq, now)
        self._kv_transfers.begin(replica, migrant, self._prefill_s.pop(seq.request_id, 0.0), now)
        return True

    def left(self, seq: Sequence) -> None:
        self._prefill_s.pop(seq.request_id, None)

    def crashed(self, now: float) -> None:
        self._prefill_s.clear()


class ReceivingSide(Attachment):
    """Accepts the sequences that are transferred to a replica, and requests their KV.

    tier: the location of their KV, see `policies.core.plan.Transfer`.
    """

    def __init__(self, replica: Replica, kv_source: KvSource, tier: str) -> None:
        self._replica = replica
        self._kv_source = kv_source
        self._incoming: set[int] = set()  # ids of requests transferred to this replica, without KV here
        self._new: set[int] = set()  # of these, those that entered after the latest plan
        replica.copies.sources[tier] = self._fetch

    def received(self, request_id: int) -> None:
        """Marks the KV of a transferred sequence as complete."""
        self._incoming.remove(request_id)

    def entered(self, seq: Sequence) -> None:
        if seq.request_id in self._incoming:
            self._new.add(seq.request_id)

    def left(self, seq: Sequence) -> None:
        self._incoming.discard(seq.request_id)
        self._new.discard(seq.request_id)

    def crashed(self, now: float) -> None:
        self._incoming.clear()
        self._new.clear()

    def _fetch(self, transfer: Transfer) -> None:
        """Requests the KV of a sequence for which the replica has slot and blocks."""
        assert transfer.seq is not None
        request_id = transfer.seq.request_id
        self._kv_source.fetch(request_id, transfer.num_tokens, had_room_at_once=request_id in self._new)


class DecodeSide(ReceivingSide):
    """Accepts the sequences that have completed their prefill on another replica."""

    def __init__(self, replica: Replica, kv_transfers: KvTransferControl) -> None:
        ReceivingSide.__init__(self, replica, kv_transfers, "remote")
        self._kv_transfers = kv_transfers

    def adopt(
        self, migrant: Migrant, stop_after: StopAfter, now: float, known_s: float | None = None
    ) -> None:
        """Accepts a sequence from another replica. Raises RejectedError if it can never continue here.

        known_s: time at which it reaches the engine, s; None: now.
        """
        replica, request = self._replica, migrant.request
        replica.core.check_migrant(request, migrant.num_known, stop_after)
        known_s = now if known_s is None else known_s
        replica.expect(request, known_s, partial(replica.core.adopt, stop_after=stop_after), migrant, now)
        self._incoming.add(request.request_id)

    def planned(self, plan: StepPlan | None, now: float) -> None:
        """Reports the transferred sequences that this plan runs, as all their KV was in the cache here."""
        self._new.clear()
        if plan is None or not self._incoming:
            return
        for seq in plan.admitted:
            if seq.request_id in self._incoming:
                self._incoming.remove(seq.request_id)
                self._kv_transfers.found(seq.request_id)


class Replicas(Protocol):
    """The replicas of a run."""

    @property
    def decoding_all(self) -> list[Replica]:
        """Replicas of decode and mixed pools, which may continue requests of prefill replicas."""
        ...

    def for_decode(self, request: Request) -> list[Replica]:
        """Returns the candidates of the decode router for a request that has completed its prefill."""
        ...

    def next_serving(self, replica: Replica) -> Replica | None:
        """Returns the next replica by index that serves and is reached; None: there is no other."""
        ...

    def is_reached(self, replica: Replica) -> bool:
        """Returns whether the link to a replica is up."""
        ...


class GatewayForTransfers(Protocol):
    """Keeps track of the replica of each request during KV transfers."""

    @property
    def fleet(self) -> Replicas:
        """All replicas of the run."""
        ...

    def stop_after(self, request_id: int) -> StopAfter:
        """Returns the number of output tokens after which a request ends."""
        ...

    def num_sends(self, request_id: int) -> int:
        """Returns how often the router has chosen a replica for a request."""
        ...

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        ...

    def first_token(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request."""
        ...

    def moved(self, request: Request, replica: Replica) -> None:
        """Marks a request as continued in another replica."""
        ...

    def returned(self, request_id: int, replica: Replica) -> None:
        """Marks a request as back in its prefill replica, as no other replica has it."""
        ...

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """Notifies the router that a replica has freed the slot and blocks of a transferred request.

        num_sends: its value when the KV transfer began.
        """
        ...

    def refuse(self, request: Request, reason: str) -> None:
        """Fails an attempt that the decode replica can never continue."""
        ...

    def restart(self, request_id: int, *, is_resend: bool = True) -> None:
        """Restarts a request that no replica has any more, after its streamed tokens or from scratch.

        is_resend: whether the cause is a crash of its replica, not of the replica with a copy of its KV.
        """
        ...
