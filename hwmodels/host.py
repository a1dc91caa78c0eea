"""The host of an engine: overhead of an iteration, CUDA graphs, weights in its memory, and cold starts.

The host work of an iteration is scheduling, kernel launches and bookkeeping; CUDA graphs save launches.
Without a graph the host launches kernel by kernel. Launches run ahead of the device, so an iteration takes
the longer of kernels and launches. `Compilation` determines the cost and number of launches:

    inductor, native   one per fused kernel: torch.compile's code, or an engine in C++; launch_s each
    eager              the same kernels, called by PyTorch modules: OPS_PER_KERNEL operators of op_s each
    pytorch            plain PyTorch, nothing fused: each operator is a launch (`UNFUSED`), op_s each

Llama-2-7B: 327 kernels, 1.3 ms of launches compiled, 17.7 ms eager, and 35.4 ms in plain PyTorch, which
launches 1,966.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from fieldlimits import Checked, NonNegative, OneOf, Positive, PositiveInt, PositiveShare, Unit, check
from hwmodels.checks import check_whole
from hwmodels.device import Link, Storage
from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model import ModelSpec

GIB = 2.0**30

OPS_PER_KERNEL = 3
"""PyTorch operators of a module per kernel: the output is allocated, viewed, and the kernel called."""

UNFUSED = {
    **dict.fromkeys(
        ("attention_norm", "mlp_norm"), 9
    ),  # cast, square, mean, + eps, rsqrt, *, cast, *, residual
    "final_norm": 8,
    "qk_norm": 16,
    "latent_norm": 16,
    "rotary": 18,  # of queries and of keys: cast, 2 products and a sum for each half, stack, cast
    "kv_write": 2,
    "attention_decode": 16,  # heads repeated, mask, scaling, two products, softmax, copies of layouts
    "gate_up_proj": 2,
    "shared_gate_up_proj": 2,
    "activation": 2,
}
"""Launches of plain PyTorch for one call of an operator; other operators have the same launches as in an
engine.

A layer of Llama-2 has 61, as counted with PyTorch's dispatcher on gpt-fast's model of November 2023.
"""


class Compilation(Enum):
    """A way to run the model without a CUDA graph: the fused parts, and the launcher."""

    inductor = "torch.compile: fused kernels, launched by compiled code"
    native = "an engine in C++, or one whose launch_s stands for all that a kernel costs"
    eager = "PyTorch modules with the engine's fused kernels"
    pytorch = "plain PyTorch modules"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOverhead(Checked):
    """Seconds that the engine's process spends in addition to the GPU's work; part of an engine profile.

    not overlapped:  iteration = max(gpu, launches) + host
    overlapped:      iteration = max(gpu, launches + host) + exposed
    with host = iteration_s + sequence_s * sequences, launches = launch_s * kernels (or one graph replay).
    Defaults: the order of magnitude of a Python engine (vLLM v1) on a server CPU; profiles replace them.
    """

    iteration_s: Annotated[NonNegative, Unit("s")] = 700e-6
    """Host time per iteration: schedule, prepare inputs, read the tokens back."""
    sequence_s: Annotated[NonNegative, Unit("s")] = 4e-6
    """Host time per sequence in the batch: sampling bookkeeping, detokenising, output."""
    launch_s: Annotated[NonNegative, Unit("s")] = 4e-6
    """CPU time to launch one kernel from the framework. Launches run ahead of the GPU, hence the max."""
    graph_replay_s: Annotated[NonNegative, Unit("s")] = 10e-6
    """CPU time to launch a captured graph of any length."""
    overlapped: bool = False
    """Asynchronous scheduling: the host prepares iteration i+1 while the GPU runs i."""
    op_s: Annotated[NonNegative, Unit("s")] = 18e-6
    """CPU time of a PyTorch operator without compilation, including its Python code: 19 us in gpt-fast's
    text, 17 us in Spec-Bench's loop.
    """
    one_by_one: bool = False
    """Whether the model runs in plain PyTorch without fusion; set by `under`."""
    exposed_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time that the GPU still waits between two graphs if `overlapped` is true."""

    def under(self, compilation: Compilation) -> HostOverhead:
        """Returns the overhead with the launches of a way to run the model."""
        if compilation is Compilation.eager:
            return replace(self, launch_s=max(self.launch_s, OPS_PER_KERNEL * self.op_s))
        if compilation is Compilation.pytorch:
            return replace(self, launch_s=self.op_s, one_by_one=True)
        return self

    def launches(self, name: str, kernels: int) -> int:
        """Returns the launches per call of an operator that has this many kernels in an engine."""
        if not self.one_by_one or not kernels:
            return kernels
        return UNFUSED.get(name, kernels)


