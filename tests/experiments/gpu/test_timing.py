"""Short calls are timed in a graph of many."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

pytest.importorskip("triton")

import torch

from experiments.calibrate.engine.timing import timed


class Clock:
    """Replaces the device: work takes the time that it states, at once."""

    now_s = 0.0

    def __init__(self, **_options):
        self.at_s = 0.0

    def record(self):
        self.at_s = Clock.now_s

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)


class Recorded:
    """Replaces a CUDA graph: replays the calls that were recorded."""

    def __init__(self):
        self.taken_s = 0.0

    @contextmanager
    def recording(self):
        begin = Clock.now_s
        yield
        self.taken_s = Clock.now_s - begin
        Clock.now_s = begin

    def replay(self):
        Clock.now_s += self.taken_s


def test_short_calls_are_timed_in_a_graph_of_many(monkeypatch):
    """Two sets of inputs, 10 and 30 us: 20 us a call."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "synchronize": lambda *device: None,
        "Event": Clock,
        "CUDAGraph": Recorded,
        "graph": lambda graph: graph.recording(),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda side: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def call(seconds):
        Clock.now_s += seconds

    found = timed([lambda: call(10e-6), lambda: call(30e-6)], torch.device("cuda"))
    assert found.method == "graph"
    assert found.median_s == pytest.approx(20e-6)
    assert found.low_s == pytest.approx(found.high_s)
