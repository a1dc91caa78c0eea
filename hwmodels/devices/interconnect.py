"""Links between devices, as data sheets describe them. Their traffic: `hwmodels.operators.collectives`."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_finite


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

    def __post_init__(self) -> None:
        check_finite("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, unit="bytes/s")
        check_finite("latency_s", self.latency_s, unit="s", zero_allowed=True)
