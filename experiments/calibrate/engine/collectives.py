"""Bandwidth and latency of the link between the devices of a node, measured with all-reduces.

    seconds(bytes) = 2 (n - 1) hop latency + 2 (n - 1) / n bytes / bandwidth        n ranks in a ring

It is tested with gloo on a CPU. The NCCL path is written for torch 2.11 and has not run on GPUs yet.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.spawn import spawn

from hwmodels.fitting.robust import fit_terms
from hwmodels.iterations.layout import ParallelLayout
from realengine.runner.parallel import connect, disconnect

SIZES = tuple(1 << power for power in range(12, 28, 2))
"""Message sizes in bytes, from 4 KiB (a decode of few sequences) to 64 MiB (a prefill)."""
REPEATS = 20
LEAST_BYTE_S = 1e-15
"""Seconds per byte of a link whose bandwidth is not seen."""


class RingLink(NamedTuple):
    """Link of a ring all-reduce.

    by_bytes: message size in bytes -> measured seconds. undetermined: ranges of figures that the sizes do not
    determine.
    """

    num_ranks: int
    bandwidth_bytes_per_s: float
    latency_s: float
    by_bytes: dict[int, float]
    undetermined: Mapping[str, tuple[float, float]] = MappingProxyType({})


def measure_link(device_type: str, num_ranks: int) -> RingLink:
    """Measures the link between num_ranks devices, with one process each.

    Raises RuntimeError if a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (num_ranks, device_type, folder), nprocs=num_ranks)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    return link_of(num_ranks, {int(size): value for size, value in seconds.items()})


def link_of(num_ranks: int, by_bytes: dict[int, float]) -> RingLink:
    """Fits bandwidth and hop latency to measured seconds; relative errors of all sizes count the same."""
    sizes, seconds = np.array(list(by_bytes)), np.array(list(by_bytes.values()))
    hops = 2 * (num_ranks - 1)
    found = fit_terms({"latency_s": hops, "byte_s": hops / num_ranks * sizes}, seconds)
    ranges = dict(found.undetermined)
    if "byte_s" in ranges:
        low, high = (1 / max(byte_s, LEAST_BYTE_S) for byte_s in ranges.pop("byte_s"))
        ranges["bandwidth_bytes_per_s"] = high, low
    bandwidth = 1 / max(found.values["byte_s"], LEAST_BYTE_S)
    return RingLink(num_ranks, bandwidth, found.values["latency_s"], by_bytes, ranges)


def _rank(rank: int, num_ranks: int, device_type: str, folder: str) -> None:
    """Measures as one rank; rank 0 writes its medians to a file."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout = ParallelLayout(tensor_parallel_size=num_ranks)
    group = connect(rank, layout, 1, device, f"file://{folder}/meet").tensor
    found = {}
    for size in SIZES:
        x = torch.ones(size // 4, device=device)
        times_s = []
        for _ in range(REPEATS):
            begin_s = time.perf_counter()
            group.all_reduce(x)
            x.view(-1)[0].item()  # waits until the all-reduce has ended
            times_s.append(time.perf_counter() - begin_s)
            x.fill_(1.0)
        found[size] = float(np.median(times_s))
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(found))
    disconnect()
