"""Collectives on a torus: rings and lines over each axis at the same time (TPU's ICI).

p ranks form a block of d1 x d2 (x d3), as cubic as p allows. A message of n bytes is cut into one part per
axis; each part is reduced along its own axis first, then along the next ones, so that all links are busy. W
is what a device can send on the links of one axis: both of them on a ring, w each; on a line the link at its
end is the limit, so W = w. With B the bandwidth of a device over all links, w = B share / (2 axes):

    all_gather, reduce_scatter   n (p - 1) / p / (sum of W over the axes of the block)
    all_reduce                   twice that
    all_to_all                   n max over axes of d / (8 w) on a ring, d / (4 w) on a line
    send_recv                    n / w

The hops are those of the longest path, floor(d / 2) on a ring and d - 1 on a line, summed over the axes. If
axes differ in length or kind, the sum of W is an upper bound, which good schedules approach.

Austin et al., "How to Scale Your Model" (2025), section on TPUs; Chan, Heimlich, Purkayastha, van de Geijn,
"Collective communication: theory, practice, and experience" (2007).
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from hwmodels.checks import check_whole
from hwmodels.devices.device import Device
from hwmodels.devices.interconnect import Torus
from hwmodels.exact import Num
from hwmodels.operators.collectives import CollectiveCurve


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
        """Links that carry what a rank sends along the axis."""
        return 2 if self.is_ring else 1


def block_of(num_ranks: int, torus: Torus) -> tuple[Axis, ...]:
    """Returns the axes of the most cubic block of num_ranks devices, the longest last; axes of 1 left out.

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
    """Returns seconds of a collective, named and counted as in `hwmodels.operators.collectives`.

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
