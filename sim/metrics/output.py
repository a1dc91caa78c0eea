"""Output of a run in its measured time: requests, tokens, and the iterations that they took."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import per, times
from sim.metrics.figure import EndedRun, Figure, Part
from sim.metrics.sums import weighted_sum
from sim.metrics.utilisation import batch_tokens
from sim.records.table import AnyTable, column


class Output(NamedTuple):
    """Output of the run inside the window."""

    requests: int
    output_tokens: int
    input_tokens: int
    """A whole prompt counts at the time of its first output token, however much was cached or recomputed."""


class OutputFigure(Figure):
    """Requests that finished in the window, and tokens that came there, per second.

    Output tokens are first tokens, ends of gaps, and kept draft tokens. output_tokens_per_s_and_gpu: over the
    GPU-seconds that were rented.
    """

    name = "throughput"

    def add(self, part: Part) -> None:
        requests, window = part.requests, part.window
        first_inside = window.holds(times(requests, "first_token_s"))
        finished_inside = window.holds(times(requests, "finished_s")) & (
            column(requests, "status") == "finished"
        )
        self.inside.add("requests", finished_inside)
        self.inside.add("output_tokens", first_tokens(requests, first_inside))
        self.inside.add("output_tokens", part.gaps_inside)
        if "kept_tokens" in part.iterations:
            self.inside.add("output_tokens", column(part.iterations, "kept_tokens")[part.ends_inside])
        self.inside.add("input_tokens", column(requests, "prompt_tokens")[first_inside])

    @property
    def output(self) -> Output:
        """Returns the numbers of requests and of tokens."""
        return Output(*(int(self.inside[name]) for name in Output._fields))

    def value(self, run: EndedRun) -> dict[str, float]:
        output, seconds = self.output, run.window.duration_s
        gpu_s = weighted_sum([pool.num_devices for pool in run.setting.pools], run.replica_s)
        return {
            "requests_per_s": per(output.requests, seconds),
            "requests_per_minute": per(60 * output.requests, seconds),
            "output_tokens_per_s": per(output.output_tokens, seconds),
            "output_tokens_per_s_and_gpu": per(output.output_tokens, gpu_s),
            "input_tokens_per_s": per(output.input_tokens, seconds),
        }


def first_tokens(requests: AnyTable, rows: NDArray[np.bool_]) -> NDArray[Any]:
    """Returns the first tokens of the selected requests: one per sample."""
    return column(requests, "samples")[rows] if "samples" in requests else rows


class IterationCounts(Figure):
    """Iterations in the window: number, mean duration, batch; and tokens discarded in the whole run."""

    name = "iterations"

    def add(self, part: Part) -> None:
        iterations, inside = part.iterations, part.inside_s > 0
        seqs = (column(iterations, "decode_seqs") + column(iterations, "prefill_seqs"))[inside]
        self.inside.add("count", inside)
        self.inside.add("duration_s", times(iterations, "duration_s")[inside])
        self.inside.add("seqs", seqs)
        self.inside.raise_to("seqs", seqs)
        self.inside.add("tokens", batch_tokens(iterations)[inside])
        self.inside.add("preempted", column(iterations, "preempted")[inside])

    @property
    def preemptions(self) -> float:
        """Number of sequences that were preempted by the plans of these iterations."""
        return self.inside["preempted"]

    def value(self, run: EndedRun) -> dict[str, float]:
        count = self.inside["count"]
        return {
            "count": count,
            "mean_s": per(self.inside["duration_s"], count),
            "mean_batch_seqs": per(self.inside["seqs"], count),
            "max_batch_seqs": self.inside.largest("seqs"),
            "mean_batch_tokens": per(self.inside["tokens"], count),
            "discarded_tokens": run.records.num_discarded_tokens,
        }
