"""KV transfers of prefill/decode disaggregation: prompts are computed on one replica, decoded on another.

    prompt done        chosen      slot and blocks there      KV is there      first token from there
    |-- same instant --|-- queue of that replica --|-- network --|-- next iteration --|
    source: |---------------- keeps slot and KV ----------------|

So a decode replica that is full holds up the prefill replicas, and nothing is copied that has no place. KV
that the decode replica finds in its cache is not copied at all.

Layer-wise, KV is sent while the prompt is still being computed, each layer as it is done: a copy for which
there was room at once has had the time of the prefill (Splitwise, Patel et al., ISCA 2024, section IV-C). At
least the last layer is left then, and what the link could not carry in that time. Prompts of one iteration
share its time by their tokens; what else is on the link then is not reckoned with. A copy that had to wait
for room is sent whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isnan

from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import Migrant
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import Routing, chosen
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.transfer.gateway import GatewayForTransfers
from sim.transfer.interconnect import Interconnect
from sim.transfer.network import Flow
from sim.transfer.sides import DecodeSide, PrefillSide

TRANSFERS = ("layerwise", "at_end")
FIRST_TOKENS = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSettings:
    """How KV is transferred from prefill to decode replicas."""

    transfer: str = "layerwise"
    """When KV is sent: layerwise, while the prompt is computed; at_end, all of it afterwards."""
    first_token_at: str = "prefill"
    """Where the first token goes out: prefill, as soon as it is computed; decode, when the KV is there."""
    overflow_tokens: int = 8192
    """Prompt tokens in the queue of every prefill replica from which on mixed replicas take prompts, too."""

    def __post_init__(self) -> None:
        if self.transfer not in TRANSFERS:
            raise ValueError(f"transfer={self.transfer}: must be one of {', '.join(TRANSFERS)}")
        if self.first_token_at not in FIRST_TOKENS:
            raise ValueError(
                f"first_token_at={self.first_token_at}: must be one of {', '.join(FIRST_TOKENS)}"
            )
        if self.overflow_tokens < 0:
            raise ValueError(f"overflow_tokens={self.overflow_tokens}: must be >= 0 tokens")


@dataclass(slots=True, eq=False)
class KvTransfer:
    """One request whose KV is on its way from a prefill replica to a decode replica."""

    migrant: Migrant
    stop_after: StopAfter
    source: Replica
    prefill_s: float
    """Seconds of the prompt's share of iterations, during which KV can be sent layer by layer."""
    num_sends: int
    """As `GatewayForTransfers.num_sends` says when it begins."""
    target: Replica | None = None
    flow: Flow | None = None
    began_s: float = 0.0
    """Time at which the copy of the KV begins, in seconds."""
    num_bytes: float = 0.0
    """Bytes of KV copied, including those sent during the prefill."""


