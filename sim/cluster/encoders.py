"""Encoder replicas for images: they compute the embeddings of a prompt's images before its prefill (EPD).

Encode, prefill, decode (EPD; vLLM's disaggregated encoder, SGLang's --encoder-only): the vision encoder has
GPUs of its own, and the language model gets embeddings in place of images.

    request   | wait for a free encoder | encode | send embeddings |---- replica: queue, prefill, decode ----
    images    k = round(image_share x prompt tokens / tokens_per_image); all may be encoded at the same time

    encode    flops_per_image / (peak x mfu) seconds, on the first free encoder, in the order of arrival
    send      tokens_per_image x hidden size x bytes per element over the network, one image after the other

Image tokens are part of the prompt. An image is in the encoder cache with probability hit_share, and then is
only sent. The network between encoders and replicas is not shared with KV transfers, and encoders of a
request that is aborted meanwhile are not stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from heapq import heapify, heapreplace
from random import Random

from fieldlimits import Checked, NonNegativeInt, Positive, PositiveInt, PositiveShare, Share, check
from hwmodels.devices.device import Device
from policies.core.request import Request
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.transfer.network import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings(Checked):
    """Settings of the images in prompts, and of the replicas that encode them."""

    replicas: NonNegativeInt = 0
    """Encoder replicas, one GPU each; 0: prompts have no images."""
    image_share: Share = 0.5
    """Share of the tokens of a prompt that are of images."""
    tokens_per_image: PositiveInt = 576
    """Tokens of an image in the prompt; 576: LLaVA-1.5, 336 x 336 pixels in patches of 14 x 14."""
    flops_per_image: Positive = 0.38e12
    """FLOPs of the encoder for an image; CLIP ViT-L/14 at 336 pixels, 577 patches: 2 x 0.304e9 weights x 577
    = 0.35e12, and attention, 4 x 577^2 x 1,024 x 24 layers = 0.03e12."""
    mfu: PositiveShare = 0.4
    """Share of the peak FLOP/s that the encoder reaches (not measured)."""
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

    pool: the first pool, with the GPU of the encoders and the size of embeddings; network: that between
    replicas.
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
        """Submits a request with images to its replica, which gets it with the embeddings."""
        num_images = self._settings.num_images(request)
        if not num_images:
            return False
        ready_s = self._ready_s(request.request_id, num_images)
        replica.submit(
            request, attempt.stop_after, ready_s + replica.pool.idle_frontend_s(request.prompt.num_tokens)
        )
        return True

    def _ready_s(self, request_id: int, num_images: int) -> float:
        """Gives the images of a request to encoders; returns the time at which the embeddings are sent."""
        now = ready_s = self._clock.now
        random = Random(f"{self._seed}/encoders/{request_id}")
        for _ in range(num_images):
            encoded_s = now
            if random.random() >= self._settings.hit_share:
                encoded_s = max(now, self._free_s[0]) + self._encode_s
                heapreplace(self._free_s, encoded_s)
            ready_s = max(ready_s, encoded_s) + self._send_s
        return ready_s
