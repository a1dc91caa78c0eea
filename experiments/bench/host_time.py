"""Measures the host time of a decode step of the engine: `python -m experiments.bench.host_time`.

It is the CPU time of planning, packing, reading and committing a step, in us; the device does nothing.
Prompts have different lengths, so that each step takes some new KV blocks. As on a GPU, a step is planned
before the tokens of the last one are read.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from statistics import fmean, median, quantiles
from typing import Any

import torch

from policies.caching.pool import KvMemory
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from realengine.engine import Engine
from realengine.runner.graphs import Drawn, Logprobs
from realengine.runner.runner import Runner
from realengine.runner.work import Work
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import EngineSettings

VOCAB = 32_000
PROMPT, BLOCK_SIZE, WARM_UP = 64, 16, 40
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0.0, "logprobs": 1},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the host times of each number of rows and way to draw that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m experiments.bench.host_time", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256], help="decoding sequences")
    parser.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS), help="ways to draw")
    parser.add_argument("--steps", type=int, default=320, help="measured steps")
    parser.add_argument("--no-overlap", action="store_true", help="reads each step before the next plan")
    options = parser.parse_args(arguments)
    print("rows  way         mean us  median us  p90 us")
    for num_rows in options.rows:
        for way in options.ways:
            params = SamplingParams(max_tokens=WARM_UP + options.steps, ignore_eos=True, **WAYS[way])
            found = [1e6 * s for s in step_times(num_rows, params, overlap=not options.no_overlap)]
            p90 = quantiles(found, n=10)[-1]
            print(f"{num_rows:4}  {way:10} {fmean(found):8.1f} {median(found):10.1f} {p90:7.1f}")


def step_times(num_rows: int, params: SamplingParams, *, overlap: bool) -> list[float]:
    """Returns the thread time of each decode step of sequences that decode together, in seconds."""
    assert params.max_tokens is not None
    max_model_len = PROMPT + params.max_tokens + BLOCK_SIZE
    settings = EngineSettings(device="cpu", max_num_seqs=num_rows)
    num_blocks = num_rows * (max_model_len // BLOCK_SIZE + 1)
    memory = KvMemory(num_blocks, bytes_per_token=1, max_model_len=max_model_len)
    core = EngineCore(
        ends=Ends.one_step_late if overlap else Ends.at_once,
        batching=settings.batching,
        scheduling=settings.scheduling,
        block_pool=settings.caching.pool(memory),
        max_num_seqs=num_rows,
        max_model_len=max_model_len,
        names_blocks=True,
    )
    tokens_IB = torch.zeros(1, num_rows, dtype=torch.int64)
    num_top = params.logprobs or 0
    of_rows = Logprobs(
        torch.zeros(num_rows),
        torch.zeros(num_rows, num_top),
        torch.arange(num_top).expand(num_rows, -1),
    )

    def execute(work: Work) -> Drawn | None:
        if work.shape is None:
            return None
        num = work.shape.num_drawn
        logprobs = None
        if work.shape.num_logprobs >= 0:
            logprobs = Logprobs(*(part[:num] for part in of_rows))
        return Drawn(tokens_IB[:, :num], logprobs)

    engine = Engine(core, Runner(core, execute), vocab_size=VOCAB, overlap=overlap)
    for row in range(num_rows):
        engine.add([row, *range(1, PROMPT - row % BLOCK_SIZE)], params)
    found = []
    gc.disable()  # a collection of this process's modules is no part of a step
    try:
        while engine.num_unfinished:
            begin_s = time.thread_time()
            engine.step()
            found.append(time.thread_time() - begin_s)
    finally:
        gc.enable()
    return found[WARM_UP:-5]


if __name__ == "__main__":
    main()
