"""A pipeline played through exactly: when each stage works on each micro-batch, and when it stands still.

    stage 1  |0|1|2|3|0|1|2|3|        rounds of 4 micro-batches in 3 equal stages: the first of a round
    stage 2    |0|1|2|3|0|1|2|3|      may begin when that of the last round has left the last stage
    stage 3      |0|1|2|3|0|1|2|3|

From an empty pipeline to an empty one, (stages - 1) of (micro-batches + stages - 1) places are bubbles in one
round (GPipe, Huang et al., NeurIPS 2019); round after round only what unequal stages, or fewer micro-batches
than stages, leave.

A stage takes micro-batches in order; it is busy until it has sent on what it made.
`hwmodels.iterations.stages` prices a round by a closed form; this is what it is held against, and what
timelines draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]


class Round(NamedTuple):
    """Of every stage and micro-batch, [stages, micro-batches]."""

    start_s: Seconds
    end_s: Seconds
    """Of the stage's own work."""
    sent_s: Seconds
    """The next stage has it, and this one is free; on the last stage: as end_s."""

    @property
    def busy_s(self) -> float:
        """Of all stages together, sends included."""
        return float((self.sent_s - self.start_s).sum())


class Pipeline:
    """Stages that remember until when they are busy."""

    def __init__(self, num_stages: int, *, waits_for_tokens: bool = True) -> None:
        """waits_for_tokens=False: a micro-batch may enter before that of the last round is back."""
        self._waits_for_tokens = waits_for_tokens
        self._free_s = [0.0] * num_stages
        self._back_s: list[float] = []  # when each micro-batch of the last round left the last stage

    def play(self, stage_s: ArrayLike, send_s: ArrayLike = 0.0, not_before_s: float = 0.0) -> Round:
        """The next round. stage_s: [stages, micro-batches]; send_s: of each micro-batch, or of all.

        Micro-batch m enters when that of the last round is back, and not before not_before_s.
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
    """Of all stages' time from the first start to the last end, what they stand still."""
    num_stages = len(rounds[0].start_s)
    span_s = max(float(r.sent_s.max()) for r in rounds) - min(float(r.start_s.min()) for r in rounds)
    return 1 - sum(r.busy_s for r in rounds) / (num_stages * span_s)
