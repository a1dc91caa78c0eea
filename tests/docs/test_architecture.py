"""The way of a request that docs/architecture.md describes is the way that a default run takes."""

import re
import sys
from pathlib import Path

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.scenario import build_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


def shown() -> list[str]:
    """Returns the functions of the table, in order."""
    section = PAGE.read_text().split("### One request")[1].split("\n\n")[2]
    cells = [row.split("|")[2] for row in section.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)]


@pytest.fixture(scope="module")
def called() -> set[str]:
    """Returns the functions that a default run with few requests calls, with their classes."""
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(["workload.num_requests=30"])
    scenario, source = build_run(cfg)
    found: set[str] = set()

    def note(frame, event, argument):
        if event == "call":
            found.add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        scenario.simulate(source)
    finally:
        sys.setprofile(None)
    return found


def test_the_table_is_found():
    assert len(shown()) > 30


@pytest.mark.parametrize("name", shown())
def test_each_function_of_the_table_is_called(name, called):
    assert name in called
