"""Disaggregated serving at the gateway: KV transfers, kept prefills, and encoders.

A later request of the same client continues with the KV of a kept prefill. This is the protocol of vLLM's
NixlConnector, in which a router in front of the engines chooses both replicas:

    request 1   prefill replica | prompt |-- KV is kept --------------------|
    client                               | answer: where the KV is
    request 2                              decode replica | queue | copy | last prompt token, decodes ...

The first request is complete after one token. Its KV keeps slot and blocks until it is copied, but is
released after a lease if no second request has arrived by then. The copy is an ordinary KV transfer. The
second request computes the last token of the prompt itself, and thereby its first output token.

Encoder replicas compute the embeddings of a prompt's images before its prefill. Encode, prefill, decode (EPD;
vLLM's disaggregated encoder, SGLang's --encoder-only): the vision encoder has its own GPUs, and the language
model gets embeddings instead of images.

    request   | wait for a free encoder | encode | send embeddings |---- replica: queue, prefill, decode ----
    images    k = round(image_share x prompt tokens / tokens_per_image); all may be encoded at the same time
    encode    flops_per_image / (peak x mfu) seconds, on the first free encoder, in the order of arrival send
    tokens_per_image x hidden size x bytes per element over the network, one image after the other

Image tokens are part of the prompt. An image is in the encoder cache with probability hit_share, and is then
only sent. The network between encoders and replicas is not shared with KV transfers, and encoders are not
stopped if their request is aborted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from heapq import heapify, heapreplace
from math import inf
from random import Random

from simpy.events import ProcessGenerator

from fieldlimits import Checked, NonNegativeInt, Positive, PositiveInt, PositiveShare, Share, check
from hwmodels.device import Device
from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import Migrant
from policies.core.request import Request
from policies.routing import Routing
from sim.cluster.autoscaler import PoolCounts
from sim.cluster.clients import FirstTokens
from sim.cluster.fleet import Fleet
from sim.cluster.gateway import Gateway, GatewayAttachment, LengthPredictions, RequestAttempt
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.records.requests import FINISHED, RequestLog
from sim.transfer.kv_transfers import KvTransfers
from sim.transfer.network import NetworkSettings


class TransferGateway:
    """Keeps track of the replica of each request during KV transfers."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        first_tokens: FirstTokens,
        length_predictions: LengthPredictions | None,
        requests: RequestLog,
    ) -> None:
        self.pool_counts: PoolCounts  # set by `GatewayAssembly.connect`
        self.restart = gateway.lost
        self.first_token = first_tokens.notify
        self._gateway = gateway
        self._length_predictions = length_predictions
        self._requests = requests

    @property
    def fleet(self) -> Fleet:
        """All replicas of the run."""
        return self._gateway.fleet

    def stop_after(self, request_id: int) -> StopAfter:
        """Returns the number of output tokens after which a request ends."""
        return self._gateway.attempts[request_id].stop_after

    def num_sends(self, request_id: int) -> int:
        """Returns how many times the router has chosen a replica for a request."""
        return self._requests.attempts[request_id]

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        assert self._length_predictions is not None
        self._length_predictions.predict_for(routing, request)

    def moved(self, request: Request, replica: Replica) -> None:
        """Marks a request as continued in another replica."""
        self._gateway.attempts[request.request_id].replica = replica
        self.pool_counts.sent(replica, request)

    def returned(self, request_id: int, replica: Replica) -> None:
        """Marks a request as back in its prefill replica, because no other replica has it."""
        self._gateway.attempts[request_id].replica = replica

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """Notifies the router that a replica has freed the slot and blocks of a transferred request.

        num_sends: the number of sends when the KV transfer began.
        """
        attempt = self._gateway.attempts.get(request.request_id)
        if attempt is not None and self.num_sends(request.request_id) == num_sends:
            self._gateway.notify_router(attempt)  # otherwise it was notified when that attempt ended
        self.pool_counts.released(replica)

    def refuse(self, request: Request, reason: str) -> None:
        """Fails an attempt that the decode replica can never continue."""
        attempt = self._gateway.attempts[request.request_id]
        self._gateway.release(attempt)
        self._gateway.fail(attempt, reason, inf)