class KvTransfers:
    """All KV transfers of a run. routing: chooses the decode replica."""

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
        self._needs_length: bool = getattr(routing, "needs_predictor", False)
        self._on_routed_end: Callable[[Request, float], None] | None = getattr(routing, "on_end", None)
        self._clock = clock
        self._requests = requests
        self._gateway = gateway
        self._interconnect = interconnect
        self._under_way: dict[int, KvTransfer] = {}
        self._held: dict[int, KvTransfer] = {}  # those of them that wait for a decode replica
        self._routed: set[int] = set()  # request ids: the decode router waits for their end
        self._decode_sides: dict[int, DecodeSide] = {}  # by replica

    def attach(self, replica: Replica) -> None:
        """Attach a new replica: those of prefill pools send KV, all others may receive it."""
        if replica.pool.role == "prefill":
            replica.attach(PrefillSide(replica, self))
        else:
            side = self._decode_sides[replica.index] = DecodeSide(replica, self)
            replica.attach(side)

    def check(self, replica: Replica, request: Request, num_known: int) -> None:
        """Raise RejectedError for so many tokens at a prefill replica that no replica could decode."""
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
        """A prompt has been computed, and its first token."""
        request_id = migrant.request.request_id
        stop_after = self._gateway.stop_after(request_id)
        transfer = KvTransfer(migrant, stop_after, source, prefill_s, self._gateway.num_sends(request_id))
        self._under_way[request_id] = transfer
        self._requests.prefill_replica[request_id] = source.index
        if self._settings.first_token_at == "prefill":
            self._emit(transfer, now)
        else:
            self._requests.held_back.add(request_id)
        self._clock.at(now, Phase.arrive, partial(self._on_begun, transfer))

    def fetch(self, request_id: int, num_tokens: int, *, had_room_at_once: bool) -> None:
        """A decode replica has slot and blocks for a sequence: copy the KV of so many of its tokens."""
        transfer = self._under_way[request_id]
        source, target = transfer.source, transfer.target
        assert target is not None
        route = self._interconnect.route(source.index, target.index)
        transfer.began_s = self._clock.now
        transfer.num_bytes = num_tokens * target.copies.links.bytes_per_token
        ahead_bytes = 0.0
        if self._settings.transfer == "layerwise" and had_room_at_once:
            all_but_last = transfer.num_bytes * (1 - 1 / source.pool.num_layers)
            ahead_bytes = min(all_but_last, route.bytes_per_s * transfer.prefill_s)
            self._interconnect.network.note_carried(route, ahead_bytes)
        transfer.flow = self._interconnect.network.send(
            route, transfer.num_bytes - ahead_bytes, partial(self._on_copied, transfer)
        )

    def found(self, request_id: int) -> None:
        """A decode replica goes on with a sequence all of whose KV was in its cache."""
        transfer = self._under_way.pop(request_id)
        transfer.began_s = self._clock.now
        self._arrive(transfer)

    def withdraw(self, request_id: int) -> None:
        """A request is about to end: no decode replica is to be chosen for it any more."""
        self._held.pop(request_id, None)

    def ended(self, request: Request, now: float) -> None:
        """A request has ended, wherever it was."""
        if request.request_id in self._routed:
            self._routed.remove(request.request_id)
            if self._on_routed_end is not None:
                self._on_routed_end(request, now)
        self._requests.held_back.discard(request.request_id)
        transfer = self._under_way.pop(request.request_id, None)
        if transfer is None:
            return
        self._held.pop(request.request_id, None)
        if transfer.flow is not None:
            self._interconnect.network.cancel(transfer.flow)
        self._let_go(transfer)

    def lost(self, request: Request) -> bool:
        """A crash has lost a request; whether it goes on all the same, or will begin again by itself.

        If its decode replica crashed and its prefill replica has its KV, it goes to another one. If that
        crashed, the decode replica, which still waits for the rest, first lets it go.
        """
        request_id, now = request.request_id, self._clock.now
        if request_id in self._routed:
            self._routed.remove(request_id)
            if self._on_routed_end is not None:
                self._on_routed_end(request, now)
        transfer = self._under_way.get(request_id)
        if transfer is None:
            return False
        target = transfer.target
        if transfer.flow is not None:
            self._interconnect.network.cancel(transfer.flow)
        if transfer.source.core.find(request_id) is not None:
            transfer.target = transfer.flow = None
            self._gateway.returned(request_id, transfer.source)
            self._choose(transfer)
            return True
        del self._under_way[request_id]
        self._held.pop(request_id, None)
        if target is None:
            return False
        target.abort(request_id, partial(self._gateway.restart, request_id))
        return True

    def ready(self) -> None:
        """A decode replica has come: choose for those that wait for one."""
        held, self._held = self._held, {}
        for transfer in held.values():
            self._choose(transfer)

    def _emit(self, transfer: KvTransfer, now: float) -> None:
        """The token of the prefill goes out: the first, or that with which a resumed request goes on."""
        request_id = transfer.migrant.request.request_id
        self._requests.held_back.discard(request_id)
        if isnan(self._requests.first_token_s[request_id]):
            self._requests.first_token(request_id, now)
        else:
            since_s = self._requests.next_token(request_id, now)
            transfer.source.recorder.iterations.add_gap(request_id, since_s, now)
        self._gateway.first_token(request_id)

    def _on_begun(self, transfer: KvTransfer, event: int) -> None:
        if self._is_on(transfer):
            self._choose(transfer)

    def _is_on(self, transfer: KvTransfer) -> bool:
        return self._under_way.get(transfer.migrant.request.request_id) is transfer

    def _choose(self, transfer: KvTransfer) -> None:
        """Send a sequence on to a decode replica."""
        request, now = transfer.migrant.request, self._clock.now
        targets = self._gateway.fleet.for_decode(request)
        if not targets:
            self._held[request.request_id] = transfer
            return
        if self._needs_length:
            self._gateway.predict_for(self._routing, request)
        target = chosen(self._routing, self._routing.choose(request, targets, now), targets, "decode_routing")
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
        del self._under_way[request_id]
        assert transfer.target is not None
        self._arrive(transfer)
        self._decode_sides[transfer.target.index].received(request_id)
        transfer.target.loaded(request_id)

    def _arrive(self, transfer: KvTransfer) -> None:
        """A sequence has its KV in the decode replica."""
        request_id, now = transfer.migrant.request.request_id, self._clock.now
        self._requests.kv_transfer_s[request_id] = now - transfer.began_s
        self._requests.kv_transfer_bytes[request_id] = transfer.num_bytes
        if self._settings.first_token_at == "decode":
            self._emit(transfer, now)
        self._let_go(transfer)

    def _let_go(self, transfer: KvTransfer) -> None:
        """The prefill replica frees what it holds of a sequence."""
        transfer.source.release_migrated(
            transfer.migrant.request.request_id, partial(self._departed, transfer)
        )

    def _departed(self, transfer: KvTransfer, seq: Sequence) -> None:
        """The prefill replica has freed what it held."""
        self._gateway.released(transfer.source, seq.request, transfer.num_sends)
