"""Collectives among the devices of a replica: an alpha-beta model of the algorithms of libraries.

NCCL has all of them; p ranks, n bytes (each function defines them), time until every rank is done:

    t = start + sum over legs (steps hop) + min(2.3 n beta, rendezvous + n beta)    beta = max over legs (v/B)

A leg is a link with a rank's volume on it: one leg inside the node, and another one between nodes; chunks
pass both in a pipeline. B is the bandwidth reached. Between nodes an all-reduce goes up and down binary trees
(2 log2 nodes steps), and each rank carries its share of its node's sum. Small messages carry a flag in every
word: no rendezvous, but a lower bandwidth. A ring also copies a rank's own part, so v of a ring grows by 0.4
/ p:

                    steps         v, share of n
    all_reduce      2 (p - 1)     2 (p - 1) / p    or 1 + 1/p if the switch reduces (`Link.multicast`)
    all_gather      p - 1         (p - 1) / p
    reduce_scatter  p - 1         (p - 1) / p
    all_to_all      1 + log2 p    (p - 1) / p every rank to every rank, no ring
    send_recv       1             1

Engines all-reduce small tensors with their own kernels, which read the peers' memory, up to a size limit:

    one-shot        start_d + (p - 1) n / B_d              every rank reads and sums everything
    two-shot        1.7 start_d + 2 (p - 1)/p n / B_d      reduce-scatter, then all-gather

Without peer access (`Link.peer_to_peer`) only NCCL's rings remain. A sender writes into host memory, from
which the receiver reads: every hop crosses the link twice, at a lower bandwidth.

Volumes: Thakur, Rabenseifner, Gropp, IJHPCA 2005; Patarasuk, Yuan, JPDC 2009. The constants of this module
belong to the libraries, not to a device. They were fitted once on five GPUs, one node each (NCCL 2.27 to
2.29, vLLM 0.14 and 0.24, TensorRT-LLM 1.0 and 1.3; NVIDIA aiconfigurator). No measurements between nodes were
used. On a torus (TPU's ICI), rings and lines over all axes work at the same time: p ranks form a block of d1
x d2 (x d3), as cubic as p allows. A message of n bytes is cut into one part per axis; each part is reduced
along its own axis first, then along the next ones, so that all links are busy. W is a device's send bandwidth
on the links of one axis: on a ring both links, w each; on a line the link at the end is the limit, so W = w.
With B as the bandwidth of a device over all links, w = B share / (2 axes):

    all_gather, reduce_scatter   n (p - 1) / p / (sum of W over the axes of the block)
    all_reduce                   twice that
    all_to_all                   n max over axes of d / (8 w) on a ring, d / (4 w) on a line
    send_recv                    n / w

The number of hops is that of the longest path: floor(d / 2) on a ring and d - 1 on a line, summed over the
axes. If axes differ in length or kind, the sum of W is an upper bound that good schedules approach.

Austin et al., "How to Scale Your Model" (2025), section on TPUs; Chan, Heimlich, Purkayastha, van de Geijn,
"Collective communication: theory, practice, and experience" (2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hwmodels.checks import check_curve, check_whole
from hwmodels.device import Device, Link, Torus
from hwmodels.exact import Num

OWN_PART = 0.4
"""Ratio of the time to copy a rank's own part to the time to send it."""
MULTICAST_BANDWIDTH = 0.7
"""Share of a ring's bandwidth reached if the switch reduces."""
MIN_MULTICAST_RANKS = 8
"""Minimum number of ranks for which NCCL uses the switch: with 4 ranks 1 + 1/p saves too little."""
HOST_BRIDGE_BANDWIDTH = 0.55
"""Share of the PCIe bandwidth reached with three or more ranks, which share bridges; two ranks share one
switch.
"""
HOST_STAGED_BANDWIDTH = 0.73
"""Share of a link's bandwidth reached with messages staged in host memory, for any number of ranks.

Two devices on PCIe 4.0 x16 copy 22e9 bytes/s each way through the host (NVIDIA/nccl issue 814, RTX 4090),
all-reduces reach 16e9 of this.
"""
HOST_STAGED_HOP = 1.65
"""Ratio of the time of a hop through host memory to a hop to a peer.

An all-reduce of 8 bytes among 8 RTX 4090 takes 42 us (NVIDIA/nccl issue 1530): 14 hops of 2.6 us after the
start, where hops to peers over PCIe take 1.6 us (RTX PRO 6000).
"""
COPY_BANDWIDTH_SHARE = 0.9
"""Share of the memory bandwidth reached when copying a large tensor, read and write."""


class Protocol(NamedTuple):
    """Costs of NCCL's protocols for small and large messages."""

    small_cost: float
    """Ratio of the time per byte of small to large messages."""
    rendezvous_s: float
    """Extra time of large messages, over all steps."""
    bandwidth: float
    """Share of a ring's bandwidth reached."""


