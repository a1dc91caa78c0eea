"""Computes the device's idle time from the intervals that a profiler recorded."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Idle(NamedTuple):
    """Seconds per step.

    gap_s: median of the num_steps - 1 largest gaps, as many as lie between steps; a gap inside a step counts
    only if it is larger than one between steps. busy_s: at least one kernel ran. idle_s: none did.
    """

    gap_s: float
    busy_s: float
    idle_s: float


def idle_between_steps(step: Callable[[], object], num_steps: int, device: torch.device) -> Idle | None:
    """Profiles `num_steps` steps; returns None if the profiler recorded nothing."""
    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiler:
        for _ in range(num_steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    seen = [
        (event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or ()
        if device.type == "cpu" or event.device_type.name == "CUDA"
    ]
    return idle_of(seen, num_steps) if seen else None


def idle_of(seen: Iterable[tuple[float, float]], num_steps: int) -> Idle:
    """Computes the idle time from the (begin, end) intervals of everything that ran, which may overlap."""
    ordered = sorted(seen)
    gaps, busy = [], 0.0
    first, end = ordered[0]
    for begin, until in ordered[1:]:
        if begin > end:
            gaps.append(begin - end)
            busy += end - first
            first = begin
        end = max(end, until)
    busy += end - first
    largest = sorted(gaps, reverse=True)[: max(num_steps - 1, 1)]
    return Idle(statistics.median(largest or [0.0]), busy / num_steps, sum(gaps) / num_steps)