GRAPH_MODES = ("full", "piecewise")


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaGraphs(Checked):
    """Decode-only iterations of up to max_capture_size rows replay graphs, padded to a captured size.

    A sequence that verifies draft tokens has several rows, any other sequence one. Everything else (a prompt
    chunk in the batch, a larger batch, `enabled` false) launches kernel by kernel.
    """

    enabled: bool = True
    mode: Annotated[str, OneOf(GRAPH_MODES)] = "full"
    """full: one graph is the whole iteration. piecewise (vLLM: PIECEWISE): a graph ends at each attention,
    and the device waits for the launches of its kernel and of the next graph: 28 x 14 us = 0.39 ms in
    Qwen2.5-1.5B, where vLLM's pull request 20059 measured 0.40 ms (TPOT 5.42 and 5.02 ms)."""
    max_capture_size: Annotated[PositiveInt, "enabled=false for no graphs"] = 512

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes, vLLM's ladder: 1, 2, 4, every 8 up to 256, every 16 beyond."""
        if not self.enabled:
            return []
        ladder = [1, 2, 4, *range(8, 256, 8), *range(256, self.max_capture_size + 1, 16)]
        return [size for size in ladder if size <= self.max_capture_size]

    def padded(self, rows: int = 1) -> list[int]:
        """Returns a list: for each number of rows from 0 up, the captured size that runs it.

        rows: rows per sequence; sizes are rounded up to a multiple of them, as in vLLM.
        """
        padded = [0]
        for size in self.sizes:
            whole = min(-(-size // rows) * rows, self.sizes[-1])
            padded += [whole] * (whole + 1 - len(padded))
        return padded


class HostShare:
    """Turns GPU seconds of an iteration into wall time: applies `HostOverhead` and `CudaGraphs`.

    It holds for iterations of num_kernels kernels, plus mixed_kernels with both decodes and prompts.
    attentions: calls of attention or of linear layers with states, at which piecewise graphs end; without
    them such graphs raise ValueError.
    tokens: tokens that a device computes (integers); num_seqs: decodes and prompt chunks in the batch.
    Numbers and arrays are bit-identical.
    """

    def __init__(
        self,
        host: HostOverhead,
        cuda_graphs: CudaGraphs,
        num_kernels: float,
        *,
        mixed_kernels: float = 0.0,
        attentions: float | None = None,
    ) -> None:
        self._host = host
        self._gaps_s = 0.0
        """Seconds that the device waits between the pieces of an iteration."""
        if cuda_graphs.enabled and cuda_graphs.mode == "piecewise":
            if attentions is None:
                raise ValueError(
                    "engine.cuda_graphs.mode=piecewise: needs the launches of single operators, which this "
                    "latency has not; use latency=calibrated or latency=spec"
                )
            self._gaps_s = attentions * (host.graph_replay_s + host.launch_s)
        self._launches_s = host.launch_s * num_kernels
        self._mixed_kernels = mixed_kernels
        self._cuda_graphs = cuda_graphs
        self._padded = cuda_graphs.padded()
        self._padded_by_rows = {1: self._padded}
        self._padded_arrays: dict[int, NDArray[np.intp]] = {}

    def mixed_kernels(self, decode_seqs: Any, prefill_seqs: Any) -> Any:
        """Returns the number of additional kernels in iterations with both decodes and prompts."""
        if not self._mixed_kernels:
            return 0.0
        return self._mixed_kernels * smaller(smaller(decode_seqs, prefill_seqs), 1)

    def replays(self, tokens: Any, prefill_tokens: Any) -> Any:
        """Returns whether a CUDA graph runs the whole iteration; for arrays, per iteration."""
        return (prefill_tokens == 0) & (tokens < len(self._padded))

    def computed_tokens(self, tokens: Any, replays: Any, rows: Any = 1) -> Any:
        """Returns the number of tokens computed: the captured size if a graph replays, else `tokens`.

        rows: rows per decoding sequence.
        """
        if not isinstance(tokens, ndarray):
            return self.padded(int(rows))[tokens] if replays else tokens
        if not isinstance(rows, ndarray):
            return np.where(replays, self._padded_array(int(rows)).take(tokens, mode="clip"), tokens)
        computed = np.broadcast_to(tokens, np.broadcast(tokens, rows).shape)
        for count in np.unique(rows).tolist():
            padded = self._padded_array(int(count)).take(tokens, mode="clip")
            computed = np.where(replays & (rows == count), padded, computed)
        return computed

    def padded(self, rows: int) -> list[int]:
        """Returns `CudaGraphs.padded`."""
        if rows not in self._padded_by_rows:
            self._padded_by_rows[rows] = self._cuda_graphs.padded(rows)
        return self._padded_by_rows[rows]

    def _padded_array(self, rows: int) -> NDArray[np.intp]:
        if rows not in self._padded_arrays:
            self._padded_arrays[rows] = np.array(self.padded(rows))
        return self._padded_arrays[rows]

    def engine_seconds(self, num_seqs: Any) -> Any:
        """Returns the seconds of the engine's process per iteration, without launches."""
        return self._host.iteration_s + self._host.sequence_s * num_seqs

    def stage_launch_seconds(self, replays: bool, kernels: Sequence[float]) -> list[float]:
        """Returns the seconds for a pipeline stage to launch this many kernels, or to replay its graph."""
        if replays:
            return [self._host.graph_replay_s + self._gaps_s / len(kernels)] * len(kernels)
        return [self._host.launch_s * num for num in kernels]

    @property
    def exposed_s(self) -> float | None:
        """`HostOverhead.exposed_s` if the host works in parallel with the devices, else None."""
        return self._host.exposed_s if self._host.overlapped else None

    def bounds(self, replays: Any, num_seqs: Any, more_kernels: Any = None) -> tuple[Any, Any]:
        """Returns floor_s and added_s: the iteration takes max(gpu, floor_s) + added_s.

        more_kernels: number of kernels launched in addition to num_kernels.
        """
        host, launch_s = self._host, self._launch_seconds(replays, more_kernels)
        host_s = host.iteration_s + host.sequence_s * num_seqs
        floor_s, added_s = (launch_s + host_s, host.exposed_s) if host.overlapped else (launch_s, host_s)
        return floor_s, added_s + self._gaps_s * replays if self._gaps_s else added_s

    def wall_seconds(self, gpu_s: Any, replays: Any, num_seqs: Any, more_kernels: Any = None) -> Any:
        """Returns the wall time in seconds of an iteration whose kernels take gpu_s."""
        floor_s, added_s = self.bounds(replays, num_seqs, more_kernels)
        return larger(gpu_s, floor_s) + added_s

    def parts(self, gpu_s: Any, replays: Any, num_seqs: Any, more_kernels: Any = None) -> tuple[Any, Any]:
        """Returns the seconds that the GPU waits for launches, and for the rest of the host's work."""
        floor_s, added_s = self.bounds(replays, num_seqs, more_kernels)
        launched_s = larger(gpu_s, self._launch_seconds(replays, more_kernels))
        return launched_s - gpu_s, larger(gpu_s, floor_s) - launched_s + added_s

    def _launch_seconds(self, replays: Any, more_kernels: Any) -> Any:
        launches_s = self._launches_s
        if more_kernels is not None:
            launches_s = launches_s + self._host.launch_s * more_kernels
        if isinstance(replays, ndarray):
            return np.where(replays, self._host.graph_replay_s, launches_s)
        return self._host.graph_replay_s if replays else launches_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(Checked):
    """Settings of offloading, named as in vLLM and llama.cpp.

        cpu_offload_gb vLLM: this many GiB of each device's layers stay in host memory, and every forward pass
                         reads them over PCIe
        n_gpu_layers llama.cpp: the last n layers run on the device (with one more, also the LM head), the
                         others on the CPU, with their KV in host memory

    16 GiB of Llama-3.1-70B's weights over PCIe 5.0 x16 at 0.8 of 64e9 bytes/s: 336 ms more per pass.
    """

    cpu_offload_gb: Annotated[NonNegative, Unit("GiB")] = 0.0
    """GiB of weights per device that stay in host memory."""
    n_gpu_layers: int | None = None
    """Number of layers on the device, counted from the output; None: all, and the LM head."""
    pcie_share: PositiveShare = 0.8
    """Share of the data-sheet PCIe bandwidth reached when reading weights."""
    cpu_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 200e9
    """Bandwidth of host memory reached by the CPU's layers: a socket with eight channels of DDR5."""
    cpu_flops_per_s: Annotated[Positive, Unit("FLOP/s")] = 3e12
    """FLOP/s reached by the CPU's layers: about 50 cores with AVX-512; order of magnitude."""

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
        """Raises ValueError if layers of a parallel layout would be split between device and CPU."""
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


class WeightSource(Enum):
    """Storage from which a starting replica loads the weights."""

    disk = "disk"
    """A disk of the replica's machine; its rate is `Storage.disk_bytes_per_s`."""
    network = "network"
    """Object storage or a registry, downloaded directly to the GPU's machine."""
    host_memory = "host_memory"
    """Host memory, where the weights are kept ready; only PCIe and the loader limit the rate."""


class ColdStartParts(NamedTuple):
    """Seconds of the consecutive parts of a cold start."""

    provision_s: float
    load_s: float
    warm_up_s: float
    capture_s: float

    @property
    def total_s(self) -> float:
        return sum(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStart(Checked):
    """Settings of a cold start. A part of 0 s takes no time: provision_s=0 for machines that are ready.

        cold start = provision + weights / rate + warm-up + captured graphs * capture
        rate = min(loader, PCIe, source) of one device; all devices load their own share at the same time

    Llama-3.1-8B from a disk at 6e9 bytes/s by a loader of 1.5e9 bytes/s: 16.06e9 / 1.5e9 = 10.7 s. With the
    defaults and 51 captured sizes: 300 + 10.7 + 57 + 51 * 0.8 = 408.5 s.

    Sources of the defaults:

    - provision_s: a new node of a GPU cluster takes about 5 minutes until a pod runs on it, a pod on an
      existing node about 1 (reports of Karpenter users; GKE's fast-starting nodes: up to 4 times faster).
    - loader_bytes_per_s: LLaMA-2-70B in 84 s (1.6e9 bytes/s) and OPT-30B in 34 s (1.8e9) with the loaders of
    engines (ServerlessLLM, OSDI 2024, section 2, whose own loader is 3.6 to 8.2 times faster); Llama-3.1-8B
    in 18 s (0.9e9) on an L40S with vLLM (Tensorfuse, "Reducing GPU cold start time when using vLLM", 2025).
    - network_bytes_per_s: a server that downloads at 5e9 bytes/s (ServerlessLLM, section 2), an eighth of it.
    - warm_up_s: vLLM with its compile cache kept: imports and engine 34 s, Dynamo 10 s, compiled graphs 13 s;
      with an empty cache 94 + 10 + 42 s (Tensorfuse, 2025).
    - capture_s: 54 s for vLLM's default sizes (about 67), and 7 s for 8 (Tensorfuse, 2025); other set-ups
    take as little as 0.05 s per size (vLLM, pull request 23184).
    """

    provision_s: Annotated[NonNegative, Unit("s")] = 300.0
    """Seconds until the engine's process can start: machine, node, container image."""
    source: WeightSource = WeightSource.disk
    network_bytes_per_s: Annotated[Positive, Unit("bytes/s")] = 0.625e9
    """Network bandwidth per device."""
    loader_bytes_per_s: Annotated[Positive | None, Unit("bytes/s"), "null for no limit"] = 1.5e9
    """Rate at which one process reads, converts and copies weights; None: no limit."""
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