RING = Protocol(small_cost=2.3, rendezvous_s=17e-6, bandwidth=1.0)
ALL_TO_ALL = Protocol(small_cost=10.0, rendezvous_s=5e-6, bandwidth=0.87)
"""A send and a receive with each rank: fewer channels per message than in a ring."""
SEND = ALL_TO_ALL._replace(bandwidth=1.0)
"""A send between two ranks; checked against the profiles of Vidur (A100, H100)."""


class DirectKernels(NamedTuple):
    """Kernels of an engine's own all-reduce, over memory that the ranks map from each other."""

    start: float
    """Factor on the curve's direct_start_s."""
    two_shot: bool
    over_pcie: bool
    """Over PCIe with peer access, used only between two ranks; TensorRT-LLM never uses it."""
    max_bytes: int
    max_bytes_multicast: int
    """Size limit with NVLink 4 and later: symmetric memory replaces the older kernels."""


DIRECT_BANDWIDTH = 0.76
"""Share of a ring's bandwidth reached."""
TWO_SHOT_START = 1.7
"""Ratio of the starts of two-shot and one-shot: two barriers."""
DIRECT_KERNELS = {
    "vllm": DirectKernels(1.0, True, True, 8 * 2**20 - 1, 64 * 2**20),
    "trtllm": DirectKernels(0.68, False, False, 2**20, 2**40),
}
"""Kernels by engine. NCCL serves other engines and larger sizes, and is also used if it is faster."""
KERNELS = ("vllm", "trtllm", "nccl")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCurve:
    """Performance of collectives on one device and its links; defaults: medians, A100 to RTX PRO 6000."""

    start_s: float = 5.1e-6
    """Start of NCCL: launch and wait for the peers. 3.4 us (RTX PRO 6000) to 9.5 us (A100)."""
    hop_s: float = 0.95e-6
    """One step of a small message of NCCL inside a node. 0.8 us (H100) to 1.6 us (PCIe)."""
    bandwidth_share: float = 0.72
    """Share of the link's data-sheet bandwidth reached by a ring with large messages: 0.69 (B200) to 0.82
    (H200).
    """
    direct_start_s: float = 4.5e-6
    """Start of vLLM's one-shot kernel: launch and one barrier. 4.1 us to 7.1 us (B200)."""

    def __post_init__(self) -> None:
        check_curve(self)


def collective_seconds(
    collective: str,
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
    eager: bool = False,
) -> Num:
    """Returns seconds of a collective of n = num_bytes among num_ranks ranks on these nodes.

        all_reduce       every rank has n and gets the sum of all, in place
        all_gather       every rank has n / num_ranks and gets all n
        reduce_scatter   every rank has n and gets n / num_ranks, summed: an all-gather backwards
        all_to_all       every rank sends an equal part of its n to each rank
        send_recv        every rank sends n to the neighbour, in a pipeline or a ring; with several nodes the
        slowest neighbours count, which are in different nodes

    kernels: "vllm", "trtllm" (their own all-reduce if it applies) or "nccl", which engines use for all
    others. eager: outside a CUDA graph, where vLLM first copies the tensor of an all-reduce to memory that
    its peers can read; host launches are not counted.
    H100 (450e9 bytes/s, multicast), all_reduce, 8 ranks, 256 KiB, default curve, "vllm", two-shot:
    1.7 x 4.5 us + 1.75 x 262,144 / (450e9 x 0.72 x 0.76) = 7.65 us + 1.86 us = 9.51 us. Measured: 10.8 us.
    Raises ValueError if the ranks do not fit the nodes, or if several nodes have no link between them.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"collective={collective}: must be one of {', '.join(COLLECTIVES)}")
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels}: must be one of {', '.join(KERNELS)}")
    legs, protocol = COLLECTIVES[collective](num_ranks, device, curve, nodes)
    seconds = leg_seconds(num_bytes, legs, curve, protocol)
    if collective == "all_reduce" and num_ranks > 1:
        if kernels in DIRECT_KERNELS and nodes == 1:
            own = DIRECT_KERNELS[kernels]
            if device.link.peer_to_peer and (
                device.scale_up is not None or (own.over_pcie and num_ranks == 2)
            ):
                limit = own.max_bytes_multicast if device.link.multicast else own.max_bytes
                direct_s = direct_all_reduce_seconds(num_bytes, num_ranks, device, curve, own)
                seconds = np.where(np.asarray(num_bytes) <= limit, np.minimum(seconds, direct_s), seconds)[()]
        if eager and kernels == "vllm":
            seconds = seconds + 2 * num_bytes / (device.memory_bandwidth_bytes_per_s * COPY_BANDWIDTH_SHARE)
    return seconds * np.minimum(num_bytes, 1)


class Leg(NamedTuple):
    """One link on the path of a message."""

    latency_s: float
    s_per_byte: float
    """Seconds per byte of the message, with the volume and the bandwidth of a ring."""
    large_s_per_byte: float
    """Seconds per byte of large messages, which may use the switch."""


def ranks_per_node(num_ranks: int, device: Device, nodes: int) -> int:
    """Returns num_ranks / nodes. Raises ValueError if it is not whole, or more than a node holds."""
    check_whole("num_ranks", num_ranks)
    check_whole("nodes", nodes)
    if num_ranks % nodes:
        raise ValueError(f"nodes={nodes}: must divide num_ranks={num_ranks}")
    if num_ranks // nodes > device.gpus_per_node:
        needed = -(-num_ranks // device.gpus_per_node)
        raise ValueError(
            f"nodes={nodes}: {num_ranks} ranks need {needed} nodes of {device.gpus_per_node} devices "
            f"({device.name}: gpus_per_node)"
        )
    return num_ranks // nodes


Route = tuple[list[Leg], Protocol]
"""The legs of a message (none for one rank), and the library's protocol for it."""


