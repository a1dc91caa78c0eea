"""Links between devices, as data sheets describe them. Their traffic: `hwmodels.operators.collectives`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, OneOf, Positive, PositiveInt, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus(Checked):
    """A network without switches: every device has a link to both neighbours on each axis (TPU's ICI)."""

    axes: Annotated[int, OneOf((1, 2, 3))]
    """Number of axes, 2 or 3; the links of a device share its bandwidth equally, two per axis."""
    wraps_from: PositiveInt
    """Fewest devices on an axis whose ends are connected, too; shorter axes are lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Checked):
    """A link from a device to others, of its own node or of other nodes."""

    name: str
    """Name as printed in data sheets: NVLink 4, PCIe 5.0 x16."""
    bandwidth_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    """Bandwidth per device and direction, from the data sheet."""
    latency_s: Annotated[NonNegative, Unit("s")]
    """Latency alpha from one device's memory to its neighbour's, without the launch of the kernel."""
    multicast: bool = False
    """True if the switch reduces and copies messages itself (NVLink SHARP: NVLink 4 and later switches)."""
    peer_to_peer: bool = True
    """False if devices cannot map each other's memory (GeForce): host memory stages all messages."""
    torus: Torus | None = None
    """Torus that the links form; None: a switch or a full mesh, on which every pair is one hop apart."""
