"""What Python does around a step, found by an engine whose executor does nothing."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from experiments.calibrate_engine.grids import BATCHES, upto
from policies.caching.pool import KvMemory
from policies.engine import EngineCore
from realengine.engine import Engine
from realengine.graphs import Drawn
from realengine.runner import Runner
from realengine.sampling_params import SamplingParams
from realengine.settings import EngineSettings
from realengine.work import Work

PROMPT = 64
STEPS = 40
LEAST_BATCH = 64
"""Up to which batch, at least: what a sequence takes shows in large ones."""
WARM_UP = 5


class HostTime(NamedTuple):
    """A step takes iteration_s + sequence_s * sequences. by_batch: what was measured."""

    iteration_s: float
    sequence_s: float
    by_batch: dict[int, float]


def measure_host(max_num_seqs: int, block_size: int) -> HostTime:
    """Thread time of steps in which all decode: plan, pack, read, commit."""
    largest = max(max_num_seqs, LEAST_BATCH)
    by_batch = {count: _step_s(count, block_size) for count in upto(BATCHES, largest)}
    counts, seconds = np.array(list(by_batch)), np.array(list(by_batch.values()))
    # Relative errors count: a large batch must not decide what a small one takes.
    columns = np.stack([np.ones(len(counts)), counts], axis=1) / seconds[:, None]
    (fixed_s, each_s), *_ = np.linalg.lstsq(columns, np.ones(len(counts)), rcond=None)
    return HostTime(max(float(fixed_s), 0.0), max(float(each_s), 0.0), by_batch)


def _step_s(num_seqs: int, block_size: int) -> float:
    """Median of one step."""
    num_tokens = PROMPT + STEPS + WARM_UP + 2
    settings = EngineSettings(device="cpu", max_num_seqs=num_seqs)
    core = EngineCore(
        batching=settings.batching,
        scheduling=settings.scheduling,
        pool=settings.caching.pool(
            KvMemory(num_seqs * (num_tokens // block_size + 2), bytes_per_token=1, max_model_len=num_tokens)
        ),
        max_num_seqs=num_seqs,
        max_model_len=num_tokens,
        names_blocks=True,
    )
    drawn_B = torch.zeros(1, num_seqs, dtype=torch.int64)

    def execute(work: Work) -> Drawn | None:
        return None if work.shape is None else Drawn(drawn_B[:, : work.shape.num_drawn])

    engine = Engine(core, Runner(core, execute), vocab_size=num_seqs + PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + WARM_UP, ignore_eos=True)
    for seq in range(num_seqs):
        engine.add([seq, *range(1, PROMPT)], params)
    found = []
    while engine.num_unfinished:
        begin_s = time.thread_time()
        engine.step()
        found.append(time.thread_time() - begin_s)
    return float(np.median(found[-STEPS:-1]))
