"""Stages of a pipeline, and the times of batches on them: of one, of a round, and of all, played exactly.

A batch passes all stages, one after the other: its own time is the sum over them and over the sends between
them. Another batch may follow it as soon as the first stage is free, so a full pipeline takes the time of the
slowest stage per batch. Batches are those that the scheduler makes: nothing else is cut, so a lone prompt
overlaps with nothing, and m batches from an empty pipeline of p equal stages gain m p / (m + p - 1) at most.

    Pass      one batch: for several batches in flight (`sim.engine.iteration_times`)
    Stages    a round of batches that repeats: max(one batch on all stages, all batches on the slowest stage)

The second is for estimates of a steady state, and for what does not have batches in flight (drafts):
sequences are divided over micro-batches, as many as there are stages, chunks of prompts are whole.
`Pipeline` plays both exactly, and a test compares them. A stage's time is that of its
layers, average ones, of the embedding on the first stage, of the LM head, sampling and drafts on the last,
and of sending its output. 8 stages of Llama-3.1-8B: 4 layers of 218 M weights each, and on the last stage an
LM head of 525 M, for which all others wait.

Not modelled: in a round, micro-batches of different sizes delay each other (played exactly, a loaded run
takes 2 % longer in 2 stages, 0.7 % in 4 stages).

Played exactly, each stage works on each micro-batch at these times:

    stage 1  |0|1|2|3|0|1|2|3|        rounds of 4 micro-batches in 3 equal stages: the first of a round
    stage 2    |0|1|2|3|0|1|2|3|      may begin when that of the last round has left the last stage
    stage 3      |0|1|2|3|0|1|2|3|

From an empty pipeline to an empty one, (stages - 1) of (micro-batches + stages - 1) slots are bubbles in one
round (GPipe, Huang et al., NeurIPS 2019). In consecutive rounds the only bubbles are those of unequal stages,
or of fewer micro-batches than stages.

A stage takes batches in order; it is busy until it has sent its output. `enter` is what the simulator's
engine asks batch by batch, `play` what tests and timelines ask of a round, whose closed form is `Stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.exact import larger
from hwmodels.iterations.layout import InFlight, ParallelLayout, Part

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


class MicroBatch(NamedTuple):
    """Seconds of a micro-batch on all stages together, and of its parts that not every stage has."""

    all_s: Any
    first_s: Any
    between_s: Any
    last_s: Any

    @property
    def layers_s(self) -> Any:
        return self.all_s - self.first_s - self.between_s - self.last_s


class Pass(NamedTuple):
    """One batch on its way through the stages, in seconds."""

    host_s: float
    """Work of the engine's process before the batch enters the first stage: one batch after the other."""
    stage_s: list[float]
    """Time of each stage, kernels or their launches, whichever takes longer."""
    send_s: float
    """Time of the send to the next stage; both are busy with it."""
    launch_s: float
    """Time in which all stages launch their kernels."""
    exposed_s: float | None
    """None: the first stage waits for the engine's process. Else both work at once (asynchronous scheduling),
    and the tokens are there so long after the later of the two."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's share of the layers, of the operators before and after them, and of the sends."""

    layers: float
    first: int
    between: float
    last: int

    def seconds(self, batch: MicroBatch) -> Any:
        """Returns the seconds of one micro-batch on this stage."""
        return (
            self.layers * batch.layers_s
            + self.first * batch.first_s
            + self.between * batch.between_s
            + self.last * batch.last_s
        )

    def share(self, part: Part) -> float:
        """Returns the share of an operator of that part that runs on this stage."""
        return {
            Part.first: self.first,
            Part.layers: self.layers,
            Part.between: self.between,
            Part.last: self.last,
        }[part]


class Stages:
    """Stages of a layout, and the time of a round on them."""

    def __init__(self, layout: ParallelLayout, num_layers: int) -> None:
        count = layout.pipeline_parallel_size
        self.all = tuple(
            Stage(
                layers / num_layers,
                int(index == 0),
                0.0 if index == count - 1 else 1 / (count - 1),
                int(index == count - 1),
            )
            for index, layers in enumerate(layout.stage_layers(num_layers))
        )
        self._silent = [replace(stage, between=0.0) for stage in self.all]
        self.slowest = _undominated(self.all)
        """Stages that may be the slowest, depending on the batch."""

    def seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> Any:
        """Returns the seconds of a round; batch: a full micro-batch, light: one that decodes only."""
        longest = batch.all_s
        for stage_s in self.stage_seconds(batch, in_flight, light):
            longest = larger(longest, stage_s)
        return longest

    def stage_seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> list[Any]:
        """Returns the seconds of all micro-batches on each stage in `slowest`."""
        return [
            in_flight.full * stage.seconds(batch) + in_flight.light * stage.seconds(light)
            for stage in self.slowest
        ]

    def one(self, batch: MicroBatch) -> tuple[list[Any], Any]:
        """Returns the seconds of one batch on each stage, sends left out, and of a send."""
        return [stage.seconds(batch) for stage in self._silent], batch.between_s / max(len(self.all) - 1, 1)

    def to_play(self, full: MicroBatch, count: InFlight, light: MicroBatch) -> tuple[Seconds, Seconds]:
        """Returns the arguments of `Pipeline.play`: seconds [stages, micro-batches], and of sends."""
        columns = [full] * int(count.full) + [light] * int(count.light)
        times = [self.one(column) for column in columns]
        return np.array([stage_s for stage_s, _ in times], float).T, np.array([send_s for _, send_s in times])


def _undominated(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Removes stages that have no larger share of any part than another stage."""
    kept: list[Stage] = []
    for stage in dict.fromkeys(stages):
        if not any(_at_most(stage, other) for other in stages if other != stage):
            kept.append(stage)
    return tuple(kept)


def _at_most(stage: Stage, other: Stage) -> bool:
    return all(stage.share(part) <= other.share(part) for part in Part)
