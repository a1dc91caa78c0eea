"""Storage below the GPUs' memory that can hold KV: the host's memory and a disk.

Defaults are one GPU's share of an 8-GPU server of the H100 generation (NVIDIA DGX H100 user guide: 2 TB of
memory, 30 TB of NVMe disks for caching).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, PositiveShare, Unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage(Checked):
    """Sizes and speeds of host memory and disk, each per GPU."""

    host_memory_gib: Annotated[NonNegative, Unit("GiB")] = 240.0
    """Host memory that is free for KV."""
    pcie_share: Annotated[PositiveShare, "of the data sheet's bandwidth"] = 0.8
    """Share of the data sheet's PCIe bandwidth that pinned copies reach.

    50 to 55 of 64 GB/s are usual for PCIe Gen 5.
    """
    disk_gib: Annotated[NonNegative, Unit("GiB")] = 3500.0
    disk_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 6e9
    """Rate of sequential reads and writes of an NVMe disk, PCIe 4.0 x4 (data sheets: 6.5 to 7 GB/s read)."""
    overlapped: bool = True
    """Whether a step may run while KV is still copied out of blocks that it reuses (by a staging buffer)."""
