"""Links between devices, and what collectives cost on them (alpha-beta model).

alpha: seconds until the first byte arrives; beta: seconds a byte; n bytes take alpha + n beta.
An all-reduce takes the faster of ring and tree for its message: `pricing.PricedOperator`.
Ring and tree: Thakur, Rabenseifner, Gropp, IJHPCA 2005; the double binary tree: Sanders, Speck, Traff, 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hwmodels.checks import check_finite
from hwmodels.iteration import Num


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects a device to others: of its node, or of other nodes."""

    name: str
    """As printed: NVLink 4, PCIe 5.0 x16."""
    bandwidth_bytes_per_s: float
    """Per device and direction, data sheet."""
    latency_s: float
    """alpha: from one device's memory to its neighbour's, without the launch of the kernel."""
    multicast: bool = False
    """The switch adds up and copies messages itself (NVLink SHARP: switches of NVLink 4 and later)."""

    def __post_init__(self) -> None:
        check_finite("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, unit="bytes/s")
        check_finite("latency_s", self.latency_s, unit="s", zero_allowed=True)


class Transfer(NamedTuple):
    """Cost of a communication pattern as a line over the message size: fixed_s + s_per_byte * bytes."""

    fixed_s: float
    s_per_byte: float

    def seconds(self, num_bytes: Num) -> Num:
        return self.fixed_s + self.s_per_byte * num_bytes


def ring_all_reduce(link: Link, num_ranks: int, bandwidth_share: float = 1.0) -> Transfer:
    """Reduce-scatter, then all-gather, around a ring: bandwidth-optimal, latency grows with p.

    t = 2 (p - 1) alpha + 2 (p - 1)/p n / (B e)     p ranks, n bytes a rank, B bytes/s, e share of B reached
    NVLink 4 (450e9 bytes/s, alpha 0.8 us), p = 8, n = 64 MiB, e = 0.7: 11.2 us + 372.8 us = 384.0 us.
    """
    p = num_ranks
    return Transfer(
        2 * (p - 1) * link.latency_s, 2 * (p - 1) / p / (link.bandwidth_bytes_per_s * bandwidth_share)
    )


def tree_all_reduce(link: Link, num_ranks: int, bandwidth_share: float = 1.0) -> Transfer:
    """Up and down a double binary tree: latency grows with log2 p, every byte travels twice.

    t = 2 ceil(log2 p) alpha + 2 n / (B e)
    NVLink 4, p = 8, n = 8 KiB, e = 0.7: 4.80 us + 0.05 us = 4.85 us, where the ring needs 11.25 us.
    """
    depth = (num_ranks - 1).bit_length()  # ceil(log2 p), exactly
    return Transfer(2 * depth * link.latency_s, 2 / (link.bandwidth_bytes_per_s * bandwidth_share))


def ring_all_gather(link: Link, num_ranks: int, bandwidth_share: float = 1.0) -> Transfer:
    """Every rank ends with all n bytes, having brought n/p: t = (p - 1) alpha + (p - 1)/p n / (B e)."""
    p = num_ranks
    return Transfer((p - 1) * link.latency_s, (p - 1) / p / (link.bandwidth_bytes_per_s * bandwidth_share))
