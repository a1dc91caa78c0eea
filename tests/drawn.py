"""Chooses the cases that one run of the tests tries, of those that are many or take long.

`make test` gives every test function a second (`BUDGET_S`). `durations.csv` has the seconds of a case of each
function that takes longer with all its cases: as many cases as fit into the second run in `make test`, evenly
spread, and the others are slow. A case that takes longer than the second is slow, so each idea needs a case
that does not. `make durations` measures them anew; a function that is not in the file runs whole.

    @pytest.mark.sampled(fast=4, slow=12)

on a parametrised test leaves four cases, evenly spread, to `make test`; the others are slow, and of the slow
ones `make test-all` runs twelve, always the same: TESTS_DRAWN=1. Another value draws others, and
TESTS_DRAWN=all, which `make nightly` sets, tries every case. The header of a run names its draw. A test that
loops over numbers asks `drawn_of` for those to try.
"""

from __future__ import annotations

import csv
import os
import random
import secrets
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

DRAW = os.environ.setdefault("TESTS_DRAWN", secrets.token_hex(4))  # workers of pytest-xdist inherit it
ALL = "all"
BUDGET_S = 1.0
"""Seconds that a test function has in `make test`, on a core of its own."""
DURATIONS = Path(__file__).with_name("durations.csv")


def drawn_of(cases: Sequence[T], count: int, name: str) -> list[T]:
    """Returns so many of the cases, in their order; all of them if there are no more or all are wanted.

    name: of the test, so that tests draw independently of each other.
    """
    if DRAW == ALL or len(cases) <= count:
        return list(cases)
    chosen = random.Random(f"{DRAW} {name}").sample(range(len(cases)), count)  # nosec B311
    return [cases[i] for i in sorted(chosen)]


def spread(items: Sequence[pytest.Item], count: int) -> set[pytest.Item]:
    """Returns so many of the items, evenly spread; all if there are no more."""
    number = min(count, len(items))
    return {items[i * len(items) // number] for i in range(number)}


def seconds_by_function(file: Path = DURATIONS) -> dict[str, float]:
    """Returns the seconds of a case of each test function that takes longer than `BUDGET_S` in all."""
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(lines)}


def keep_quick(items: Sequence[pytest.Item]) -> None:
    """Marks the cases as slow for which `make test` has no time."""
    seconds = seconds_by_function()
    for name, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if not item.get_closest_marker("slow")]
        if cases and name in seconds:
            for item in set(cases) - spread(cases, int(BUDGET_S / seconds[name])):
                item.add_marker(pytest.mark.slow)


def keep_sampled(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the slow cases of sampled tests, and removes those that are not drawn.

    All cases are run of tests that the command line selects by name (-k, or a case in brackets).
    """
    left_out: set[pytest.Item] = set()
    for name, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        marker = cases[0].get_closest_marker("sampled")
        if marker is None:
            continue
        quick = [item for item in cases if not item.get_closest_marker("slow")]
        fast = spread(quick, marker.kwargs.get("fast", len(quick)))
        for item in set(quick) - fast:
            item.add_marker(pytest.mark.slow)
        slow = [item for item in cases if item not in fast]
        left_out.update(set(slow) - set(drawn_of(slow, marker.kwargs["slow"], name)))
    by_name = config.option.keyword or any("[" in argument for argument in config.args)
    if left_out and not by_name:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
