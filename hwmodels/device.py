"""Data-sheet values of one accelerator, its links, and the storage below its memory.

Also its compute dtype, time slicing, and chips with systolic arrays.

Storage below the GPUs' memory that can hold KV: the host's memory and a disk. Defaults are one GPU's share of
an 8-GPU server of the H100 generation (NVIDIA DGX H100 user guide: 2 TB of memory, 30 TB of NVMe disks for
caching).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, OneOf, Positive, PositiveInt, PositiveShare, Unit, check
from hwmodels.checks import check_finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Torus(Checked):
    """A network without switches: every device has links to both neighbours on each axis (TPU's ICI)."""

    axes: Annotated[int, OneOf((1, 2, 3))]
    """Number of axes, 2 or 3; the links of a device share its bandwidth equally, two per axis."""
    wraps_from: PositiveInt
    """Minimum number of devices on an axis with connected ends; shorter axes are lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Checked):
    """A link from a device to others, in its own node or in other nodes."""

    name: str
    """Name as printed in data sheets: NVLink 4, PCIe 5.0 x16."""
    bandwidth_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    """Bandwidth per device and direction, from the data sheet."""
    latency_s: Annotated[NonNegative, Unit("s")]
    """Latency alpha from one device's memory to its neighbour's, without the launch of the kernel."""
    multicast: bool = False
    """True if the switch reduces and copies messages itself (NVLink SHARP: NVLink 4 and later switches)."""
    peer_to_peer: bool = True
    """False if devices cannot map each other's memory (GeForce), so all messages are staged in host memory.
    """
    torus: Torus | None = None
    """Torus formed by the links; None: a switch or a full mesh, where every pair is one hop apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystolicArray(Checked):
    """Shape of each array of a device; their number follows from the device's peak.

    An array of rows x columns multiplies and adds once per cell and cycle. Tiles of one operand stay in the
    cells while the other streams through, so every product is padded to whole tiles:

        weights stay (TPU, Neuron)    k to rows, n to columns; a tile of weights takes `rows` cycles to load
        behind the streaming rows of activations, so m counts as at least `rows`
        outputs stay (Gaudi)          m to rows, n to columns

    Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit", ISCA 2017 (weights stay);
    Lee et al., "Debunking the CUDA Myth Towards GPU-based AI Systems", ISCA 2025 (Gaudi, arXiv 2501.00210).
    """

    rows: PositiveInt
    columns: PositiveInt
    outputs_stay: bool = False
    """Whether sums stay in the cells and both operands stream; False: weights stay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain(Checked):
    """The chips of such a machine and the links between them.

    Together the chips hold a model in SRAM, and every token passes all chips one after the other. A preset
    describes the whole machine as one device: its memory, bandwidth and peak are sums over the chips (Groq:
    576 chips for a model of 70B parameters; Cerebras: one to four wafers). `hwmodels.assembly` prices
    iterations on it.
    """

    num_chips: PositiveInt
    hop_s: Annotated[NonNegative, Unit("s")]
    """Latency of the link from a chip to the next one, including the receiver."""
    link_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    """Bandwidth of that link, in one direction."""
    layer_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Latency of a layer in addition to reading and arithmetic: broadcasts and sums over the cores of a
    wafer.
    """


DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}
"""Data types of peaks, and the bytes of one element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(Checked):
    """Data-sheet values of one accelerator.

    Peaks are dense: a data sheet's "with sparsity" value is twice that.
    """

    name: str
    memory_bytes: Annotated[Positive, Unit("bytes")]
    """Total memory that the driver reports."""
    memory_bandwidth_bytes_per_s: Annotated[Positive, Unit("bytes/s")]
    peak_flops_per_s: dict[str, float]
    """Peak per supported dtype (`DTYPE_BYTES`). Integer types: operations/s."""
    num_sms: PositiveInt
    """Streaming multiprocessors (compute units on AMD, Xe cores on Intel); tiles run in waves on them.

    With systolic arrays: cores, such as TensorCores of a TPU; no price depends on their number.
    """
    systolic: SystolicArray | None = None
    """Systolic arrays that multiply matrices instead of SMs; None: no arrays."""
    chain: Chain | None = None
    """Chips with weights in SRAM that together form this device; None: it is one chip."""
    sm_clock_hz: Annotated[Positive | None, Unit("Hz")] = None
    """Boost clock of the SMs, for which the peaks hold; latencies measured on a related device scale with it.
    """
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
    """Usual number of devices per node, which is the maximum tensor parallelism offered."""
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

    @property
    def has_matrix_units(self) -> bool:
        """True if 16-bit matrix products have a higher peak than fp32, as on tensor cores."""
        fp32 = self.peak_flops_per_s.get("fp32", 0.0)
        return any(self.peak_flops_per_s.get(dtype, 0.0) > fp32 for dtype in ("fp16", "bf16"))

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
        no bf16 units: fp16 takes the same bytes and is the only choice in every engine on these chips. Raises
        ValueError if the device computes in neither.
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
    """Share of the data-sheet PCIe bandwidth reached by pinned copies.

    50 to 55 of 64 GB/s are usual for PCIe Gen 5.
    """
    disk_gib: Annotated[NonNegative, Unit("GiB")] = 3500.0
    disk_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 6e9
    """Rate of sequential reads and writes of an NVMe disk, PCIe 4.0 x4 (data sheets: 6.5 to 7 GB/s read)."""
    overlapped: bool = True
    """Whether a step may run while KV is still being copied out of blocks that it reuses (with a staging
    buffer).
    """


STATE_BYTES = 496 * 1024
"""Largest state per SM: 256 KiB registers (since Kepler), up to 228 KiB L1 and shared memory (Hopper)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSlicing(Checked):
    """Settings of time slicing: the length of a slice, after which the next process runs.

    Processes take turns on one GPU, as with drivers without MPS or MIG. A slice lasts 2 ms (nvidia-smi
    compute-policy --set-timeslice: short 2, medium 10, long 30); an idle process skips its turn. At the end
    of a slice the state of the SMs is written to memory and the state of the next process is read: registers
    and shared memory, state over bandwidth as in Tanasic et al., "Enabling preemptive multiprogramming on
    GPUs" (ISCA 2014); then the L2 cache is filled again.

        switch_s = (2 SMs state per SM + L2) / bandwidth
        H100 SXM: (2 x 132 x 0.5 MB + 52 MB) / 3.35e12 = 55 us, 2.7 % of the time

    While n processes are busy, an iteration of one of them takes n / (1 - switch share) times as long as
    alone, because the slices of the others lie in between. This model was not compared with measurements; it
    ignores kernels that extend beyond the end of a slice, and hosts that wait for each other.
    """

    slice_s: Annotated[Positive, Unit("s")] = 2e-3

    def switch_s(self, device: Device) -> float:
        """Returns the seconds of a switch from one process to the next."""
        moved = 2 * device.num_sms * STATE_BYTES + device.l2_bytes
        return moved / device.memory_bandwidth_bytes_per_s

    def switch_share(self, device: Device) -> float:
        """Returns the share of time lost to switches while two or more processes are busy."""
        switch_s = self.switch_s(device)
        return switch_s / (self.slice_s + switch_s)
