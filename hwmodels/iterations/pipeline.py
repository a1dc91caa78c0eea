"""Exact simulation of a pipeline: the times at which each stage works on each micro-batch.

    stage 1  |0|1|2|3|0|1|2|3|        rounds of 4 micro-batches in 3 equal stages: the first of a round
    stage 2    |0|1|2|3|0|1|2|3|      may begin when that of the last round has left the last stage
    stage 3      |0|1|2|3|0|1|2|3|

From an empty pipeline to an empty one, (stages - 1) of (micro-batches + stages - 1) slots are bubbles in one
round (GPipe, Huang et al., NeurIPS 2019). In consecutive rounds the only bubbles are those of unequal stages,
or of fewer micro-batches than stages.

A stage takes batches in order; it is busy until it has sent its output. `enter` is what the simulator's
engine asks batch by batch, `play` what tests and timelines ask of a round, whose closed form is in
`hwmodels.iterations.stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.iterations.stages import Pass

Seconds = NDArray[np.float64]


class Round(NamedTuple):
    """Times of every stage and micro-batch of a round, shape [stages, micro-batches]."""

    start_s: Seconds
    end_s: Seconds
    """End of the stage's own work."""
    sent_s: Seconds
    """Time when the next stage has the output and this stage is free; on the last stage equal to end_s."""

    @property
    def busy_s(self) -> float:
        """Busy time of all stages together, sends included."""
        return float((self.sent_s - self.start_s).sum())


class Pipeline:
    """Pipeline stages with the time until which each is busy.

    waits_for_tokens=False: a micro-batch may enter before that of the last round has returned.
    """

    def __init__(self, num_stages: int, *, waits_for_tokens: bool = True) -> None:
        self._waits_for_tokens = waits_for_tokens
        self._free_s = [0.0] * num_stages
        self._back_s: list[float] = []  # ends of the last round's micro-batches
        self._host_free_s = 0.0  # end of the engine's work on the last batch

    def enter(self, batch: Pass, now: float, factor: float = 1.0) -> float:
        """Returns the time at which a batch that is planned now has its tokens; it follows those before it.

        factor: on all times of the batch.
        """
        begin_s = max(now, self._host_free_s)
        host_end_s = begin_s + factor * batch.host_s
        exposed_s = batch.exposed_s
        here_s = host_end_s if exposed_s is None else begin_s
        self._host_free_s = host_end_s
        send_s, free_s = factor * batch.send_s, self._free_s
        for stage, stage_s in enumerate(batch.stage_s):
            end_s = max(here_s, free_s[stage]) + factor * stage_s
            free_s[stage] = here_s = end_s + send_s
        free_s[-1] = end_s
        if exposed_s is None:
            return end_s
        self._host_free_s = host_end_s + factor * batch.launch_s
        return max(end_s, self._host_free_s) + factor * exposed_s

    def play(self, stage_s: ArrayLike, send_s: ArrayLike = 0.0, not_before_s: float = 0.0) -> Round:
        """Runs the next round. stage_s: [stages, micro-batches]; send_s: per micro-batch, or one for all.

        Micro-batch m enters when that of the last round has returned, and not before not_before_s.
        """
        work_s = np.asarray(stage_s, dtype=np.float64)
        num_stages, count = work_s.shape
        sends_s = np.broadcast_to(np.asarray(send_s, dtype=np.float64), count)
        start_s, end_s, sent_s = (np.empty((num_stages, count)) for _ in range(3))
        last = num_stages - 1
        for m in range(count):
            here_s = max(not_before_s, self._back_s[m] if m < len(self._back_s) else 0.0)
            for stage in range(num_stages):
                start_s[stage, m] = max(here_s, self._free_s[stage])
                end_s[stage, m] = start_s[stage, m] + work_s[stage, m]
                here_s = end_s[stage, m] + (0.0 if stage == last else sends_s[m])
                sent_s[stage, m] = self._free_s[stage] = here_s
        if self._waits_for_tokens:
            self._back_s = end_s[last].tolist()
        return Round(start_s, end_s, sent_s)


def bubble_share(rounds: Sequence[Round]) -> float:
    """Returns the share of all stages' time, from the first start to the last end, that they are idle."""
    num_stages = len(rounds[0].start_s)
    span_s = max(float(r.sent_s.max()) for r in rounds) - min(float(r.start_s.min()) for r in rounds)
    return 1 - sum(r.busy_s for r in rounds) / (num_stages * span_s)
