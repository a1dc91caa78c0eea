"""KV transfers of prefill/decode disaggregation: a prompt is computed on one replica and decoded on another.

    prefill complete   target chosen               slot and blocks   KV complete     first token decoded
    |-- same instant --|-- queue of the target ----|-- network ------|-- next iteration --|
    source: |---------------- keeps slot and blocks -----------------|

So a full decode replica causes backpressure on the prefill replicas, and KV is copied only once there are
blocks for it. KV that the decode replica finds in its cache is not copied at all.

With layer-wise transfer, each layer of KV is sent as soon as it is computed: a copy for which the target had
room at once has also had the time of the prefill (Splitwise, Patel et al., ISCA 2024, section IV-C). At
least the last layer then remains, and what the link could not carry in that time. The prompts of one
iteration share its time in proportion to their tokens; other flows on the link during the prefill are
neglected. A copy that had to wait for room is sent whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Annotated

from simpy.events import ProcessGenerator

from fieldlimits import Checked, NonNegative, NonNegativeInt, OneOf, Unit
from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import Migrant
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import Routing, RoutingTraits, chosen
from policies.user_code import traits_of
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.transfer.kv_copy import kv_copy
from sim.transfer.network import Flow, Interconnect
from sim.transfer.sides import DecodeSide, GatewayForTransfers, PrefillSide

TRANSFERS = ("layerwise", "at_end")
FIRST_TOKENS = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSettings(Checked):
    """Settings of the KV transfer from prefill to decode replicas."""

    transfer: Annotated[str, OneOf(TRANSFERS)] = "layerwise"
    """When KV is sent: layerwise, during the prefill; at_end, all of it afterwards."""
    first_token_at: Annotated[str | None, OneOf(FIRST_TOKENS), "null: as the engine does"] = "prefill"
    """Replica that emits the first token: prefill, when it is computed; decode, when the KV has arrived;
    None: as the engine of the decode replicas does, see `sim.setup.pool.first_token_at`."""
    message_bytes: Annotated[NonNegative, Unit("bytes")] = 0.0
    """Bytes of KV that a link carries in the time that a message takes besides its bytes; a message is a
    slice of a KV block, see `sim.transfer.kv_copy`."""
    overflow_tokens: Annotated[NonNegativeInt, Unit("tokens")] = 8192
    """Queued prompt tokens of every prefill replica from which on mixed replicas get prompts, too."""


@dataclass(slots=True, eq=False)
class KvTransfer:
    """The transfer of the KV of one request from a prefill replica to a decode replica."""

    migrant: Migrant
    stop_after: StopAfter
    source: Replica
    prefill_s: float
    """Share of the prompt in the duration of its iterations, s; KV can be sent layer by layer meanwhile."""
    num_sends: int
    """Value of `GatewayForTransfers.num_sends` at the beginning of the transfer."""
    target: Replica | None = None
    flow: Flow | None = None
    began_s: float = 0.0
    """Time at which the copy of the KV begins, s."""
    num_bytes: float = 0.0
    """Bytes of KV to be copied, including those sent during the prefill."""
    release: Callable[[], None] | None = None
    """Frees the KV in the prefill replica, if another request has computed it; see `take_over`."""


class KvTransfers:
    """All KV transfers of a run. routing: the policy that chooses the decode replica."""

    def __init__(
        self,
        *,
        settings: KvTransferSettings,
        routing: Routing,
        clock: Clock,
        requests: RequestLog,
        gateway: GatewayForTransfers,
        interconnect: Interconnect,
    ) -> None:
        self.overflow_tokens = settings.overflow_tokens
        self._settings = settings
        self._routing = routing
        traits = traits_of(routing, RoutingTraits)
        self._needs_length, self._on_routed_end = traits.needs_predictor, traits.on_end
        self._clock = clock
        self._requests = requests
        self._gateway = gateway
        self._interconnect = interconnect
        self._in_progress: dict[int, KvTransfer] = {}  # by request id
        self._held: dict[int, KvTransfer] = {}  # those of them that wait for a decode replica
        self._routed: set[int] = set()  # request ids with a chosen decode replica, until they end
        self._decode_sides: dict[int, DecodeSide] = {}  # by replica index
        self.keeps: Callable[[Replica, Migrant, float], bool] | None = None
        """Called with every complete prefill; returns whether its KV is kept in place of being sent."""

    def attach(self, replica: Replica) -> None:
        """Attaches a listener to a new replica: prefill replicas send KV, all others may receive it."""
        if replica.pool.role == "prefill":
            replica.attach(PrefillSide(replica, self))
        else:
            side = self._decode_sides[replica.index] = DecodeSide(replica, self)
            replica.attach(side)

    def check(self, replica: Replica, request: Request, num_known: int) -> None:
        """Raises RejectedError if a prefill replica gets a request that no replica could decode.

        num_known: prompt tokens and output tokens of the request so far.
        """
        if replica.pool.role != "prefill":
            return
        if request.max_tokens is not None and num_known + 1 >= request.prompt.num_tokens + request.max_tokens:
            return
        refusal = None
        for target in self._gateway.fleet.decoding_all:
            try:
                target.core.check_migrant(request, num_known + 1)
            except RejectedError as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def begin(self, source: Replica, migrant: Migrant, prefill_s: float, now: float) -> None:
        """Begins the transfer of a sequence that has completed its prefill.

        prefill_s: seconds of the prefill, see `KvTransfer`.
        """
        if self.keeps is not None and self.keeps(source, migrant, now):
            return
        request_id = migrant.request.request_id
        stop_after = self._gateway.stop_after(request_id)
        transfer = KvTransfer(migrant, stop_after, source, prefill_s, self._gateway.num_sends(request_id))
        self._in_progress[request_id] = transfer
        self._requests.prefill_replica[request_id] = source.index
        if self._settings.first_token_at == "prefill":
            self._emit(transfer, now)
        else:
            self._requests.held_back.add(request_id)
        self._clock.begin(self._hand_over(transfer, now))

    def take_over(
        self,
        source: Replica,
        target: Replica,
        migrant: Migrant,
        stop_after: StopAfter,
        release: Callable[[], None],
    ) -> None:
        """Lets a replica continue a sequence with KV that another request has computed.

        release: frees that KV; called at the end of the copy, or when there will be none. Raises
        RejectedError.
        """
        request, now = migrant.request, self._clock.now
        known_s = target.known_s(request, stop_after)
        self._decode_sides[target.index].adopt(migrant, stop_after, now, known_s)
        num_sends = self._gateway.num_sends(request.request_id)
        self._in_progress[request.request_id] = KvTransfer(
            migrant, stop_after, source, 0.0, num_sends, target, release=release
        )

    def source_lost(self, request_id: int) -> None:
        """Restarts a request whose KV was lost in the other replica before it was copied."""
        transfer = self._in_progress.pop(request_id, None)
        if transfer is not None:
            self._abort_in_target(transfer)

    def _abort_in_target(self, transfer: KvTransfer) -> None:
        request_id = transfer.migrant.request.request_id
        if transfer.flow is not None:
            self._interconnect.network.cancel(transfer.flow)
        assert transfer.target is not None
        transfer.target.abort(request_id, partial(self._gateway.restart, request_id))

    def fetch(self, request_id: int, num_tokens: int, *, had_room_at_once: bool) -> None:
        """Starts the copy of num_tokens tokens of KV to a decode replica that has slot and blocks for them.

        had_room_at_once: whether the replica had slot and blocks as soon as it was chosen.
        """
        transfer = self._in_progress[request_id]
        source, target = transfer.source, transfer.target
        assert target is not None
        transfer.began_s = self._clock.now
        route, transfer.num_bytes, overhead_bytes = kv_copy(
            self._interconnect, source, target, num_tokens, self._settings.message_bytes
        )
        ahead_bytes = 0.0
        if self._settings.transfer == "layerwise" and had_room_at_once:
            all_but_last = transfer.num_bytes * (1 - 1 / source.pool.num_layers)
            ahead_bytes = min(all_but_last, route.bytes_per_s * transfer.prefill_s)
            self._interconnect.network.count_carried(route, ahead_bytes)
        transfer.flow = self._interconnect.network.send(
            route, transfer.num_bytes + overhead_bytes - ahead_bytes, partial(self._on_copied, transfer)
        )

    def found(self, request_id: int) -> None:
        """Completes the transfer of a sequence all KV of which was in the cache of the decode replica."""
        transfer = self._in_progress.pop(request_id)
        transfer.began_s = self._clock.now
        self._finish(transfer)

    def withdraw(self, request_id: int) -> None:
        """Stops a request that is being aborted from waiting for a decode replica."""
        self._held.pop(request_id, None)

    def ended(self, request: Request, now: float) -> None:
        """Cancels the transfer of a request that has ended, and notifies the decode router."""
        if request.request_id in self._routed:
            self._routed.remove(request.request_id)
            if self._on_routed_end is not None:
                self._on_routed_end(request, now)
        self._requests.held_back.discard(request.request_id)
        transfer = self._in_progress.pop(request.request_id, None)
        if transfer is None:
            return
        self._held.pop(request.request_id, None)
        if transfer.flow is not None:
            self._interconnect.network.cancel(transfer.flow)
        self._release_source(transfer)

    def lost(self, request: Request) -> bool:
        """Handles a request that a crash has lost; returns false if the caller has to restart it.

        If its decode replica has crashed and its prefill replica has its KV, it is transferred to another
        decode replica. If the prefill replica has crashed, the decode replica aborts it, then it restarts.
        """
        request_id, now = request.request_id, self._clock.now
        if request_id in self._routed:
            self._routed.remove(request_id)
            if self._on_routed_end is not None:
                self._on_routed_end(request, now)
        transfer = self._in_progress.get(request_id)
        if transfer is None:
            return False
        if transfer.release is not None:
            self.ended(request, now)
            return False
        target = transfer.target
        if transfer.flow is not None:
            self._interconnect.network.cancel(transfer.flow)
        if transfer.source.core.find(request_id) is not None:
            transfer.target = transfer.flow = None
            self._gateway.returned(request_id, transfer.source)
            self._choose_target(transfer)
            return True
        del self._in_progress[request_id]
        self._held.pop(request_id, None)
        if target is None:
            return False
        target.abort(request_id, partial(self._gateway.restart, request_id))
        return True

    def ready(self) -> None:
        """Chooses a decode replica for each transfer that waits for one, after the fleet has changed."""
        held, self._held = self._held, {}
        for transfer in held.values():
            self._choose_target(transfer)

    def _emit(self, transfer: KvTransfer, now: float) -> None:
        """Emits the token of the prefill: the first one, or the next one of a resumed request."""
        request_id = transfer.migrant.request.request_id
        self._requests.held_back.discard(request_id)
        if isnan(self._requests.first_token_s[request_id]):
            self._requests.first_token(request_id, now)
        else:
            since_s = self._requests.next_token(request_id, now)
            transfer.source.recorder.iterations.add_gap(request_id, since_s, now)
        self._gateway.first_token(request_id)

    def _hand_over(self, transfer: KvTransfer, now: float) -> ProcessGenerator:
        """Sends a sequence to a decode replica, after the iterations that end at this time."""
        yield self._clock.at(now, Phase.arrive)
        if self._is_in_progress(transfer):
            self._choose_target(transfer)

    def _is_in_progress(self, transfer: KvTransfer) -> bool:
        return self._in_progress.get(transfer.migrant.request.request_id) is transfer

    def _choose_target(self, transfer: KvTransfer) -> None:
        """Chooses the decode replica of a sequence and sends it there; holds it if there is none."""
        request, now = transfer.migrant.request, self._clock.now
        targets = self._gateway.fleet.for_decode(request)
        if not targets:
            self._held[request.request_id] = transfer
            return
        if self._needs_length:
            self._gateway.predict_for(self._routing, request)
        target = chosen(self._routing, self._routing.choose(request, targets, now), targets)
        self._routed.add(request.request_id)
        try:
            self._decode_sides[target.index].adopt(transfer.migrant, transfer.stop_after, now)
        except RejectedError as error:
            self._gateway.refuse(request, str(error))
            return
        transfer.target = target
        self._requests.replica[request.request_id] = target.index
        self._gateway.moved(request, target)

    def _on_copied(self, transfer: KvTransfer) -> None:
        request_id = transfer.migrant.request.request_id
        del self._in_progress[request_id]
        assert transfer.target is not None
        self._finish(transfer)
        self._decode_sides[transfer.target.index].received(request_id)
        transfer.target.loaded(request_id)

    def _finish(self, transfer: KvTransfer) -> None:
        """Records the end of a transfer, and frees the sequence in the prefill replica."""
        request_id, now = transfer.migrant.request.request_id, self._clock.now
        self._requests.kv_transfer_s[request_id] = now - transfer.began_s
        self._requests.kv_transfer_bytes[request_id] = transfer.num_bytes
        if self._settings.first_token_at == "decode" and transfer.release is None:
            self._emit(transfer, now)
        self._release_source(transfer)

    def _release_source(self, transfer: KvTransfer) -> None:
        """Frees the slot and blocks of a sequence in its prefill replica."""
        if transfer.release is not None:
            transfer.release()
            return
        transfer.source.release_migrated(
            transfer.migrant.request.request_id, partial(self._on_released, transfer)
        )

    def _on_released(self, transfer: KvTransfer, seq: Sequence) -> None:
        """Reports that the prefill replica has freed the slot and blocks of a sequence."""
        self._gateway.released(transfer.source, seq.request, transfer.num_sends)
