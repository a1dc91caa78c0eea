"""How long a pipeline takes for an iteration: the time in which every micro-batch passes every stage once.

Micro-batches follow each other round after round: the next one of a sequence begins when it has its token
(vLLM's virtual engines, TensorRT-LLM's micro-batches). Round by round such a pipeline takes

    max(one micro-batch on all stages, all micro-batches on the slowest stage)

as it comes out if rounds like this one follow each other (`hwmodels.iterations.pipeline` plays it through; a
test holds the one against the other). A stage's time is that of its layers, average ones, of the embedding
on the first, of the LM head, sampling and drafts on the last, and of sending on what it made. 8 stages of
Llama-3.1-8B: 4 layers of 218 M weights each, and on the last an LM head of 525 M: all wait for that one.

What this leaves out: rounds of different sizes hold each other up (played through, a loaded run in 2 stages
takes 2 % longer, in 4 stages 0.7 %). And a round in an empty pipeline: its last micro-batch comes as many
slowest stages later as others are before it, which a full pipeline hides. A lone prompt of thousands of
tokens takes 1.5 times as long as priced in 2 stages, 1.75 in 4, 1.85 in 8; its other chunks follow at once.
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
    """Seconds of one on all stages together, and of that, of what not every stage has. Numbers or arrays."""

    all_s: Any
    first_s: Any
    between_s: Any
    last_s: Any

    @property
    def layers_s(self) -> Any:
        return self.all_s - self.first_s - self.between_s - self.last_s


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's share of the layers, of what precedes and follows them, and of the sends."""

    layers: float
    first: int
    between: float
    last: int

    def seconds(self, batch: MicroBatch) -> Any:
        """Of one micro-batch."""
        return (
            self.layers * batch.layers_s
            + self.first * batch.first_s
            + self.between * batch.between_s
            + self.last * batch.last_s
        )

    def share(self, part: Part) -> float:
        """Of an operator of that part."""
        return {
            Part.first: self.first,
            Part.layers: self.layers,
            Part.between: self.between,
            Part.last: self.last,
        }[part]


class Stages:
    """The stages of a layout, and what a round on them takes."""

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
        self.slowest = _undominated(self.all)
        """Those that may be the slowest, depending on the batch."""

    def seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> Any:
        """Of a round; light: of the micro-batches that decode only."""
        longest = batch.all_s
        for stage_s in self.stage_seconds(batch, in_flight, light):
            longest = larger(longest, stage_s)
        return longest

    def stage_seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> list[Any]:
        """Of all micro-batches on each of `slowest`."""
        return [
            in_flight.full * stage.seconds(batch) + in_flight.light * stage.seconds(light)
            for stage in self.slowest
        ]

    def to_play(self, full: MicroBatch, count: InFlight, light: MicroBatch) -> tuple[Seconds, Seconds]:
        """For `Pipeline.play`, of one iteration: seconds by stage and micro-batch, and of a send of each."""
        columns = [full] * int(count.full) + [light] * int(count.light)
        hops = max(len(self.all) - 1, 1)
        sends_s = np.array([float(column.between_s) / hops for column in columns])
        silent = [replace(stage, between=0.0) for stage in self.all]
        return np.array([[float(stage.seconds(column)) for column in columns] for stage in silent]), sends_s


def _undominated(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Without stages that have no more of anything than another one."""
    kept: list[Stage] = []
    for stage in dict.fromkeys(stages):
        if not any(_at_most(stage, other) for other in stages if other != stage):
            kept.append(stage)
    return tuple(kept)


def _at_most(stage: Stage, other: Stage) -> bool:
    return all(stage.share(part) <= other.share(part) for part in Part)