class PrefillPools(GatewayAttachment):
    """Sends prompts to prefill pools, and also to mixed replicas once those pools have long queues."""

    def __init__(self, kv_transfers: KvTransfers, gateway: Gateway) -> None:
        self._kv_transfers = kv_transfers
        self._gateway = gateway

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica]:
        return self._gateway.fleet.for_prompt(self._kv_transfers.overflow_tokens)

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        self._kv_transfers.check(replica, request, request.prompt.num_tokens)
        return False

    def aborts(self, request_id: int) -> None:
        self._kv_transfers.withdraw(request_id)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        self._kv_transfers.ended(attempt.arrival.request, now)

    def fleet_changed(self) -> None:
        self._kv_transfers.ready()


GONE = "the KV of the prefill is not there any more; the prefill must be repeated"
NO_PREFILL = "no prefill replica takes requests"


@dataclass(slots=True, eq=False)
class KeptKv:
    """The KV of a complete prefill. num_cached_tokens: tokens of its prompt found in the cache."""

    replica: Replica
    num_tokens: int
    num_cached_tokens: int
    block_ids: list[int]
    is_claimed: bool = False
    """Whether the request that continues with it has arrived."""


class KeptPrefills(GatewayAttachment):
    """The kept KV of a run. lease_s: seconds for which it is kept without a second request.

    first_token: notifies the policies of the first token of a request.
    """

    def __init__(
        self,
        gateway: Gateway,
        kv_transfers: KvTransfers,
        *,
        requests: RequestLog,
        clock: Clock,
        first_token: Callable[[int], None],
    ) -> None:
        self.lease_s = 30.0
        self.on_gone: Callable[[int], None] | None = None
        """Called with the id of each request whose KV is no longer kept."""
        self.num_expired = 0
        """Number of times that KV was released because its lease had expired."""
        self._gateway = gateway
        self._kv_transfers = kv_transfers
        self._requests = requests
        self._clock = clock
        self._first_token = first_token
        self._keeping: set[int] = set()  # ids of the requests in progress whose KV will be kept
        self._kept: dict[int, KeptKv] = {}  # by the id of the request that computed it
        self._source_of: dict[int, int] = {}  # request in progress -> request whose KV it continues with
        kv_transfers.keeps = self._keeps
        gateway.attach(self)

    def keep(self, request_id: int) -> None:
        """Makes an arriving request end after its prefill, and keeps its KV."""
        self._keeping.add(request_id)

    def kept(self, request_id: int) -> KeptKv | None:
        """Returns the kept KV of a request; None: it was never kept, or is gone."""
        return self._kept.get(request_id)

    def claim(self, request_id: int, source_id: int) -> None:
        """Makes an arriving request continue with the kept KV of another request."""
        self._kept[source_id].is_claimed = True
        self._source_of[request_id] = source_id

    def lost(self, request_id: int) -> bool:
        """Drops kept KV that was lost in a crash; returns False for a request whose KV is not kept."""
        if self._kept.pop(request_id, None) is None:
            return False
        self._gone(request_id)
        for other, source_id in self._source_of.items():
            if source_id == request_id:
                self._kv_transfers.source_lost(other)
        return True

    # Events of the gateway.

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        request_id = attempt.arrival.request.request_id
        if request_id in self._source_of:
            return self._gateway.fleet.decoding_all
        if request_id not in self._keeping:
            return serving
        found = [replica for replica in serving if replica.pool.role == "prefill"]
        if not found:
            self._gateway.fail(attempt, NO_PREFILL)
            return None
        return found

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        request_id = request.request_id
        if request_id in self._keeping:
            replica.submit(request._replace(max_tokens=None), 2)  # it would free its KV with its last token
            return True
        source_id = self._source_of.get(request_id)
        if source_id is None:
            return False
        kept = self._kept.get(source_id)
        if kept is None:
            raise RejectedError(GONE)
        num_tokens = request.prompt.num_tokens
        migrant = Migrant(request, num_tokens, num_tokens - 1)
        self._kv_transfers.take_over(
            kept.replica, replica, migrant, attempt.stop_after, partial(self._release, source_id)
        )
        return True

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request_id = attempt.arrival.request.request_id
        self._keeping.discard(request_id)
        source_id = self._source_of.pop(request_id, None)
        if source_id is not None:
            self._release(source_id)  # if it was not copied

    # The kept KV.

    def _keeps(self, source: Replica, migrant: Migrant, now: float) -> bool:
        """Ends a request with a complete prefill; returns False if its KV is not to be kept."""
        request_id, requests = migrant.request.request_id, self._requests
        if request_id not in self._keeping:
            return False
        seq = source.core.find(request_id)
        assert seq is not None
        num_tokens = migrant.num_computed
        block_ids = list(source.core.block_ids(seq, num_tokens))
        self._kept[request_id] = KeptKv(source, num_tokens, requests.cached_tokens[request_id], block_ids)
        requests.first_token(request_id, now)
        self._first_token(request_id)
        requests.end(seq, FINISHED, now, now)
        requests.reason[request_id] = "length"
        self._clock.begin(self._expire(request_id, now + self.lease_s))
        self._gateway.end(seq)
        return True

    def _expire(self, request_id: int, ends_s: float) -> ProcessGenerator:
        """Releases kept KV at the end of its lease, unless it was claimed."""
        yield self._clock.at(ends_s, Phase.arrive)
        kept = self._kept.get(request_id)
        if kept is not None and not kept.is_claimed:
            self.num_expired += 1
            self._release(request_id)

    def _release(self, request_id: int) -> None:
        """Frees slot and blocks of kept KV, if it is still there."""
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            fleet, replica = self._gateway.fleet, kept.replica
            replica.release_migrated(request_id, lambda seq: fleet.leave_if_drained(replica, self._clock.now))
            self._gone(request_id)

    def _gone(self, request_id: int) -> None:
        if self.on_gone is not None:
            self.on_gone(request_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings(Checked):
    """Settings of the images in prompts, and of the replicas that encode them."""

    replicas: NonNegativeInt = 0
    """Encoder replicas, one GPU each; 0: prompts have no images."""
    image_share: Share = 0.5
    """Share of image tokens in a prompt."""
    tokens_per_image: PositiveInt = 576
    """Tokens of an image in the prompt; 576: LLaVA-1.5, 336 x 336 pixels in patches of 14 x 14."""
    flops_per_image: Positive = 0.38e12
    """FLOPs of the encoder for an image; CLIP ViT-L/14 at 336 pixels, 577 patches: 2 x 0.304e9 weights x 577
    = 0.35e12, and attention, 4 x 577^2 x 1,024 x 24 layers = 0.03e12."""
    mfu: PositiveShare = 0.4
    """Share of the peak FLOP/s reached by the encoder (not measured)."""
    hit_share: Share = 0.0
    """Probability that the embeddings of an image are in the encoder cache."""

    def __post_init__(self) -> None:
        check(self)
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not self.replicas and value != setting.default:
                raise ValueError(
                    f"{setting.name}={value:g}, replicas=0: without encoders prompts have no images; set "
                    f"replicas to their number, or {setting.name}={setting.default:g}"
                )

    def encode_s(self, device: Device) -> float:
        """Returns the seconds for an image on one encoder."""
        peak = device.peak_flops_per_s[device.compute_dtype("bf16")]
        return self.flops_per_image / (peak * self.mfu)

    def num_images(self, request: Request) -> int:
        """Returns the number of images in a prompt."""
        return round(self.image_share * request.prompt.num_tokens / self.tokens_per_image)


class Encoders(GatewayAttachment):
    """Delays requests until the embeddings of their images are in their replica.

    pool: the first pool, with the GPU of the encoders and the size of embeddings; network: the network
    between replicas.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        pool: ReplicaPool,
        network: NetworkSettings,
        clock: Clock,
        seed: int,
    ) -> None:
        assert pool.device is not None, "encoders need a device"
        self._settings = settings
        self._clock = clock
        self._seed = seed
        self._encode_s = settings.encode_s(pool.device)
        link = network.link_of(pool.device, is_same_node=False)
        num_bytes = settings.tokens_per_image * pool.embedding_bytes
        self._send_s = link.latency_s + num_bytes / (network.reached_share * link.bandwidth_bytes_per_s)
        self._free_s = [0.0] * settings.replicas  # a heap: times at which encoders are free
        heapify(self._free_s)

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        """Submits a request with images to its replica, together with the embeddings."""
        num_images = self._settings.num_images(request)
        if not num_images:
            return False
        ready_s = self._ready_s(request.request_id, num_images)
        replica.submit(
            request, attempt.stop_after, ready_s + replica.pool.idle_frontend_s(request.prompt.num_tokens)
        )
        return True

    def _ready_s(self, request_id: int, num_images: int) -> float:
        """Assigns the images of a request to encoders; returns the time at which the embeddings are sent."""
        now = ready_s = self._clock.now
        random = Random(f"{self._seed}/encoders/{request_id}")
        for _ in range(num_images):
            encoded_s = now
            if random.random() >= self._settings.hit_share:
                encoded_s = max(now, self._free_s[0]) + self._encode_s
                heapreplace(self._free_s, encoded_s)
            ready_s = max(ready_s, encoded_s) + self._send_s
        return ready_s
