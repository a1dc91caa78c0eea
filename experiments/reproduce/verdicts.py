"""Judges rows: whether ours is in the band of the row, and how far from the published figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from experiments.reproduce.rows import CLOSE, Compared, Family, Row, Sampled, figure
from sim.metrics.confidence import Interval
from sim.report.numbers import MISSING, number, supported


class State(Enum):
    """Says whether a row holds."""

    HOLDS = "holds"
    DIFFERS = "differs"
    """Ours is outside of the band, as is known."""
    FELL_OUT = "fell out"
    """Ours is outside of the band, although the row held when it was written."""
    MISSING = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Judges a row by our figure."""

    row: Row
    ours: Interval
    """Our figure in the row's unit; without an interval if it is computed."""

    @property
    def state(self) -> State:
        if math.isnan(self.ours.mean):
            return State.MISSING
        if self.row.holds(self.ours.mean):
            return State.HOLDS
        return State.DIFFERS if self.row.differs else State.FELL_OUT

    @property
    def ratio(self) -> float:
        return self.row.ratio(self.ours.mean)

    @property
    def is_close(self) -> bool:
        """Returns whether ours is at most `CLOSE` outside of the published figure."""
        return abs(self.ratio - 1) <= CLOSE + 1e-9

    @property
    def is_unexplained(self) -> bool:
        """Returns whether the row does not hold, and no cause of that is verified."""
        return self.state in (State.DIFFERS, State.FELL_OUT) and not self.row.verified

    @property
    def ours_text(self) -> str:
        """Returns our figure with its unit, and its interval if it comes from several seeds."""
        ours = self.ours
        if math.isnan(ours.mean):
            return MISSING
        simulated = isinstance(self.row.ours, Compared | Sampled)
        text = self.row.with_unit(number(ours.mean) if simulated else figure(ours.mean))
        shown = supported(ours)
        return text if shown is None else f"{self.row.with_unit(shown.mean)} ({shown.low} to {shown.high})"

    @property
    def ratio_text(self) -> str:
        """Returns ours over the published figure; "within" between its bounds."""
        if math.isnan(self.ours.mean):
            return MISSING
        low, high = self.row.published
        if low < high and low <= self.ours.mean <= high:
            return "within"
        return f"{self.ratio:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """Holds a family with the verdicts of its rows."""

    family: Family
    verdicts: tuple[Verdict, ...]


def of_state(judged: Sequence[Judged], state: State) -> list[Verdict]:
    """Returns the rows of all families that are in a state."""
    return [verdict for part in judged for verdict in part.verdicts if verdict.state is state]
