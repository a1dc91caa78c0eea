"""Cold start: the time until a new replica serves, from its machine, weights, warm-up and CUDA graphs.

    cold start = provision + weights / rate + warm-up + captured graphs * capture
    rate = min(loader, PCIe, source) of one device; all devices load their own share at the same time

Llama-3.1-8B from a disk at 6e9 bytes/s by a loader of 1.5e9 bytes/s: 16.06e9 / 1.5e9 = 10.7 s. With the
defaults and 51 captured sizes: 300 + 10.7 + 57 + 51 * 0.8 = 408.5 s.

Sources of the defaults:

- provision_s: a new node of a GPU cluster takes about 5 minutes until a pod runs on it, a pod on an
  existing node about 1 (reports of Karpenter users; GKE's fast-starting nodes: up to 4 times faster).
- loader_bytes_per_s: LLaMA-2-70B in 84 s (1.6e9 bytes/s) and OPT-30B in 34 s (1.8e9) with the loaders of
  engines (ServerlessLLM, OSDI 2024, section 2, which itself is 3.6 to 8.2 times faster); Llama-3.1-8B in
  18 s (0.9e9) on an L40S with vLLM (Tensorfuse, "Reducing GPU cold start time when using vLLM", 2025).
- network_bytes_per_s: a server that downloads at 5e9 bytes/s (ServerlessLLM, section 2), an eighth of it.
- warm_up_s: vLLM with its compile cache kept: imports and engine 34 s, Dynamo 10 s, compiled graphs 13 s;
  with an empty cache 94 + 10 + 42 s (Tensorfuse, 2025).
- capture_s: 54 s for vLLM's default sizes, some 67, and 7 s for 8 (Tensorfuse, 2025); other set-ups take
  as little as 0.05 s a size (vLLM, pull request 23184).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

from fieldlimits import Checked, NonNegative, Positive, Unit
from hwmodels.devices.device import Storage
from hwmodels.devices.host import CudaGraphs
from hwmodels.devices.interconnect import Link


class WeightSource(Enum):
    """Storage from which a starting replica loads the weights."""

    disk = "disk"
    """A disk of the replica's own machine; its rate is `Storage.disk_bytes_per_s`."""
    network = "network"
    """Object storage or a registry, downloaded straight into the GPU's machine."""
    host_memory = "host_memory"
    """Host memory, where the weights are kept ready; only PCIe and the loader limit the rate."""


class ColdStartParts(NamedTuple):
    """Seconds of the parts of a cold start, which follow one after the other."""

    provision_s: float
    load_s: float
    warm_up_s: float
    capture_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStart(Checked):
    """Settings of a cold start. A part of 0 s takes no time: provision_s=0 for machines that are ready."""

    provision_s: Annotated[NonNegative, Unit("s")] = 300.0
    """Seconds until the engine's process can start: machine, node, container image."""
    source: WeightSource = WeightSource.disk
    network_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 0.625e9
    """Network bandwidth per device."""
    loader_bytes_per_s: Annotated[Positive | None, Unit("bytes/s"), "null for no limit"] = 1.5e9
    """Rate at which one process reads, converts and copies weights; None: no limit of its own."""
    warm_up_s: Annotated[NonNegative, Unit("s")] = 57.0
    """Seconds for imports, compilation (or loading its cache) and profiling."""
    capture_s: Annotated[NonNegative, Unit("s")] = 0.8
    """Seconds per captured CUDA graph."""

    def parts(
        self, *, weights_bytes: float, pcie: Link, storage: Storage, cuda_graphs: CudaGraphs
    ) -> ColdStartParts:
        """Returns the parts of the cold start of a replica with weights_bytes on each device."""
        rates = [storage.pcie_share * pcie.bandwidth_bytes_per_s]
        if self.source is WeightSource.disk:
            rates.append(storage.disk_bytes_per_s)
        if self.source is WeightSource.network:
            rates.append(self.network_bytes_per_s)
        if self.loader_bytes_per_s is not None:
            rates.append(self.loader_bytes_per_s)
        return ColdStartParts(
            provision_s=self.provision_s,
            load_s=weights_bytes / min(rates),
            warm_up_s=self.warm_up_s,
            capture_s=self.capture_s * len(cuda_graphs.sizes),
        )
