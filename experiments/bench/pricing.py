"""CPU time of the hardware model: `python -m experiments.bench.pricing [setting=choice ...]`.

Prints the time to compute one iteration time alone, and per iteration when 1,000 are computed as arrays or as
a leap, for the model, hardware and engine of `windtunnel simulate` with these settings. The fastest of many
repetitions counts, because other programs on the machine slow single repetitions down. The iterations are the
same in every run of the program.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.speculation import decodes_with_drafts
from sim.settings.scenario import build_scenario

NUM_ITERATIONS = 1000


def main(arguments: Sequence[str] | None = None, repeat: int = 40) -> None:
    """Prints one line per kind of iteration."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(given)
    scenario = build_scenario(cfg)
    model = scenario.iteration_model()
    print(f"{scenario.model.name} on {scenario.layout.num_devices} x {scenario.hardware.name}")
    single = {
        "32 decodes": IterationShape(32, 32 * 1000, 0, 0, 0, 0, 32),
        "a chunk of 512 tokens": IterationShape(0, 0, 1, 512, causal_pairs(512), 512, 1),
        "32 decodes and a chunk": IterationShape(32, 32 * 1000, 1, 480, causal_pairs(480), 480, 33),
        "32 decodes with 4 draft tokens each": decodes_with_drafts(32, 32 * 1000, 4),
    }
    for name, shape in single.items():
        seconds = _fastest_s(partial(model.seconds, shape), repeat, 500)
        print(f"  {1e6 * seconds:8.2f} us                {name}")
    many: dict[str, Callable[[], object]] = {
        "iterations of 1 to 255 decodes": partial(model.seconds, _decodes()),
        "iterations of 1 to 255 decodes with a chunk": partial(model.seconds, _with_chunks(_decodes())),
        "a leap of 32 decodes": partial(model.decode_ends, 0.0, 32, 32 * 1000, NUM_ITERATIONS),
        "a leap of 32 decodes with 4 draft tokens each": partial(model.seconds, _leap_of_passes()),
    }
    for name, price in many.items():
        seconds = _fastest_s(price, repeat, 20) / NUM_ITERATIONS
        print(f"  {1e9 * seconds:8.1f} ns/iteration      {NUM_ITERATIONS:,} at once: {name}")


def _decodes() -> IterationShape:
    rng = np.random.default_rng(0)
    num_seqs = rng.integers(1, 256, NUM_ITERATIONS)
    context = num_seqs * rng.integers(100, 2000, NUM_ITERATIONS)
    zeros = np.zeros(NUM_ITERATIONS, dtype=np.int64)
    return IterationShape(num_seqs, context, zeros, zeros, zeros, zeros, num_seqs)


def _leap_of_passes() -> IterationShape:
    first = decodes_with_drafts(32, 32 * 1000, 4)
    assert first.drafts is not None
    context = first.decode_context_tokens + 3 * 32 * np.arange(NUM_ITERATIONS)
    pairs = 4 * context + 10 * 32
    return first._replace(decode_context_tokens=context, drafts=first.drafts._replace(pairs=pairs))


def _with_chunks(decodes: IterationShape) -> IterationShape:
    tokens = np.random.default_rng(1).integers(1, 2048, NUM_ITERATIONS)
    return decodes._replace(
        prefill_seqs=np.ones(NUM_ITERATIONS, dtype=np.int64),
        prefill_tokens=tokens,
        prefill_pairs=tokens * (tokens + 1) // 2,
        prefill_context_tokens=tokens,
        sampled_seqs=decodes.decode_seqs + 1,
    )


def _fastest_s(call: Callable[[], object], repeat: int, number: int) -> float:
    """Returns the fastest time of one call in seconds; the first call, which fills tables, is not timed."""
    call()
    fastest = float("inf")
    for _ in range(repeat):
        start_s = time.perf_counter()
        for _ in range(number):
            call()
        fastest = min(fastest, (time.perf_counter() - start_s) / number)
    return fastest


if __name__ == "__main__":
    main()
