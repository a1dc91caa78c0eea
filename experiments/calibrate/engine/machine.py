"""Figures of the machine alone: peak FLOP/s, memory bandwidth, host link, and the time of a kernel launch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.calibrate.engine.timing import host_s, recorded, timed, wall_s

CPU_COPY_BYTES = 1 << 27
GPU_COPY_BYTES = 1 << 31
CPU_SIZES = (256, 512, 1024)
GPU_SIZES = (4096, 8192)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE_BYTES = 32 << 20
TINY = 200
KERNELS_IN_GRAPH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Measured figures; memory_bytes, cache_bytes and num_sms are reported by the system."""

    name: str
    """Name of the processor."""
    copy_bytes_per_s: float
    """Bytes read plus bytes written per second of a copy."""
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    """Rate of the fastest square matrix product, by data type."""
    memory_bytes: int
    cache_bytes: int
    """Size of the largest shared cache."""
    num_sms: int
    """Number of SMs; on a CPU, the number of threads that compute."""
    host_copy_bytes_per_s: float
    """Bandwidth to or from the device, the slower of the two; on a CPU, of a copy in memory."""
    host_copy_s: float
    """Time of a copy of 4 KiB to the device and back."""
    launch_s: float
    """CPU time of a kernel launch; 0 on a CPU, where it is part of the operator."""
    graph_replay_s: float
    """CPU time of the replay of a CUDA graph."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Memory bandwidth: the faster of copying and reading."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measures the machine; on a CPU, matrix products in fp32 and in the model's dtype."""
    return _gpu(device) if device.type == "cuda" else _cpu(dtype)


def thread_s(call: Callable[[], object], times: int) -> float:
    """Returns the shortest thread time of several calls, in seconds; other programs only slow calls down."""
    call()
    found = []
    for _ in range(times):
        begin_s = time.thread_time()
        call()
        found.append(time.thread_time() - begin_s)
    return min(found)


def _cpu(dtype: torch.dtype) -> Machine:
    source = torch.ones(CPU_COPY_BYTES // 4)
    target = torch.empty_like(source)
    copy_s = thread_s(lambda: target.copy_(source), 7)
    read_s = thread_s(source.sum, 7)
    flops_per_s = {}
    for one in dict.fromkeys((torch.float32, dtype)):
        rates = []
        for size in CPU_SIZES if one is torch.float32 else CPU_SIZES[:2]:
            a, b = torch.randn(size, size, dtype=one), torch.randn(size, size, dtype=one)
            rates.append(2 * size**3 / thread_s(lambda a=a, b=b: a @ b, 7))  # type: ignore[misc]
        flops_per_s[NAMES[one]] = max(rates)
    page = torch.ones(4096, dtype=torch.uint8)
    return Machine(
        name=_processor(),
        copy_bytes_per_s=2 * CPU_COPY_BYTES / copy_s,
        read_bytes_per_s=CPU_COPY_BYTES / read_s,
        flops_per_s=flops_per_s,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cache_bytes=_cache_bytes(),
        num_sms=1,
        host_copy_bytes_per_s=CPU_COPY_BYTES / copy_s,
        host_copy_s=2 * thread_s(page.clone, 50),
        launch_s=0.0,
        graph_replay_s=0.0,
    )


def _gpu(device: torch.device) -> Machine:
    """Measures a GPU."""
    found = torch.cuda.get_device_properties(device)
    source = torch.ones(GPU_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy_s = timed([lambda: target.copy_(source)], device, rep_ms=150).median_s
    read_s = timed([source.sum], device, rep_ms=150).median_s
    flops_per_s = {}
    for one in (torch.float32, torch.float16, torch.bfloat16):
        rates = []
        for size in GPU_SIZES:
            a, b = (torch.randn(size, size, dtype=one, device=device) for _ in range(2))
            call = lambda a=a, b=b: a @ b  # noqa: E731
            rates.append(2 * size**3 / timed([call], device, rep_ms=100).median_s)
        flops_per_s[NAMES[one]] = max(rates)
    small = torch.zeros(1024, device=device)

    def kernels() -> None:
        for _ in range(KERNELS_IN_GRAPH):
            small.add_(1.0)

    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    to_device_s = wall_s(lambda: there.copy_(pinned, non_blocking=True), device, 8)
    to_host_s = wall_s(lambda: pinned.copy_(there, non_blocking=True), device, 8)

    def both_ways() -> None:
        there[:4096].copy_(pinned[:4096], non_blocking=True)
        pinned[:4096].copy_(there[:4096], non_blocking=True)

    return Machine(
        name=torch.cuda.get_device_name(device),
        copy_bytes_per_s=2 * GPU_COPY_BYTES / copy_s,
        read_bytes_per_s=GPU_COPY_BYTES / read_s,
        flops_per_s=flops_per_s,
        memory_bytes=found.total_memory,
        cache_bytes=getattr(found, "L2_cache_size", 0) or DEFAULT_CACHE_BYTES,
        num_sms=found.multi_processor_count,
        host_copy_bytes_per_s=len(pinned) / max(to_device_s, to_host_s),
        host_copy_s=wall_s(both_ways, device, 100),
        launch_s=host_s(lambda: small.add_(1.0), device, TINY),
        graph_replay_s=host_s(recorded(kernels).replay, device, 20),
    )


def _processor() -> str:
    """Returns the system's name of the processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else "CPU"


def _cache_bytes() -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = []
    for file in CACHES.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", file.read_text().strip())
        if match:
            sizes.append(int(match[1]) * units[match[2]])
    return max(sizes, default=DEFAULT_CACHE_BYTES)