def ring_route(passes: int, num_ranks: int, device: Device, curve: CollectiveCurve, nodes: int) -> Route:
    """Returns the route of passes around the rings of each node, and around the nodes or over trees.

    passes: 1 for a gather or a scatter, 2 for both.

    Between nodes a rank sends its share of its node's data.
    """
    per_node, legs = ranks_per_node(num_ranks, device, nodes), []
    if per_node > 1:
        volume = (passes * (per_node - 1) + OWN_PART) / per_node
        legs.append(inside_leg(per_node, passes * (per_node - 1), volume, device, curve))
        if passes == 2 and device.link.multicast and per_node >= MIN_MULTICAST_RANKS:
            leg = legs[0]
            multicast = (1 + 1 / per_node) / volume / MULTICAST_BANDWIDTH
            legs = [leg._replace(large_s_per_byte=leg.s_per_byte * min(1.0, multicast))]
    if nodes > 1:
        volume = passes * (nodes - 1) / nodes / per_node
        steps = 2 * math.ceil(math.log2(nodes)) if passes == 2 else nodes - 1
        legs.append(between_leg(steps, volume, device, curve))
    return legs, RING


def all_to_all_route(num_ranks: int, device: Device, curve: CollectiveCurve, nodes: int) -> Route:
    """Returns the route of the messages from every rank to every other."""
    per_node = ranks_per_node(num_ranks, device, nodes)
    inside = (per_node - 1 + OWN_PART) / num_ranks
    legs = [inside_leg(per_node, 1 + math.log2(per_node), inside, device, curve)] if per_node > 1 else []
    if nodes > 1:
        legs.append(between_leg(1 + math.log2(nodes), (nodes - 1) / nodes, device, curve))
    return legs, ALL_TO_ALL


def send_route(num_ranks: int, device: Device, curve: CollectiveCurve, nodes: int) -> Route:
    """Returns the route of a message to the neighbour."""
    check_whole("num_ranks", num_ranks)
    check_whole("nodes", nodes)
    if num_ranks == 1:
        return [], SEND
    leg = between_leg(1, 1.0, device, curve) if nodes > 1 else inside_leg(num_ranks, 1, 1.0, device, curve)
    return [leg], SEND


COLLECTIVES: dict[str, Callable[[int, Device, CollectiveCurve, int], Route]] = {
    "all_reduce": partial(ring_route, 2),
    "all_gather": partial(ring_route, 1),
    "reduce_scatter": partial(ring_route, 1),
    "all_to_all": all_to_all_route,
    "send_recv": send_route,
}
"""The route of each collective, as a function of the number of ranks, device, curve and number of nodes."""


def direct_all_reduce_seconds(
    num_bytes: Num, num_ranks: int, device: Device, curve: CollectiveCurve, own: DirectKernels
) -> Num:
    """Returns seconds of the one-shot kernel, or of two-shot if the engine has it and it is faster."""
    start_s = own.start * curve.direct_start_s
    byte_s = 1 / (inside_bytes_per_s(num_ranks, device, curve) * DIRECT_BANDWIDTH)
    one_shot_s = start_s + (num_ranks - 1) * byte_s * num_bytes
    if not own.two_shot:
        return one_shot_s
    return np.minimum(
        one_shot_s, TWO_SHOT_START * start_s + 2 * (num_ranks - 1) / num_ranks * byte_s * num_bytes
    )


