"""Steps of the controls of numbers: what the buttons − and + beside a control do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from experiments.app.settings.resolve import resolved
from experiments.dashboard.controls import Board, Control, State
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario

TENSOR_PARALLEL = "tensor_parallel_size"


def stepped(board: Board, state: State, key: str, *, up: bool) -> Any:
    """Returns the next value of a control of numbers in one direction, or its value if it is the last one.

    Tensor parallel sizes that the model cannot be divided into, or that one node cannot hold, are left out.
    """
    control = next(control for control in board.controls if control.key == key)
    value = state[key]
    if value is None:
        return control.default if control.default is not None else control.step
    if key == TENSOR_PARALLEL:
        most = control.maximum or math.inf
        sizes = range(value + 1, int(most) + 1) if up else range(value - 1, 0, -1)
        return next(_allowed(board, state, sizes), value)
    return _limited(control, value + (control.step or 1.0) * (1 if up else -1))


def _limited(control: Control, value: float) -> float:
    """Returns the value within the limits of the control, without rounding errors of steps such as 0.01."""
    most = math.inf if control.maximum is None else control.maximum
    limited = round(min(max(value, control.minimum), most), 6)
    return int(limited) if limited == int(limited) else limited


def _allowed(board: Board, state: State, sizes: Iterable[int]) -> Iterator[int]:
    """Yields the sizes that model and device allow; all sizes if the other settings are wrong."""
    try:
        scenario = build_scenario(resolved(board.config({**state, TENSOR_PARALLEL: 1})))
    except ConfigError:
        yield from sizes
        return
    for size in sizes:
        try:
            scenario.hardware.check_reaches(size)
            scenario.model.check_tensor_parallel_size(size)
        except ValueError:
            continue
        yield size
