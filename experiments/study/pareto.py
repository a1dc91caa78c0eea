"""Finds the points that no other one beats in both of two figures."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the Pareto front, ordered by the first figure; larger is better in both.

    Of (1, 3), (2, 2), (1.5, 1), (3, 0), all but the third are on the front.
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    front, best = [], -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front[::-1]
