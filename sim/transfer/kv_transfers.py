"""KV transfers of prefill/decode disaggregation: a prompt is computed on one replica and decoded on another.

    prefill complete   target chosen               slot and blocks   KV complete     first token decoded
    |-- same instant --|-- queue of the target ----|-- network ------|-- next iteration --|
    source: |---------------- keeps slot and blocks -----------------|

A full decode replica therefore causes backpressure on the prefill replicas, and KV is copied only once there
are blocks for it. KV in the decode replica's cache is not copied. With layer-wise transfer, each layer of KV
is sent as soon as it is computed: if the target had room at once, the copy overlaps the prefill (Splitwise,
Patel et al., ISCA 2024, section IV-C). At least the last layer then remains, and the bytes that the link
could not carry in that time. The prompts of one iteration share its time in proportion to their tokens; other
flows on the link during the prefill are neglected. A copy that had to wait for room is sent completely
afterwards.

`KvCopy` is the copy of the KV of one sequence: its route and its bytes. Between replicas with different
parallel sizes, ranks send parts of their heads to several ranks. A rank holds the KV of its heads:
num_kv_heads / size heads, or a copy of one if there are more ranks than KV heads. The KV of a latent vector
(MLA) counts as one head. A transfer between layouts splits or joins heads:

    8 KV heads, 2 ranks -> 4 ranks                  2 KV heads, 4 ranks (2 copies) -> 2 ranks
    source 0: heads 0-3  -> target 0: 0-1           source 0: head 0  -> target 0
                         -> target 1: 2-3           source 1: head 0     (sends nothing)
    source 1: heads 4-7  -> target 2: 4-5           source 2: head 1     (sends nothing)
                         -> target 3: 6-7           source 3: head 1  -> target 1

Every target rank reads its own copy, as with vLLM's NixlConnector, so the bytes equal the target's; copies of
a head in the source send to different target ranks, if there are enough. A rank of a pipeline stage sends its
layers to the stages that have them in the target.

The two sides of a transfer are attachments of a prefill replica and of a decode replica. Both call the
gateway, by the interface that `sim.cluster.disaggregation` implements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import isnan
from typing import Annotated, NamedTuple, Protocol

from simpy.events import ProcessGenerator

from fieldlimits import Checked, NonNegative, NonNegativeInt, OneOf, Unit
from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import Migrant, StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import Routing, RoutingTraits, chosen
from policies.user_code import traits_of
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica
from sim.engine.replica_pool import KvLayout
from sim.records.requests import RequestLog
from sim.transfer.network import Flow, Interconnect, Route

TRANSFERS = ("layerwise", "at_end")
FIRST_TOKENS = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTransferSettings(Checked):
    """Settings of the KV transfer from prefill to decode replicas."""

    transfer: Annotated[str, OneOf(TRANSFERS)] = "layerwise"
    """When KV is sent: layerwise, during the prefill; at_end, all of it afterwards."""
    first_token_at: Annotated[str | None, OneOf(FIRST_TOKENS), "null: as the engine does"] = "prefill"
    """Replica that emits the first token: prefill, when it is computed; decode, when the KV has arrived;
    None: depends on the engine of the decode replicas, see `sim.setup.pool.first_token_at`."""
    message_bytes: Annotated[NonNegative, Unit("bytes")] = 0.0
    """Per-message overhead, as the bytes of KV that a link carries in that time; a message is a slice of a KV
    block, see `sim.transfer.kv_transfers`.
    """
    overflow_tokens: Annotated[NonNegativeInt, Unit("tokens")] = 8192
    """Queued prompt tokens of every prefill replica above which mixed replicas also get prompts."""


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
        self._held: dict[int, KvTransfer] = {}  # transfers that wait for a decode replica
        self._routed: set[int] = set()  # request ids with a chosen decode replica, until they end
        self._decode_sides: dict[int, DecodeSide] = {}  # by replica index
        self.keeps: Callable[[Replica, Migrant, float], bool] | None = None
        """Called with every complete prefill; returns whether its KV is kept instead of sent."""

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
        """Begins the transfer of a sequence with a complete prefill.

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
        """Makes a replica continue a sequence with KV computed by another request. release: frees that KV.

        Called at the end of the copy, or if there is no copy. Raises RejectedError.
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
        """Starts the copy of num_tokens tokens of KV to a decode replica with slot and blocks for them.

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
        """Completes the transfer of a sequence whose KV was completely in the decode replica's cache."""
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
        """Handles a request lost in a crash; returns False if the caller must restart it.

        If its decode replica has crashed and its prefill replica has its KV, it is transferred to another
        decode replica. If the prefill replica has crashed, the decode replica aborts the request, which then
        restarts.
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
        """Chooses a decode replica for each waiting transfer after the fleet has changed."""
        held, self._held = self._held, {}
        for transfer in held.values():
            self._choose_target(transfer)

    def _emit(self, transfer: KvTransfer, now: float) -> None:
        """Emits the token of the prefill: the first token, or the next one of a resumed request."""
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


class KvCopy(NamedTuple):
    """The route of a copy, its bytes, and the bytes that the link could carry in the time of its messages."""

    route: Route
    num_bytes: float
    overhead_bytes: float


def kv_copy(
    interconnect: Interconnect, source: Replica, target: Replica, num_tokens: int, message_bytes: float
) -> KvCopy:
    """Returns the copy of num_tokens tokens of KV. message_bytes: see `KvTransferSettings`."""
    copies = resharding(source.pool.kv_layout, target.pool.kv_layout)
    num_senders = copies.num_equal_senders * source.pool.num_devices / source.pool.kv_layout.num_ranks
    num_blocks = target.core.block_pool.blocks_for(num_tokens)
    return KvCopy(
        interconnect.route(source.index, target.index, num_senders=num_senders),
        num_tokens * target.copies.links.bytes_per_token,
        message_bytes * copies.slices_per_block * num_blocks,
    )


class Resharding(NamedTuple):
    """The copies of one transfer."""

    num_senders: int
    """Source ranks that send."""
    num_copies: int
    """Pairs of a source rank and a target rank with a copy between them."""
    slices_per_block: int
    """Parts of a block's KV with adjacent bytes, over all copies: keys and values of each layer, if the heads
    of a block follow each other in memory (vLLM's HND layout)."""
    num_equal_senders: float
    """Ratio of all bytes to those of the source rank that sends most: num_senders if all send the same."""


@lru_cache(maxsize=256)
def resharding(source: KvLayout, target: KvLayout) -> Resharding:
    """Returns the copies from one layout of a model to another.

    8 KV heads and 32 layers from 2 ranks to 4: 4 copies from 2 senders, each of 32 x 2 slices. Raises
    ValueError for layouts of different models.
    """
    if source[:2] != target[:2]:
        raise ValueError(
            f"KV of {source.num_layers} layers with {source.num_kv_heads} KV heads: cannot be sent to a "
            f"replica with {target.num_layers} layers and {target.num_kv_heads} KV heads"
        )
    heads = _head_copies(source, target)
    layers = [
        (stage, len(shared))
        for stage in range(source.pipeline_parallel_size)
        for other in range(target.pipeline_parallel_size)
        if (shared := set(source.layers(stage)) & set(target.layers(other)))
    ]
    sent: Counter[tuple[int, int]] = Counter()  # heads x layers by source rank and stage
    for stage, num_layers in layers:
        for (sender, _), num_heads in heads.items():
            sent[sender, stage] += num_heads * num_layers
    return Resharding(
        num_senders=len(sent),
        num_copies=len(heads) * len(layers),
        slices_per_block=2 * len(heads) * sum(num_layers for _, num_layers in layers),
        num_equal_senders=sent.total() / max(sent.values()),
    )


def _head_copies(source: KvLayout, target: KvLayout) -> Counter[tuple[int, int]]:
    """Returns the heads of a layer that are copied, by (source rank, target rank)."""
    holders: dict[int, list[int]] = {}
    for rank in range(source.tensor_parallel_size):
        for head in source.heads(rank):
            holders.setdefault(head, []).append(rank)
    copies: Counter[tuple[int, int]] = Counter()
    num_readers: Counter[int] = Counter()  # number of target ranks that have read a head so far
    for rank in range(target.tensor_parallel_size):
        for head in target.heads(rank):
            ranks = holders[head]
            copies[ranks[num_readers[head] % len(ranks)], rank] += 1
            num_readers[head] += 1
    return copies


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
        """Completes the transfer of a sequence whose KV was completely in the decode replica's cache."""
        ...

    def begin(self, source: Replica, migrant: Migrant, prefill_s: float, now: float) -> None:
        """Begins the transfer of a sequence with a complete prefill.

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
        self._new: set[int] = set()  # those of them that entered after the latest plan
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
    """Accepts sequences whose prefill completed on another replica."""

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
        """Reports the transferred sequences that this plan runs because all their KV was cached here."""
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
        """Returns the candidates of the decode router for a request with a complete prefill."""
        ...

    def next_serving(self, replica: Replica) -> Replica | None:
        """Returns the next serving and reachable replica by index; None: there is no other."""
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
        """Returns how many times the router has chosen a replica for a request."""
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
        """Marks a request as back in its prefill replica, because no other replica has it."""
        ...

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """Notifies the router that a replica has freed the slot and blocks of a transferred request.

        num_sends: the number of sends when the KV transfer began.
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
