"""Collectives among the devices of a replica: alpha-beta, by the algorithm that a library picks for the size.

NCCL does them all; p ranks, n bytes (each function says of what), time until every rank is done:

    t = start + sum over legs (steps hop) + min(2.3 n beta, rendezvous + n beta)    beta = max over legs (v/B)

A leg is a link with what a rank sends over it: one inside the node, and one more between nodes, where chunks
pass both in a pipeline. B is the bandwidth reached. Small messages carry a flag in every word: no rendezvous,
less of the bandwidth. A ring also copies a rank's own part, so v of a ring grows by 0.4 / p:

                    steps         v, share of n
    all_reduce      2 (p - 1)     2 (p - 1) / p    or 1 + 1/p where the switch adds up (`Link.multicast`)
    all_gather      p - 1         (p - 1) / p
    reduce_scatter  p - 1         (p - 1) / p
    all_to_all      1 + log2 p    (p - 1) / p      each rank to each, no ring
    send_recv       1             1

Engines all-reduce small tensors with kernels of their own that read the peers' memory, as far as these go:

    one-shot        start_d + (p - 1) n / B_d              every rank reads everything and adds it up
    two-shot        1.7 start_d + 2 (p - 1)/p n / B_d      reduce-scatter, then all-gather

Volumes: Thakur, Rabenseifner, Gropp, IJHPCA 2005; Patarasuk, Yuan, JPDC 2009. The constants of this module
belong to the libraries, not to a device: fitted once on five GPUs, one node each (NCCL 2.27 to 2.29, vLLM
0.14 and 0.24, TensorRT-LLM 1.0 and 1.3; NVIDIA aiconfigurator). Nothing measured between nodes went in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from hwmodels.checks import check_finite, check_whole
from hwmodels.devices.device import Device
from hwmodels.devices.interconnect import Link
from hwmodels.exact import Num

OWN_PART = 0.4
"""Copying a rank's own part takes 0.4 of the time of sending it."""
MULTICAST_BANDWIDTH = 0.7
"""Of what a ring reaches, where the switch adds up."""
MIN_MULTICAST_RANKS = 8
"""NCCL keeps to rings below: with 4 ranks 1 + 1/p saves too little."""
HOST_BRIDGE_BANDWIDTH = 0.55
"""Over PCIe three ranks and more share the bridges between its switches; two have a switch to themselves."""
COPY_BANDWIDTH_SHARE = 0.9
"""Of the memory bandwidth: copying a large tensor, read and write."""


class Protocol(NamedTuple):
    """How NCCL moves messages, small ones and large ones."""

    small_cost: float
    """Time of a byte in a small message over that in a large one."""
    rendezvous_s: float
    """Of large messages, over all steps."""
    bandwidth: float
    """Of what a ring reaches."""


RING = Protocol(small_cost=2.3, rendezvous_s=17e-6, bandwidth=1.0)
ALL_TO_ALL = Protocol(small_cost=10.0, rendezvous_s=5e-6, bandwidth=0.87)
"""A send and a receive with each rank: fewer channels a message than a ring has."""
SEND = ALL_TO_ALL._replace(bandwidth=1.0)
"""Between two ranks; checked against the profiles of Vidur (A100, H100)."""


class DirectKernels(NamedTuple):
    """An engine's own all-reduce over memory that the ranks map from each other."""

    start: float
    """Over the curve's direct_start_s."""
    two_shot: bool
    over_pcie: bool
    """Between two ranks; never more, and TensorRT-LLM never."""
    max_bytes: int
    max_bytes_multicast: int
    """With NVLink 4 and later: symmetric memory takes over from the older kernels."""


