"""Links between devices, as data sheets describe them. Their traffic: `hwmodels.operators.collectives`."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_finite, check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus:
    """A network without switches: every device has a link to both neighbours on each axis (TPU's ICI)."""

    axes: int
    """Number of axes, 2 or 3; the links of a device share its bandwidth equally, two per axis."""
    wraps_from: int
    """Fewest devices on an axis whose ends are connected, too; shorter axes are lines."""

    def __post_init__(self) -> None:
        check_whole("wraps_from", self.wraps_from)
        if self.axes not in (1, 2, 3):
            raise ValueError(f"axes={self.axes}: must be 1, 2 or 3, the axes of a torus")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link from a device to others, of its own node or of other nodes."""

    name: str
    """Name as printed in data sheets: NVLink 4, PCIe 5.0 x16."""
    bandwidth_bytes_per_s: float
    """Bandwidth per device and direction, from the data sheet."""
    latency_s: float
    """Latency alpha from one device's memory to its neighbour's, without the launch of the kernel."""
    multicast: bool = False
    """True if the switch reduces and copies messages itself (NVLink SHARP: NVLink 4 and later switches)."""
    peer_to_peer: bool = True
    """False if devices cannot map each other's memory (GeForce): host memory stages all messages."""
    torus: Torus | None = None
    """Torus that the links form; None: a switch or a full mesh, on which every pair is one hop apart."""

    def __post_init__(self) -> None:
        check_finite("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, unit="bytes/s")
        check_finite("latency_s", self.latency_s, unit="s", zero_allowed=True)
