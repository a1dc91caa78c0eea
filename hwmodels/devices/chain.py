"""A chain of chips that hold a model in SRAM: every token passes all of them, one after the other.

A preset describes the whole machine as one device: its memory, bandwidth and peak are sums over the chips
(Groq: 576 chips for a model of 70B parameters; Cerebras: one to four wafers).
`hwmodels.assembly.weight_places` prices iterations on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, PositiveInt, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain(Checked):
    """The chips of such a machine and the links between them."""

    num_chips: PositiveInt
    hop_s: Annotated[NonNegative, Unit("s")]
    """Latency of the link from a chip to the next one, receiver included."""
    link_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    """Bandwidth of that link, in one direction."""
    layer_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Latency of a layer besides reading and arithmetic: broadcasts and sums over the cores of a wafer."""