def inside_bytes_per_s(num_ranks: int, device: Device, curve: CollectiveCurve) -> float:
    """Returns the bytes per second that each rank reaches inside a node.

    PCIe bridges are shared, and messages without peer access go through host memory.
    """
    reached = device.link.bandwidth_bytes_per_s * curve.bandwidth_share
    if device.scale_up is None and num_ranks > 2:
        reached *= HOST_BRIDGE_BANDWIDTH
    return reached if device.link.peer_to_peer else reached * HOST_STAGED_BANDWIDTH


def inside_leg(num_ranks: int, steps: float, volume: float, device: Device, curve: CollectiveCurve) -> Leg:
    """Returns the part of a collective inside a node: `steps` hops, `volume` bytes per rank."""
    byte_s = volume / inside_bytes_per_s(num_ranks, device, curve)
    hop_s = curve.hop_s * (1.0 if device.link.peer_to_peer else HOST_STAGED_HOP)
    return Leg(steps * hop_s, byte_s, byte_s)


def between_leg(steps: float, volume: float, device: Device, curve: CollectiveCurve) -> Leg:
    """Returns the part of a collective between nodes: `steps` hops, `volume` bytes per rank."""
    link = inter_node_link(device)
    byte_s = volume / (link.bandwidth_bytes_per_s * curve.bandwidth_share)
    return Leg(steps * link.latency_s, byte_s, byte_s)


def inter_node_link(device: Device) -> Link:
    """Returns the link between nodes; raises ValueError if the device has none."""
    if device.inter_node is None:
        raise ValueError(
            f"inter_node=None: {device.name} has no link between nodes; give one, or use one node"
        )
    return device.inter_node


def leg_seconds(num_bytes: Num, legs: list[Leg], curve: CollectiveCurve, protocol: Protocol) -> Num:
    """Returns seconds of one call over these legs; 0 s without legs."""
    if not legs:
        return 0.0 * num_bytes
    latency_s = curve.start_s + sum(leg.latency_s for leg in legs)
    small_s = protocol.small_cost / protocol.bandwidth * max(leg.s_per_byte for leg in legs)
    large_s = max(leg.large_s_per_byte for leg in legs) / protocol.bandwidth
    return latency_s + np.minimum(small_s * num_bytes, protocol.rendezvous_s + large_s * num_bytes)


class Axis(NamedTuple):
    """One axis of the block of ranks."""

    size: int
    is_ring: bool

    @property
    def hops(self) -> int:
        """Hops between the two ranks that are farthest apart."""
        return self.size // 2 if self.is_ring else self.size - 1

    @property
    def links(self) -> int:
        """Links that carry a rank's messages along the axis."""
        return 2 if self.is_ring else 1


def block_of(num_ranks: int, torus: Torus) -> tuple[Axis, ...]:
    """Returns the axes of the most cubic block of num_ranks devices, longest last, without axes of 1.

    8 ranks on two axes: 2 x 4; on three: 2 x 2 x 2. 16 on two axes: 4 x 4. 6 on two: 2 x 3.
    """
    check_whole("num_ranks", num_ranks)
    sizes = min(_factors(num_ranks, torus.axes), key=lambda sizes: (sum(sizes), sizes))
    return tuple(Axis(size, size >= torus.wraps_from and size > 2) for size in sorted(sizes) if size > 1)


def _factors(number: int, count: int) -> list[tuple[int, ...]]:
    """Returns all ways to write the number as a product of `count` factors."""
    if count == 1:
        return [(number,)]
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in _factors(number // d, count - 1)]


def torus_seconds(
    collective: str, num_bytes: Num, num_ranks: int, device: Device, curve: CollectiveCurve
) -> Num:
    """Returns seconds of a collective, with names and sizes as in `hwmodels.operators.collectives`.

    The device's link must be a torus. TPU v5e (200e9 bytes/s over 4 links, 2 axes), 8 chips (2 x 4, lines),
    1 MB, share 1: an all-gather takes 7/8 MB / (2 x 50e9 bytes/s) = 8.75 us and 1 + 3 hops.
    """
    link = device.link
    assert link.torus is not None
    axes = block_of(num_ranks, link.torus)
    if not axes:
        return 0.0 * num_bytes
    link_s = 2 * link.torus.axes / (link.bandwidth_bytes_per_s * curve.bandwidth_share)
    passes = 2 if collective == "all_reduce" else 1
    if collective == "send_recv":
        hops, byte_s = 1, link_s
    elif collective == "all_to_all":
        hops = sum(axis.hops for axis in axes)
        byte_s = max(axis.size / (8 if axis.is_ring else 4) for axis in axes) * link_s
    else:
        ranks = prod(axis.size for axis in axes)
        hops = passes * sum(axis.hops for axis in axes)
        byte_s = passes * (ranks - 1) / ranks * link_s / sum(axis.links for axis in axes)
    seconds: Any = curve.start_s + hops * link.latency_s + byte_s * num_bytes
    some: Num = seconds * np.minimum(num_bytes, 1)
    return some
