"""Data-sheet figures of one accelerator and of the storage below its memory, and its choice of a dtype.

Storage below the GPUs' memory that can hold KV: the host's memory and a disk. Defaults are one GPU's share of
an 8-GPU server of the H100 generation (NVIDIA DGX H100 user guide: 2 TB of memory, 30 TB of NVMe disks for
caching).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, PositiveInt, PositiveShare, Unit, check
from hwmodels.checks import check_finite
from hwmodels.devices.chain import Chain
from hwmodels.devices.interconnect import Link
from hwmodels.devices.systolic import SystolicArray

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}
"""Data types that a peak may be given for, and the bytes of one element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(Checked):
    """Figures of one accelerator. Peaks are dense: a data sheet's "with sparsity" figure is twice that."""

    name: str
    memory_bytes: Annotated[Positive, Unit("bytes")]
    """Total memory that the driver reports."""
    memory_bandwidth_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    peak_flops_per_s: dict[str, float]
    """Peak per dtype (`DTYPE_BYTES`) that the chip computes in. Integer types: operations/s."""
    num_sms: PositiveInt
    """Streaming multiprocessors (compute units on AMD, Xe cores on Intel); tiles run in waves on them.

    With systolic arrays: cores, such as TensorCores of a TPU; no price depends on their number.
    """
    systolic: SystolicArray | None = None
    """Systolic arrays that multiply matrices in place of SMs; None: there are none."""
    chain: Chain | None = None
    """Chips with weights in SRAM, of which this device is the whole machine; None: it is one chip."""
    sm_clock_hz: Annotated[Positive | None, Unit("Hz")] = None
    """Boost clock of the SMs, at which the peaks hold; with it scale latencies measured on a relative."""
    l2_bytes: Annotated[Positive, Unit("bytes")]
    """Size of the last-level cache that all SMs share (Infinity Cache on AMD); faster than memory."""
    sparse_tensor_cores: bool = False
    """True if 2:4 sparse weight matrices run at twice the dense peak (Ampere and later)."""
    tdp_w: Annotated[Positive, Unit("W")]
    """Board power limit."""
    idle_w: Annotated[NonNegative, Unit("W")]
    """Board power while nothing runs, memory clocked up (nvidia-smi: P0), as in a server between requests."""
    pcie: Link
    """Link to the host, and to other devices if there is no better one."""
    scale_up: Link | None = None
    """Link among the devices of a node (NVLink, xGMI), if there is one."""
    inter_node: Link | None = None
    """Link to devices of other nodes (InfiniBand, RoCE); nodes usually have one such port per device."""
    gpus_per_node: PositiveInt = 8
    """Usual number of devices per node, the largest tensor parallelism that is offered."""
    price_usd_per_hour: Annotated[NonNegative, Unit("$/h")]
    price_source: str
    """Source and date of the price; prices age fast."""
    source: str
    """Source of the other figures."""

    def __post_init__(self) -> None:
        check(self)
        if self.idle_w >= self.tdp_w:
            raise ValueError(f"idle_w={self.idle_w}: must be below tdp_w={self.tdp_w} W")
        for dtype, peak in self.peak_flops_per_s.items():
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"peak_flops_per_s.{dtype}: unknown dtype; known: {', '.join(DTYPE_BYTES)}")
            check_finite(f"peak_flops_per_s.{dtype}", peak, unit="FLOP/s")

    @property
    def link(self) -> Link:
        """The fastest link to the other devices of the node."""
        return self.pcie if self.scale_up is None else self.scale_up

    def check_reaches(self, num_ranks: int) -> None:
        """Raises ValueError unless num_ranks devices share a node, or nodes have a link between them."""
        if self.inter_node is None and num_ranks > self.gpus_per_node:
            raise ValueError(
                f"tensor_parallel_size={num_ranks}: must be 1 to {self.gpus_per_node}, the devices of one "
                f"node, as {self.name} has no link between nodes (inter_node)"
            )

    def compute_dtype(self, requested: str) -> str:
        """Returns the dtype in which this device runs a model with a checkpoint in dtype `requested`.

        It is the requested dtype, except that bf16 becomes fp16 on chips older than Ampere (T4), which have
        no bf16 units: it takes the same bytes, and it is the choice that every engine leaves its users there.
        Raises ValueError if the device computes in neither.
        """
        if requested in self.peak_flops_per_s:
            return requested
        if requested == "bf16" and "fp16" in self.peak_flops_per_s:
            return "fp16"
        known = ", ".join(self.peak_flops_per_s)
        raise ValueError(f"dtype={requested}: {self.name} does not compute in it; it has {known}")


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
