"""Draws values of settings by the unit at the end of their names, so that new settings need no line here.

The values matter to runs of a few requests of some dozen tokens, which take about a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from random import Random
from typing import Any

Draw = Callable[[Random, Any], Any]


def log_uniform(rng: Random, low: float, high: float) -> float:
    """Draws a number with three digits; its logarithm is uniform."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.3g}")


def _seconds(rng: Random, old: Any) -> float:
    if rng.random() < 0.1:
        return 0
    if isinstance(old, int | float) and 0 < old < 0.005:  # host overheads
        return log_uniform(rng, old / 10, old * 10)
    return log_uniform(rng, 1e-3, 1)


def _count(rng: Random, old: Any) -> int:
    return rng.choice([0, 1, 1, 2, 2, 3, 4, 8, 16])


def _number(rng: Random, old: Any) -> Any:
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
        return _count(rng, old)
    return rng.choice([0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 5.0])


def _rate(rng: Random, old: Any) -> float:
    return log_uniform(rng, 1, 1000)


def _bytes_per_s(rng: Random, old: Any) -> float:
    return log_uniform(rng, 1e6, 1e11)


BY_UNIT: tuple[tuple[str, Draw], ...] = (
    (r"block_size", lambda rng, old: rng.choice([1, 2, 3, 4, 8, 16, 32])),
    (r"bytes_per_s", _bytes_per_s),
    (r"flops_per_s", lambda rng, old: log_uniform(rng, 1e9, 1e13)),
    (r"per_s", _rate),
    (r"ms", lambda rng, old: log_uniform(rng, 1, 1000)),
    (r"s", _seconds),
    (r"tokens|token_threshold|n_batch", lambda rng, old: round(log_uniform(rng, 1, 90))),
    (r"share|quantile|accuracy|watermark|utili[sz]ation", lambda rng, old: round(rng.random(), 2)),
    (r"gib", lambda rng, old: log_uniform(rng, 1e-5, 0.1)),
    (r"mean|value|low|high", lambda rng, old: round(log_uniform(rng, 1, 90))),
)
"""Unit (a regular expression for the last word of a key) and the values of settings with it."""

_PLAIN = (bool, int, float, type(None))


def draw_value(rng: Random, path: tuple[str, ...], old: Any) -> Any:
    """Draws a value for the setting at a path; returns `old` if no other value of its kind is known."""
    if isinstance(old, bool):
        return rng.random() < 0.5
    if isinstance(old, list):
        return [draw_value(rng, path, item) for item in old]
    if isinstance(old, dict):
        return {name: draw_value(rng, (*path, name), item) for name, item in old.items()}
    if not isinstance(old, _PLAIN) or path[-1] == "seed":
        return old
    if old is not None and rng.random() < 0.2:
        return old
    return _draw_of(path, old)(rng, old)


def _draw_of(path: tuple[str, ...], old: Any) -> Draw:
    """Returns the function that draws values with the unit of the last name in a path that has one."""
    for name in reversed(path):
        for unit, draw in BY_UNIT:
            if re.search(rf"(^|_)({unit})$", name):
                return draw
    if old is None or re.match(r"(max|min|num)_", path[-1]):
        return _count
    return _number


def shown(value: Any) -> str:
    """Returns a value as the text of an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{shown(item)}" for name, item in value.items()) + "}"
    return repr(value) if isinstance(value, int | float) else str(value)
