"""Small reproducible runs of our engine for a scenario, on a clock of uneven steps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.validate.engine.drive import Drive, PromptTokens
from experiments.validate.engine.engine_run import Stopwatch, settings_of
from experiments.validate.engine.recording import Recorder, Recording
from hwmodels.hf.config import from_hf_fields
from hwmodels.host import HostOverhead
from policies.caching.prefix import PrefixCaching
from policies.core.request import Segment
from realengine.build import assemble
from realengine.model.architecture import Architecture
from realengine.runner.rank import build_executor
from realengine.serving.model import Model
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario
from sim.workload.base import Source, WorkloadNotes
from sim.workload.chunks import TableSource
from tests.realengine.small_models import LLAMA

CPU = torch.device("cpu")


class UnevenClock:
    """A clock that advances by 20 to 180 microseconds with every reading, from an arbitrary start."""

    def __init__(self, seed: int = 0, begin_s: float = 1000.0) -> None:
        self._random = np.random.Generator(np.random.Philox(key=seed))
        self._now_s = begin_s

    def now(self) -> float:
        self._now_s += float(self._random.uniform(20e-6, 180e-6))
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds


@cache
def _base() -> Scenario:
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_scenario(source.compose(["model=random_8m", "model.dtype=fp32", "latency=spec"]))


def scenario_of(
    *,
    num_kv_blocks: int = 200,
    overlap: bool = False,
    host_s: float = 0.0,
    frontend_s: float = 0.0,
    **changes: Any,
) -> Scenario:
    """Returns a scenario with 8 slots and contexts of 128 tokens.

    changes: policies, or any other field of a scenario.
    """
    host = HostOverhead(
        iteration_s=host_s, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0, overlapped=overlap
    )
    engine = replace(
        _base().engine,
        max_num_seqs=8,
        max_model_len=128,
        num_kv_blocks=num_kv_blocks,
        host=host,
        frontend_s=frontend_s,
    )
    model = from_hf_fields(name="tiny", source="windtunnel/tiny", dtype="fp32", config=LLAMA)
    settled = {"model": model, "engine": engine, "caching": PrefixCaching()} | deepcopy(changes)
    return replace(_base(), **settled)


def traffic(
    num: int = 24, *, seed: int = 0, gap_s: float = 1e-3, priorities: Sequence[int] = (0,), **changes: Any
) -> TableSource:
    """Draws prompts of 17 to 46 tokens, half of them with one beginning, and answers of 1 to 24 tokens."""
    random = np.random.Generator(np.random.Philox(key=seed))
    return TableSource(
        **{
            "arrival_s": np.cumsum(random.exponential(gap_s, num)),
            "prompt_tokens": random.integers(17, 47, num),
            "output_tokens": random.integers(1, 25, num),
            "priorities": random.choice(priorities, num),
            "notes": WorkloadNotes(),
            "max_tokens": "exact",
            "segments": lambda row, tokens: (Segment(row % 2, 16), Segment(10 + row, tokens - 16)),
        }
        | changes
    )


def run_engine(
    scenario: Scenario,
    source: Source,
    *,
    max_iterations: int = 1,
    clock: UnevenClock | None = None,
    config: dict[str, Any] | None = None,
) -> Recording:
    """Runs the scenario's engine and returns its recording, with executor times unless steps overlap."""
    model = Model.of(Architecture.from_hf(LLAMA))
    settings = replace(settings_of(scenario, CPU, config), max_iterations=max_iterations)
    clock = clock or UnevenClock()
    executor, memory = build_executor(model, settings, CPU)
    stopwatch = Stopwatch(executor.run, clock)
    engine = assemble(model, settings, executor, memory, stopwatch.execute, clock)
    recorder = Recorder(engine.core) if settings.overlap else Recorder(engine.core, stopwatch.take)
    engine.observer = recorder
    start_s = Drive(engine, source, PromptTokens(model.architecture.vocab_size)).run()
    about = {
        "start_s": start_s,
        "num_kv_blocks": engine.core.block_pool.num_blocks,
        "block_size": engine.core.block_pool.block_size,
    }
    return recorder.recording(about)
