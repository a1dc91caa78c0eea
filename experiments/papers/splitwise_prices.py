"""Iteration times of BLOOM-176B on TP8, measured by Splitwise's authors and priced by their simulator.

Medians of `perf_model.csv` of SplitwiseSim (github.com/Mutinifni/splitwise-sim, MIT), measured on vLLM of
2023: prompts by their total tokens, decodes by the sequences in the batch (prompts of 512 tokens, 128 output
tokens). Between the points they are interpolated linearly, beyond the last point extrapolated linearly.

SplitwiseSim looks decodes up by another number: its table is indexed by the batch's *prompt* tokens, 512 per
sequence, but it looks up the batch's *decoded* tokens, one per sequence. A batch of 64 is thus priced like a
single sequence (48 ms on an A100, measured 97 ms). `AS_SIMULATED` does the same, `AS_TIMED` uses the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Any

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations import IterationModel, IterationShape
from hwmodels.levels import Calibrated, Replica

MIXED = 1.1
"""Time of an iteration with decodes beside prompts, relative to prompts alone, in SplitwiseSim."""
PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Iteration times of a machine, in milliseconds."""

    prompts: tuple[float, ...]
    """At PROMPT_TOKENS."""
    decodes: tuple[float, ...]
    """At BATCHES."""


TIMES = {
    "A100 80GB SXM": Times(
        prompts=(79.7, 99.2, 173.9, 287.5, 536.1, 1332.6, 3591.5, 5782.0, 11251.8),
        decodes=(48.8, 50.0, 51.0, 53.0, 57.3, 65.4, 96.6),
    ),
    "H100 SXM": Times(
        prompts=(48.3, 51.2, 76.0, 132.2, 252.0, 649.6, 1411.5, 2521.9, 4996.5),
        decodes=(36.1, 36.9, 38.1, 38.1, 40.6, 45.8, 63.8),
    ),
}


class TimedModel:
    """An `IterationModel` with these times; all other quantities come from the roofline."""

    def __init__(self, times: Times, base: IterationModel, *, by_batch: bool) -> None:
        self._times, self._base, self._by_batch = times, base, by_batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def seconds(self, shape: IterationShape) -> Num:
        """Returns the iteration's time in seconds."""
        decodes, prompts = np.asarray(shape.decode_seqs), np.asarray(shape.prefill_tokens)
        decode_ms = _line(decodes, BATCHES, self._times.decodes) if self._by_batch else self._times.decodes[0]
        prompt_ms = _line(prompts + decodes, PROMPT_TOKENS, self._times.prompts)
        mixed_ms = np.where(decodes > 0, MIXED * prompt_ms, prompt_ms)
        milliseconds = np.where(prompts > 0, mixed_ms, decode_ms) + 0.0 * np.asarray(
            shape.decode_context_tokens
        )
        return milliseconds / 1e3

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations, which do not depend on the context."""
        shape = IterationShape(num_seqs, num_context_tokens, 0, 0, 0, 0, num_seqs)
        return list(accumulate(repeat(float(self.seconds(shape)), num_iterations), initial=start_s))[1:]


def _line(at: Any, points: tuple[int, ...], values: tuple[float, ...]) -> Any:
    """Interpolates linearly; extrapolates beyond the last point, and is constant below the first."""
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return np.interp(at, points, values) + slope * np.maximum(at - points[-1], 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Latency level of these times."""

    by_batch: bool

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the times of the replica's device. Raises ValueError for a device that was not measured."""
        times = TIMES.get(replica.device.name)
        if times is None:
            raise ValueError(f"hardware={replica.device.name}: must be one of {', '.join(TIMES)}")
        return TimedModel(times, Calibrated().iteration_model(replica), by_batch=self.by_batch)

    def basis(self, replica: Replica) -> str:
        return "Iteration times: measured by Splitwise's authors, BLOOM-176B on eight GPUs."


AS_TIMED = Timed(by_batch=True)
AS_SIMULATED = Timed(by_batch=False)
