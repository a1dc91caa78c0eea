"""Stages of a pipeline, and the times of batches on them.

A batch passes all stages, one after the other: its own time is the sum over them and over the sends between
them. Another batch may follow it as soon as the first stage is free, so a full pipeline takes the time of the
slowest stage per batch. Batches are those that the scheduler makes: nothing else is cut, so a lone prompt
overlaps with nothing, and m batches from an empty pipeline of p equal stages gain m p / (m + p - 1) at most.

    Pass      one batch: for several batches in flight (`sim.engine.iteration_times`)
    Stages    a round of batches that repeats: max(one batch on all stages, all batches on the slowest stage)

The second is for estimates of a steady state, and for what does not have batches in flight (drafts):
sequences are divided over micro-batches, as many as there are stages, chunks of prompts are whole.
`hwmodels.iterations.pipeline` plays both exactly, and a test compares them. A stage's time is that of its
layers, average ones, of the embedding on the first stage, of the LM head, sampling and drafts on the last,
and of sending its output. 8 stages of Llama-3.1-8B: 4 layers of 218 M weights each, and on the last stage an
LM head of 525 M, for which all others wait.

Not modelled: in a round, micro-batches of different sizes delay each other (played exactly, a loaded run
takes 2 % longer in 2 stages, 0.7 % in 4 stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.exact import larger
from hwmodels.iterations.layout import InFlight, ParallelLayout
from hwmodels.iterations.ops import Part

Seconds = NDArray[np.float64]


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
