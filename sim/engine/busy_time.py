"""Seconds in which a replica was running iterations, independent of how the run was cut into leaps."""

from __future__ import annotations

from sim.engine.attachment import Attachment
from sim.engine.running_step import RunningStep


class BusyTime(Attachment):
    """Adds up periods without a pause, so that leaping and stepping give bit-identical sums."""

    def __init__(self) -> None:
        self._before_s = 0.0  # in the periods before the last
        self._from_s = self._until_s = 0.0  # the last period
        self._step: RunningStep | None = None

    def seconds(self, now: float) -> float:
        """Returns the seconds up to `now` in which an iteration was running."""
        until_s = self._until_s if self._step is None else now
        return self._before_s + (until_s - self._from_s)

    def started(self, step: RunningStep | None, now: float) -> None:
        if step is not None and self._step is None and now != self._until_s:
            self._before_s += self._until_s - self._from_s
            self._from_s = now
        self._step = step

    def ending(self, step: RunningStep, now: float) -> None:
        self._until_s, self._step = step.end_s, None

    def crashed(self, now: float) -> None:
        if self._step is not None:
            self._until_s, self._step = now, None