DIRECT_BANDWIDTH = 0.76
"""Of what a ring reaches."""
TWO_SHOT_START = 1.7
"""Over one-shot: two barriers."""
DIRECT_KERNELS = {
    "vllm": DirectKernels(1.0, True, True, 8 * 2**20 - 1, 64 * 2**20),
    "trtllm": DirectKernels(0.68, False, False, 2**20, 2**40),
}
"""By engine; others, and sizes beyond, use NCCL. NCCL is also used where it is faster."""
KERNELS = ("vllm", "trtllm", "nccl")


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCurve:
    """What collectives reach on one device and its links. Defaults: medians over A100 to RTX PRO 6000."""

    start_s: float = 5.1e-6
    """NCCL: launch, and waiting for the peers. 3.4 us (RTX PRO 6000) to 9.5 us (A100)."""
    hop_s: float = 0.95e-6
    """NCCL, inside a node: one step of a small message. 0.8 us (H100) to 1.6 us (PCIe)."""
    bandwidth_share: float = 0.72
    """Of the link's data sheet, by a ring with large messages: 0.69 (B200) to 0.82 (H200)."""
    direct_start_s: float = 4.5e-6
    """One-shot kernel of vLLM: launch and one barrier. 4.1 us to 7.1 us (B200)."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_finite(entry.name, getattr(self, entry.name))
        if self.bandwidth_share > 1:
            raise ValueError(f"bandwidth_share={self.bandwidth_share}: must be a share, > 0 and <= 1")


def all_reduce_seconds(
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
    eager: bool = False,
) -> Num:
    """Every rank has n = num_bytes and ends with the sum of all, in place. num_ranks are spread over nodes.

    kernels: "vllm", "trtllm" (their own kernels where these apply) or "nccl". eager: outside a CUDA graph
    vLLM first copies the tensor to where its peers can read it; launches by the host are not counted.
    H100 (450e9 bytes/s, multicast), 8 ranks, 256 KiB, default curve, "vllm", two-shot:
    1.7 x 4.5 us + 1.75 x 262,144 / (450e9 x 0.72 x 0.76) = 7.65 us + 1.86 us = 9.51 us. Measured: 10.8 us.
    Raises ValueError: ranks that the nodes do not hold, more nodes than one without a link between them.
    """
    check_kernels(kernels)
    per_node = ranks_per_node(num_ranks, device, nodes)
    seconds = ring_seconds(num_bytes, per_node, device, curve, passes=2, nodes=nodes)
    if kernels in DIRECT_KERNELS and nodes == 1 and per_node > 1:
        own = DIRECT_KERNELS[kernels]
        if device.scale_up is not None or (own.over_pcie and per_node == 2):
            limit = own.max_bytes_multicast if device.link.multicast else own.max_bytes
            direct_s = direct_all_reduce_seconds(num_bytes, per_node, device, curve, own)
            seconds = np.where(np.asarray(num_bytes) <= limit, np.minimum(seconds, direct_s), seconds)[()]
    if eager and kernels == "vllm" and num_ranks > 1:
        seconds = seconds + 2 * num_bytes / (device.memory_bandwidth_bytes_per_s * COPY_BANDWIDTH_SHARE)
    return seconds * np.minimum(num_bytes, 1)


def all_gather_seconds(
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
) -> Num:
    """Every rank has num_bytes / num_ranks and ends with all num_bytes: the gathered size.

    Engines leave it, and those below, to NCCL: `kernels` is only checked.
    """
    check_kernels(kernels)
    per_node = ranks_per_node(num_ranks, device, nodes)
    seconds = ring_seconds(num_bytes, per_node, device, curve, passes=1, nodes=nodes)
    return seconds * np.minimum(num_bytes, 1)


def reduce_scatter_seconds(
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
) -> Num:
    """Every rank has num_bytes, the size before scattering, and ends with its num_bytes / num_ranks summed.

    An all-gather backwards, at the same price.
    """
    return all_gather_seconds(num_bytes, num_ranks, device, curve, kernels=kernels, nodes=nodes)


def all_to_all_seconds(
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
) -> Num:
    """Every rank has num_bytes and sends an equal part to each, itself included."""
    check_kernels(kernels)
    per_node = ranks_per_node(num_ranks, device, nodes)
    inside = (per_node - 1 + OWN_PART) / num_ranks
    legs = [inside_leg(per_node, 1 + math.log2(per_node), inside, device, curve)] if per_node > 1 else []
    if nodes > 1:
        legs.append(between_leg(1 + math.log2(nodes), (nodes - 1) / nodes, device, curve))
    return leg_seconds(num_bytes, legs, curve, ALL_TO_ALL) * np.minimum(num_bytes, 1)


def send_recv_seconds(
    num_bytes: Num,
    num_ranks: int,
    device: Device,
    curve: CollectiveCurve,
    *,
    kernels: str = "vllm",
    nodes: int = 1,
) -> Num:
    """Every rank sends num_bytes to its neighbour: stages of a pipeline, or ranks in a ring.

    With more nodes than one the slowest neighbours count: those of two nodes.
    """
    check_kernels(kernels)
    check_whole("num_ranks", num_ranks)
    check_whole("nodes", nodes)
    if num_ranks == 1:
        return 0.0 * num_bytes
    leg = between_leg(1, 1.0, device, curve) if nodes > 1 else inside_leg(num_ranks, 1, 1.0, device, curve)
    return leg_seconds(num_bytes, [leg], curve, SEND) * np.minimum(num_bytes, 1)


class Leg(NamedTuple):
    """One link on the way."""

    latency_s: float
    s_per_byte: float
    """A byte of the message, with the volume and the bandwidth of a ring."""
    large_s_per_byte: float
    """The same for large messages, where the switch may help."""


def check_kernels(kernels: str) -> None:
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels}: must be one of {', '.join(KERNELS)}")


def ranks_per_node(num_ranks: int, device: Device, nodes: int) -> int:
    """num_ranks / nodes. Raises ValueError where that is not whole, or more than a node holds."""
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


def ring_seconds(
    num_bytes: Num, per_node: int, device: Device, curve: CollectiveCurve, *, passes: int, nodes: int
) -> Num:
    """passes (1: gather or scatter, 2: both) around the rings of each node, and around the nodes.

    A rank's ring between nodes carries its share of what its node has.
    """
    legs = []
    if per_node > 1:
        volume = (passes * (per_node - 1) + OWN_PART) / per_node
        legs.append(inside_leg(per_node, passes * (per_node - 1), volume, device, curve))
        if passes == 2 and device.link.multicast and per_node >= MIN_MULTICAST_RANKS:
            leg = legs[0]
            multicast = (1 + 1 / per_node) / volume / MULTICAST_BANDWIDTH
            legs = [leg._replace(large_s_per_byte=leg.s_per_byte * min(1.0, multicast))]
    if nodes > 1:
        volume = passes * (nodes - 1) / nodes / per_node
        legs.append(between_leg(passes * (nodes - 1), volume, device, curve))
    return leg_seconds(num_bytes, legs, curve, RING)


def direct_all_reduce_seconds(
    num_bytes: Num, num_ranks: int, device: Device, curve: CollectiveCurve, own: DirectKernels
) -> Num:
    """One-shot, or two-shot where the engine has it and it is faster."""
    start_s = own.start * curve.direct_start_s
    byte_s = 1 / (inside_bytes_per_s(num_ranks, device, curve) * DIRECT_BANDWIDTH)
    one_shot_s = start_s + (num_ranks - 1) * byte_s * num_bytes
    if not own.two_shot:
        return one_shot_s
    return np.minimum(
        one_shot_s, TWO_SHOT_START * start_s + 2 * (num_ranks - 1) / num_ranks * byte_s * num_bytes
    )


def inside_bytes_per_s(num_ranks: int, device: Device, curve: CollectiveCurve) -> float:
    shares_bridges = device.scale_up is None and num_ranks > 2
    reached = device.link.bandwidth_bytes_per_s * curve.bandwidth_share
    return reached * HOST_BRIDGE_BANDWIDTH if shares_bridges else reached


def inside_leg(num_ranks: int, steps: float, volume: float, device: Device, curve: CollectiveCurve) -> Leg:
    byte_s = volume / inside_bytes_per_s(num_ranks, device, curve)
    return Leg(steps * curve.hop_s, byte_s, byte_s)


def between_leg(steps: float, volume: float, device: Device, curve: CollectiveCurve) -> Leg:
    link = inter_node_link(device)
    byte_s = volume / (link.bandwidth_bytes_per_s * curve.bandwidth_share)
    return Leg(steps * link.latency_s, byte_s, byte_s)


def inter_node_link(device: Device) -> Link:
    if device.inter_node is None:
        raise ValueError(
            f"inter_node=None: {device.name} has no link between nodes; give one, or use one node"
        )
    return device.inter_node


def leg_seconds(num_bytes: Num, legs: list[Leg], curve: CollectiveCurve, protocol: Protocol) -> Num:
    """One call over these legs; none: nothing to send, 0 s."""
    if not legs:
        return 0.0 * num_bytes
    latency_s = curve.start_s + sum(leg.latency_s for leg in legs)
    small_s = protocol.small_cost / protocol.bandwidth * max(leg.s_per_byte for leg in legs)
    large_s = max(leg.large_s_per_byte for leg in legs) / protocol.bandwidth
    return latency_s + np.minimum(small_s * num_bytes, protocol.rendezvous_s + large_s * num_bytes)
