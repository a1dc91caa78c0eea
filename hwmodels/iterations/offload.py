"""Weights in host memory: streamed to the device in every pass, or computed with by the CPU.

    cpu_offload_gb   vLLM: so many GiB of each device's layers stay in host memory, and every forward pass
                     reads them over PCIe
    n_gpu_layers     llama.cpp: the last n layers run on the device (with one more, the LM head too), the
                     others on the CPU, with their KV in host memory

16 GiB of Llama-3.1-70B's weights over PCIe 5.0 x16 at 0.8 of 64e9 bytes/s: 336 ms more per pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, PositiveShare, Unit, check
from hwmodels.checks import check_whole
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model.model_spec import ModelSpec

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(Checked):
    """Settings of offloading, named as in vLLM and llama.cpp."""

    cpu_offload_gb: Annotated[NonNegative, Unit("GiB")] = 0.0
    """GiB of weights per device that stay in host memory."""
    n_gpu_layers: int | None = None
    """Layers on the device, those next to the output; None: all, and the LM head."""
    pcie_share: PositiveShare = 0.8
    """Share of the data sheet's PCIe bandwidth that reading weights reaches."""
    cpu_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 200e9
    """Bandwidth of host memory that the CPU's layers reach: a socket with eight channels of DDR5."""
    cpu_flops_per_s: Annotated[Positive, Unit("FLOP/s")] = 3e12
    """FLOP/s that the CPU's layers reach: some 50 cores with AVX-512; order of magnitude."""

    def __post_init__(self) -> None:
        check(self)
        if self.n_gpu_layers is not None:
            check_whole(
                "n_gpu_layers", self.n_gpu_layers, remedy="; for the CPU alone choose hardware=xeon_8480"
            )
            if self.cpu_offload_gb:
                raise ValueError(
                    f"n_gpu_layers={self.n_gpu_layers}, cpu_offload_gb={self.cpu_offload_gb:g}: must not "
                    "both be set; set n_gpu_layers=null or cpu_offload_gb=0"
                )

    @property
    def is_used(self) -> bool:
        """True if any weights are in host memory."""
        return self.cpu_offload_gb > 0 or self.n_gpu_layers is not None

    def check(self, layout: ParallelLayout) -> None:
        """Raises ValueError if layers of a parallel layout are to be split between device and CPU."""
        if self.n_gpu_layers is not None and layout.num_devices > 1:
            raise ValueError(
                f"n_gpu_layers={self.n_gpu_layers}: splits layers between one device and the CPU, and the "
                f"replica has {layout.num_devices} devices; set cpu_offload_gb instead, or use one device"
            )

    def layer_share(self, num_layers: int) -> float:
        """Returns the share of the layers that the device computes."""
        return 1.0 if self.n_gpu_layers is None else min(self.n_gpu_layers, num_layers) / num_layers

    def has_head(self, num_layers: int) -> bool:
        """Returns whether the device computes the LM head."""
        return self.n_gpu_layers is None or self.n_gpu_layers > num_layers

    def host_bytes(self, model: ModelSpec, layout: ParallelLayout, device_bytes: float) -> float:
        """Returns the bytes of one device's weights that are in host memory; device_bytes: all of them."""
        embedding, head = model.table_bytes(layout.tensor_parallel_size)
        tables = max(embedding, head) if layout.pipeline_parallel_size > 1 else embedding + head
        layers_bytes = device_bytes - tables
        if self.n_gpu_layers is None:
            return min(self.cpu_offload_gb * GIB, layers_bytes)
        kept = (head or embedding) if self.has_head(model.num_layers) else 0.0
        return device_bytes - layers_bytes * self.layer_share(model.num_layers) - kept
