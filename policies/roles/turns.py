"""Models that take turns on the same GPUs: one is awake, the weights of the others are elsewhere.

vLLM's sleep mode: level 1 copies the weights to host memory and drops the KV cache, level 2 drops both; the
process, its compiled code and its CUDA graphs remain. A model sleeps after its last request has ended. Its
turn ends when another model has requests and this one has none, or when it has lasted for min_turn_s; then it
gets no new requests. The next turn is that of the model with the request that has waited longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, OneOf, Unit, check

LEVELS = (None, 1, 2)
DEFAULT_TURN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns(Checked):
    """Settings of turns, and the decision about the next one."""

    sleep_level: Annotated[int | None, OneOf(LEVELS)] = None
    """vLLM's level: 1, weights in host memory; 2, weights on disk. None: every model has GPUs of its own."""
    min_turn_s: Annotated[NonNegative, Unit("s")] = DEFAULT_TURN_S
    """Seconds after which a turn ends although the model has requests, if another one has some, too."""

    def __post_init__(self) -> None:
        check(self)
        if self.sleep_level is None and self.min_turn_s != DEFAULT_TURN_S:
            raise ValueError(
                f"min_turn_s={self.min_turn_s:g}, sleep_level=null: no model takes turns; set "
                f"sleep_level to 1 or 2, or min_turn_s={DEFAULT_TURN_S:g}"
            )

    def ends_s(self, waiting_since_s: Mapping[int, float], is_busy: bool, began_s: float) -> float:
        """Returns the time from which on the present turn may end, in seconds; inf: no other model waits.

        waiting_since_s: arrival of the first request of each model that waits, by number of the model.
        is_busy: whether the model that is awake has requests. began_s: beginning of its turn.
        """
        if not waiting_since_s:
            return inf
        return began_s + self.min_turn_s if is_busy else began_s

    def next_model(self, waiting_since_s: Mapping[int, float]) -> int:
        """Returns the number of the model of which a request has waited longest."""
        return min(waiting_since_s, key=lambda number: (waiting_since_s[number], number))
