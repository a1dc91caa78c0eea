"""Writes durations.csv from pytest's report of a run: `make durations`, on a machine with nothing beside.

    python -m tests.durations build/durations.xml

Times differ by machine; what counts is which functions are above `BUDGET_S`, so nothing is written of those
that are far below it.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree  # of a file that pytest has written

from tests.drawn import BUDGET_S, DURATIONS


def seconds_of(report: Path) -> dict[str, list[float]]:
    """Returns test function -> seconds of its cases, set-up included, from a report in JUnit's form."""
    found: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        place = case.attrib["classname"].split(".")
        end = max(i for i, part in enumerate(place) if part.startswith("test_")) + 1
        name = "::".join([*place[end:], case.attrib["name"].partition("[")[0]])
        found[f"{'/'.join(place[:end])}.py::{name}"].append(float(case.attrib["time"]))
    return found


def write(found: dict[str, list[float]], file: Path = DURATIONS) -> int:
    """Writes the functions whose cases take longer than `BUDGET_S` together; returns their number."""
    slow = {name: cases for name, cases in found.items() if sum(cases) > BUDGET_S}
    with file.open("w", newline="") as lines:
        table = csv.writer(lines, lineterminator="\n")
        table.writerow(("test", "seconds"))
        for name in sorted(slow):
            table.writerow((name, f"{sum(slow[name]) / len(slow[name]):.2g}"))
    return len(slow)


if __name__ == "__main__":
    print(write(seconds_of(Path(sys.argv[1]))), "test functions take longer than", BUDGET_S, "s")
