"""One accelerator as its data sheet describes it, and the shares of those figures that programs reach."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hwmodels.checks import check_finite, check_whole
from hwmodels.interconnect import Link

DTYPE_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5}
"""Data types that a peak may be given for, and the bytes of one element."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Figures of one accelerator. Peaks are dense: a data sheet's "with sparsity" figure is twice ours."""

    name: str
    memory_bytes: float
    """Total that the driver reports."""
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    """By dtype (`DTYPE_BYTES`); the types that the chip computes in. Integer types: operations/s."""
    num_sms: int
    """Streaming multiprocessors (compute units on AMD).

    For models that count waves of tiles over them; level `spec` does not read it.
    """
    tdp_w: float
    """Board power limit. For models of clocks under it and of energy; level `spec` does not read it."""
    pcie: Link
    """To the host, and to other devices where there is no better one."""
    scale_up: Link | None = None
    """Among the devices of a node (NVLink, xGMI), where there is such a thing."""
    gpus_per_node: int = 8
    """Usual number of devices a node, the largest tensor parallelism that is offered."""
    price_usd_per_hour: float
    price_source: str
    """Where the price comes from, and when; prices age fast."""
    source: str
    """Where the other figures come from."""

    def __post_init__(self) -> None:
        check_finite("memory_bytes", self.memory_bytes, unit="bytes")
        check_finite("memory_bandwidth_bytes_per_s", self.memory_bandwidth_bytes_per_s, unit="bytes/s")
        check_finite("tdp_w", self.tdp_w, unit="W")
        check_finite("price_usd_per_hour", self.price_usd_per_hour, unit="$/h", zero_allowed=True)
        check_whole("num_sms", self.num_sms)
        check_whole("gpus_per_node", self.gpus_per_node)
        for dtype, peak in self.peak_flops_per_s.items():
            if dtype not in DTYPE_BYTES:
                raise ValueError(f"peak_flops_per_s.{dtype}: unknown dtype; known: {', '.join(DTYPE_BYTES)}")
            check_finite(f"peak_flops_per_s.{dtype}", peak, unit="FLOP/s")

    @property
    def link(self) -> Link:
        """The fastest way to the other devices of the node."""
        return self.pcie if self.scale_up is None else self.scale_up

    def check_node_holds(self, num_ranks: int) -> None:
        """Raise ValueError where num_ranks devices do not share a node: `link` is the one inside it."""
        if not 1 <= num_ranks <= self.gpus_per_node:
            raise ValueError(
                f"tensor_parallel_size={num_ranks}: must be 1 to {self.gpus_per_node}, "
                f"the devices of one node ({self.name}: gpus_per_node)"
            )

    def compute_dtype(self, requested: str) -> str:
        """The dtype that a model whose checkpoint says `requested` runs in here.

        The requested one; bf16 becomes fp16 on chips older than Ampere (T4), which have no bf16 units: same
        bytes, the choice every engine leaves its users there. Raises ValueError where there is neither.
        """
        if requested in self.peak_flops_per_s:
            return requested
        if requested == "bf16" and "fp16" in self.peak_flops_per_s:
            return "fp16"
        known = ", ".join(self.peak_flops_per_s)
        raise ValueError(f"dtype={requested}: {self.name} does not compute in it; it has {known}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the data sheet that tuned kernels reach, and the time a kernel takes to start and drain.

    One honest default for every device: medians over single-operator measurements in bf16 on A100, H100,
    H200, B200 and RTX PRO 6000 (vLLM 0.24, TensorRT-LLM 1.3, NCCL; the database of NVIDIA aiconfigurator,
    commit 095f58a). The spread between chips and shapes, given with each, is what a calibrated model earns.
    """

    gemm_flops_share: float = 0.75
    """Compute-bound GEMM: 0.74 at 512 to 2,048 rows; the best reach 0.87 (A100), 0.80 (H100), 0.68 (B200)."""
    attention_flops_share: float = 0.45
    """Causal prefill attention over useful pairs: 0.36 (B200) to 0.54 (RTX PRO 6000), 0.46 on H100."""
    stream_bandwidth_share: float = 0.80
    """Weight-bound GEMM with its start-up taken out: 0.70 (A100), 0.75 (B200), 0.79 (H200), 0.83 (H100)."""
    kv_bandwidth_share: float = 0.75
    """Decode attention over 100 MB of KV and more: 0.63 to 0.81, 0.75 on H100."""
    scale_up_bandwidth_share: float = 0.70
    """All-reduce of 128 MiB and more over NVLink: 0.55 (B200, two ranks) to 0.93 (H200, eight), median 0.69.

    Assumed for Infinity Fabric.
    """
    pcie_bandwidth_share: float = 0.41
    """The same over PCIe 5.0 (RTX PRO 6000): 0.59, 0.41, 0.37 on 2, 4, 8 ranks; assumed for older ones."""
    kernel_s: float = 2.5e-6
    """Start and drain of one kernel in a stream: tiny GEMMs take 2.5 to 4.4 us, small norms 2 us."""
    attention_kernel_s: float = 8e-6
    """The same for attention (split KV, then combine): 9 to 15 us at the smallest sizes, some of it work."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share") and not 0 < value <= 1:
                raise ValueError(f"{field.name}={value}: must be a share, > 0 and <= 1")
            if field.name.endswith("_s"):
                check_finite(field.name, value, unit="s", zero_allowed=True)
