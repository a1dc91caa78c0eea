"""Draws the cases that one run of the slow tests tries, of those that are many and take seconds each.

A run of `make test-all` draws new cases, as Hypothesis draws new examples: what one run leaves out, a later
one tries. The header of the run names the draw; TESTS_DRAWN=THAT repeats it, and TESTS_DRAWN=all, which
`make nightly` sets, tries every case. The marker `drawn(count)` on a parametrised test keeps so many of its
slow cases (`keep_drawn`); a test that loops asks for the numbers to try (`drawn_of`).
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import pytest

T = TypeVar("T")

DRAW = os.environ.setdefault("TESTS_DRAWN", secrets.token_hex(4))  # workers of pytest-xdist inherit it
ALL = "all"


def drawn_of(cases: Sequence[T], count: int, name: str) -> list[T]:
    """Returns so many of the cases, in their order; all of them if there are no more or all are wanted.

    name: of the test, so that tests draw independently of each other.
    """
    if DRAW == ALL or len(cases) <= count:
        return list(cases)
    chosen = random.Random(f"{DRAW} {name}").sample(range(len(cases)), count)  # nosec B311
    return [cases[i] for i in sorted(chosen)]


def keep_drawn(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the cases that are not drawn from the collected tests.

    A single case that is named on the command line is run.
    """
    if any("[" in argument for argument in config.args):
        return
    left_out: set[pytest.Item] = set()
    for name, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if item.get_closest_marker("slow")]
        marker = cases[0].get_closest_marker("drawn") if cases else None
        if marker is not None:
            (count,) = marker.args
            left_out.update(set(cases) - set(drawn_of(cases, count, name)))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
