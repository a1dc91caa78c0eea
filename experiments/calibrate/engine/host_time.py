"""Host time of a step: the time that the engine's Python code takes, without its executor.

On a CPU the executor runs the measured model between the steps. It evicts the engine's code from the CPU
caches, so that a step takes about three times as long as with an executor that does nothing (300 us against
116 us, for one sequence and a model of 8 M parameters). On a GPU the device does that work, and the executor
here does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from experiments.calibrate.engine.grids import BATCHES, upto
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import REFERENCE
from hwmodels.fitting.robust import fit_terms
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from realengine.engine import Engine
from realengine.runner.graphs import Drawn
from realengine.runner.runner import Runner
from realengine.runner.work import Padding, Work
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings

PROMPT = 16
STEPS = 30
LEAST_BATCH = 64
"""Smallest largest batch size if the executor does nothing: the time per sequence shows in large batches."""
WARM_UP = 5


class HostTime(NamedTuple):
    """Host time of a step: iteration_s + sequence_s * sequences.

    by_batch: batch size -> measured seconds. undetermined: ranges of figures that the batches do not
    determine.
    """

    iteration_s: float
    sequence_s: float
    by_batch: dict[int, float]
    undetermined: Mapping[str, tuple[float, float]] = MappingProxyType({})


def measure_host(
    max_num_seqs: int, block_size: int, served: Served | None = None, usual_s: float | None = None
) -> HostTime:
    """Measures the thread time of decode steps (plan, pack, read, commit) and fits it by batch size.

    served: its executor runs between the steps, which changes its block tables; None: no executor runs.
    usual_s: usual time of the reference step, which then runs before each step, so that the times are
    corrected by the machine's pace; None: they are not corrected.
    """
    largest = max_num_seqs if served is not None else max(max_num_seqs, LEAST_BATCH)
    by_batch = {count: _step_s(count, block_size, served, usual_s) for count in upto(BATCHES, largest)}
    return host_of(by_batch)


def host_of(by_batch: dict[int, float]) -> HostTime:
    """Fits the host time to the measured seconds of steps by batch size."""
    found = fit_terms({"iteration_s": 1.0, "sequence_s": list(by_batch)}, list(by_batch.values()))
    return HostTime(**found.values, by_batch=by_batch, undetermined=found.undetermined)


class HostClock:
    """Measures the thread time of an engine's steps without the time of its executor.

    served: its reference step runs before each step if usual_s, the usual time of that step, is known; then
    the machine's pace is, too.
    """

    def __init__(self, served: Served | None, usual_s: float | None) -> None:
        self._served, self._usual_s = served, usual_s
        self._executed_s = 0.0
        self._paces: list[float] = []

    def around(self, execute: Callable[[Work], Drawn | None]) -> Callable[[Work], Drawn | None]:
        """Returns an executor, the time of which does not count."""

        def executed(work: Work) -> Drawn | None:
            begin_s = time.thread_time()
            drawn = execute(work)
            self._executed_s += time.thread_time() - begin_s
            return drawn

        return executed

    def step_s(self, engine: Engine) -> float:
        """Runs a step of an engine; returns its seconds."""
        if self._served is not None and self._usual_s is not None:
            begin_s = time.thread_time()
            self._served.plain.run(self._served.work(REFERENCE))
            self._paces.append((time.thread_time() - begin_s) / self._usual_s)
        begin_s, self._executed_s = time.thread_time(), 0.0
        engine.step()
        return time.thread_time() - begin_s - self._executed_s

    def pace(self, latest: slice) -> float:
        """Returns the median pace of some of the steps; 1 if it is not known."""
        return float(np.median(self._paces[latest])) if self._paces else 1.0


def core_settings(
    num_seqs: int, tokens_each: int, block_size: int, padding: Padding | None = None
) -> dict[str, Any]:
    """Returns the settings of a core for sequences of this length; padding: that of an executor."""
    blocks_each = tokens_each // block_size + 2
    padding = padding or Padding(num_seqs, blocks_each)
    max_model_len = padding.max_blocks * block_size
    settings = EngineSettings(device="cpu", max_num_seqs=padding.slot)
    return {
        "batching": settings.batching,
        "scheduling": settings.scheduling,
        "block_pool": settings.caching.pool(
            KvMemory(num_seqs * blocks_each, bytes_per_token=1, max_model_len=max_model_len)
        ),
        "max_num_seqs": padding.slot,
        "max_model_len": max_model_len,
        "names_blocks": True,
    }


def _step_s(num_seqs: int, block_size: int, served: Served | None, usual_s: float | None) -> float:
    """Returns the median host time of one step, in seconds."""
    padding = None if served is None else served.padding
    core = EngineCore(**core_settings(num_seqs, PROMPT + STEPS + WARM_UP, block_size, padding))
    drawn_B = torch.zeros(1, num_seqs, dtype=torch.int64)

    def execute(work: Work) -> Drawn | None:
        if served is not None:
            return served.plain.run(work)
        return None if work.shape is None else Drawn(drawn_B[:, : work.shape.num_drawn])

    clock = HostClock(served, usual_s)
    engine = Engine(core, Runner(core, clock.around(execute)), vocab_size=num_seqs + PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + WARM_UP, ignore_eos=True)
    for seq in range(num_seqs):
        engine.add([seq, *range(1, PROMPT)], params)
    found = []
    while engine.num_unfinished:
        found.append(clock.step_s(engine))
    latest = slice(-STEPS, -1)
    return float(np.median(found[latest]) / clock.pace(latest))
