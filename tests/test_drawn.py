"""Which cases `make test` runs: as many as fit into a function's second."""

from xml.etree import ElementTree  # of a text of our own

import pytest

from tests import drawn
from tests.drawn import BUDGET_S, keep_quick, seconds_by_function, spread
from tests.durations import seconds_of, write


class Case:
    """A test as pytest collects it."""

    def __init__(self, nodeid, *markers):
        self.nodeid, self.markers = nodeid, list(markers)

    def get_closest_marker(self, name):
        return name if name in self.markers else None

    def add_marker(self, marker):
        self.markers.append(marker.name)


def quick_of(cases):
    return [case.nodeid for case in cases if "slow" not in case.markers]


@pytest.fixture
def durations(tmp_path, monkeypatch):
    file = tmp_path / "durations.csv"
    file.write_text("test,seconds\na.py::many,0.3\na.py::long,1.5\n")
    monkeypatch.setattr(drawn, "DURATIONS", file)
    monkeypatch.setattr(drawn.seconds_by_function, "__defaults__", (file,))
    return file


def test_a_function_has_as_many_cases_as_fit_into_its_second(durations):
    cases = [Case(f"a.py::many[{i}]") for i in range(9)]
    keep_quick(cases)
    assert quick_of(cases) == ["a.py::many[0]", "a.py::many[3]", "a.py::many[6]"]


def test_a_case_that_takes_longer_is_slow_and_one_that_is_not_measured_is_not(durations):
    cases = [Case("a.py::long"), Case("a.py::new[1]"), Case("a.py::new[2]")]
    keep_quick(cases)
    assert quick_of(cases) == ["a.py::new[1]", "a.py::new[2]"]


def test_cases_that_are_slow_already_take_no_room(durations):
    cases = [Case(f"a.py::many[{i}]", *(["slow"] if i < 6 else [])) for i in range(9)]
    keep_quick(cases)
    assert quick_of(cases) == ["a.py::many[6]", "a.py::many[7]", "a.py::many[8]"]


def test_without_a_table_all_cases_run(tmp_path):
    assert seconds_by_function(tmp_path / "none.csv") == {}


def test_spread_has_the_first_and_none_beyond_the_last():
    assert spread(range(10), 4) == {0, 2, 5, 7}
    assert spread(range(3), 9) == {0, 1, 2}
    assert spread(range(3), 0) == set()


def test_a_report_gives_the_functions_above_their_second(tmp_path):
    suite = ElementTree.Element("testsuite")
    for place, name, seconds in (
        ("tests.sim.test_x", "long[a]", 0.9),
        ("tests.sim.test_x", "long[b]", 0.7),
        ("tests.sim.test_x.TestIt", "short[a]", 0.2),
    ):
        case = {"classname": place, "name": name, "time": str(seconds)}
        ElementTree.SubElement(suite, "testcase", case)
    ElementTree.ElementTree(suite).write(tmp_path / "report.xml")
    found = seconds_of(tmp_path / "report.xml")
    assert found == {"tests/sim/test_x.py::long": [0.9, 0.7], "tests/sim/test_x.py::TestIt::short": [0.2]}
    assert write(found, tmp_path / "d.csv") == 1
    assert seconds_by_function(tmp_path / "d.csv") == {"tests/sim/test_x.py::long": 0.8}


def test_the_table_names_tests_that_exist_and_are_above_the_second():
    """A function that was renamed would run whole again."""
    for name, seconds in seconds_by_function().items():
        file, *inside, function = name.split("::")
        text = (drawn.DURATIONS.parents[1] / file).read_text()
        assert all(f"class {one}" in text or f"{one} = " in text for one in inside), name
        assert f"def {function}(" in text or function == "runTest", name  # of hypothesis's state machines
        assert seconds > 0
    assert BUDGET_S == 1
