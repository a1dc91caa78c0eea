"""Times of calls on a device: the median over inputs that are not in the cache.

Long calls are timed one by one between CUDA events, with the L2 cache flushed before each. Short calls on
several sets of inputs are recorded in one CUDA graph, and its replays are timed as a whole. Launches from
Python then do not count, as in the engine's graphs. On a CPU, wall time is measured, for dry runs only.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from triton.testing import do_bench

Call = Callable[[], object]

SHORT_S = 300e-6
LAUNCHED_S = 1e-3  # longer than a few launches from Python take on a slow host
GRAPH_S = 2e-3  # least time of one replay
MOST_IN_GRAPH = 400
MOST_SETS = 32
CACHES = 3  # total size of the sets of inputs, in L2 caches
L2_BYTES = 64 << 20  # size of the L2 cache if torch does not report it


class Timing(NamedTuple):
    """Seconds per call: median, 20th and 80th percentile; method: graph, events or wall."""

    median_s: float
    low_s: float
    high_s: float
    method: str

    def row(self) -> dict[str, float | str]:
        """Returns columns of a row; spread: (80th - 20th percentile) / median."""
        spread = (self.high_s - self.low_s) / self.median_s
        return {"median_s": self.median_s, "spread": spread, "method": self.method}


def timed(calls: Sequence[Call], device: torch.device, *, rep_ms: float = 60.0) -> Timing:
    """Measures the time of one of `calls`, which do the same on different inputs."""
    if device.type == "cpu":
        return _wall(calls[0])
    for call in calls:  # compiles kernels and lets libraries choose theirs
        call()
    torch.cuda.synchronize()
    if _rough_s(calls) < LAUNCHED_S:  # if short, this may be the time of the launches
        try:
            found = _graph(calls, rep_ms / 1e3)
        except RuntimeError:  # a call cannot be recorded in a graph
            torch.cuda.synchronize()
        else:
            if found.median_s < SHORT_S:
                return found
    each = [_events(call, rep_ms / len(calls)) for call in calls[: math.ceil(rep_ms / 10)]]
    median_s, low_s, high_s = (statistics.median(values) for values in zip(*each, strict=True))
    return Timing(median_s, low_s, high_s, "events")


def input_sets(make: Callable[[torch.device], Call], device: torch.device, bytes_moved: float) -> list[Call]:
    """Makes calls on sets of inputs that are together larger than the L2 cache, if memory allows."""
    if device.type == "cpu":
        return [make(device)]
    before = torch.cuda.memory_allocated()
    calls = [make(device)]
    set_bytes = max(torch.cuda.memory_allocated() - before, 1)
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES
    wanted = math.ceil(CACHES * cache / max(bytes_moved, 1.0))
    room = torch.cuda.mem_get_info()[0] // 4 // set_bytes
    calls += [make(device) for _ in range(min(wanted, MOST_SETS, room) - 1)]
    return calls


def host_s(call: Call, device: torch.device, times: int) -> float:
    """Measures the host seconds per call over `times` calls, which must fit in the device's queue."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    end = time.perf_counter()
    synchronize(device)
    return (end - begin) / times


def wall_s(call: Call, device: torch.device, times: int) -> float:
    """Measures the median wall seconds of a call until the device has finished it."""
    call()
    synchronize(device)
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded(call: Call) -> torch.cuda.CUDAGraph:
    """Records the launches of `call` in a CUDA graph after a warm-up. Raises RuntimeError if it cannot."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def _wall(call: Call) -> Timing:
    found = []
    for _ in range(2):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return Timing(statistics.median(found), min(found), max(found), "wall")


def _rough_s(calls: Sequence[Call]) -> float:
    """Measures roughly the mean device seconds per call; launches count if they take longer."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rounds = max(1, 8 // len(calls))
    start.record()
    for _ in range(rounds):
        for call in calls:
            call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / (rounds * len(calls))


def _events(call: Call, rep_ms: float) -> tuple[float, float, float]:
    median, low, high = do_bench(call, warmup=10, rep=max(rep_ms, 5.0), quantiles=[0.5, 0.2, 0.8])
    return median / 1e3, low / 1e3, high / 1e3


def _graph(calls: Sequence[Call], rep_s: float) -> Timing:
    rough = _rough_s(calls)
    rounds = max(1, min(math.ceil(GRAPH_S / rough / len(calls)), MOST_IN_GRAPH // len(calls)))

    def all_of_them() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    graph = recorded(all_of_them)
    number = rounds * len(calls)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    replays = max(5, min(100, math.ceil(rep_s / (rough * number))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    each = sorted(before.elapsed_time(after) / 1e3 / number for before, after in itertools.pairwise(marks))
    return Timing(
        statistics.median(each), each[len(each) // 5], each[min(len(each) - 1, 4 * len(each) // 5)], "graph"
    )
