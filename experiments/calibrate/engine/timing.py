"""How long a call takes on the device: the median over inputs that the cache does not hold.

Long calls are timed one by one between events, the L2 cache flushed before each. Short ones are recorded in a
CUDA graph over several sets of inputs, whose replays are timed as a whole: so a launch from Python does not
count, as it does not in the engine's graphs. On a CPU, wall time: only for dry runs.
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
GRAPH_S = 2e-3  # of one replay, at least
MOST_IN_GRAPH = 400
MOST_SETS = 32
CACHES = 3  # the sets of inputs are together as large as that many L2 caches
L2_BYTES = 64 << 20  # where torch does not say


class Timing(NamedTuple):
    """Seconds a call: median, 20th and 80th percentile; method: graph, events or wall."""

    median_s: float
    low_s: float
    high_s: float
    method: str

    def row(self) -> dict[str, float | str]:
        """As parts of a row; spread: the percentiles' distance over the median."""
        spread = (self.high_s - self.low_s) / self.median_s
        return {"median_s": self.median_s, "spread": spread, "method": self.method}


def timed(calls: Sequence[Call], device: torch.device, *, rep_ms: float = 60.0) -> Timing:
    """The time of one of `calls`, which do the same on inputs of their own."""
    if device.type == "cpu":
        return _wall(calls[0])
    for call in calls:  # compiles, and chooses what libraries choose at first
        call()
    torch.cuda.synchronize()
    if _rough_s(calls) < SHORT_S:
        try:
            return _graph(calls, rep_ms / 1e3)
        except RuntimeError:  # something in it cannot be recorded
            torch.cuda.synchronize()
    each = [_events(call, rep_ms / len(calls)) for call in calls[: math.ceil(rep_ms / 10)]]
    median_s, low_s, high_s = (statistics.median(values) for values in zip(*each, strict=True))
    return Timing(median_s, low_s, high_s, "events")


def input_sets(make: Callable[[torch.device], Call], device: torch.device, bytes_moved: float) -> list[Call]:
    """Calls on sets of inputs that are together far larger than the L2 cache, as far as memory goes."""
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
    """Host seconds a call, `times` of them without waiting for the device: few enough for its queue."""
    call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        call()
    end = time.perf_counter()
    synchronize(device)
    return (end - begin) / times


def wall_s(call: Call, device: torch.device, times: int) -> float:
    """Median wall seconds of a call and the wait for its end."""
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
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded(call: Call) -> torch.cuda.CUDAGraph:
    """A CUDA graph of what `call` launches, warmed up beforehand. Raises RuntimeError if it cannot be one."""
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
    """Mean device seconds a call, launches included where they are what takes long."""
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
