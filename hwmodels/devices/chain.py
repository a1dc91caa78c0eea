"""A chain of chips that hold a model in SRAM: every token passes all of them, one after the other.

A preset describes the whole machine as one device: its memory, bandwidth and peak are sums over the chips
(Groq: 576 chips for a model of 70B parameters; Cerebras: one to four wafers).
`hwmodels.assembly.chain` prices iterations on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_finite, check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The chips of such a machine and the links between them."""

    num_chips: int
    hop_s: float
    """Latency of the link from a chip to the next one, receiver included."""
    link_bytes_per_s: float
    """Bandwidth of that link, in one direction."""
    layer_s: float = 0.0
    """Latency of a layer besides reading and arithmetic: broadcasts and sums over the cores of a wafer."""

    def __post_init__(self) -> None:
        check_whole("num_chips", self.num_chips)
        check_finite("hop_s", self.hop_s, unit="s", zero_allowed=True)
        check_finite("link_bytes_per_s", self.link_bytes_per_s, unit="bytes/s")
        check_finite("layer_s", self.layer_s, unit="s", zero_allowed=True)
