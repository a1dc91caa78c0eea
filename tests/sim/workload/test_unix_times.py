"""Unix times in traces, in any unit, count exactly from the first arrival."""

import pytest

from sim.workload.formats import MooncakeJsonl, PlainCsv

OFFSETS = ("0", "0.123457", "2.000001")


def trace(tmp_path, arrivals, **settings):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at},10,5\n" for at in arrivals))
    source = PlainCsv(path=path, **settings).source(seed=0, max_model_len=9999)
    return [arrival.at_s for arrival in source.arrivals()], source.notes.remarks


@pytest.mark.parametrize(
    ("unit", "arrivals"),
    [
        ("seconds", ["1700000000", "1700000000.123457", "1700000002.000001"]),
        ("milliseconds", ["1700000000000", "1700000000123.457", "1700000002000.001"]),
        ("microseconds", ["1700000000000000", "1700000000123457", "1700000002000001"]),
        ("nanoseconds", ["1700000000000000000", "1700000000123457000", "1700000002000001000"]),
    ],
)
def test_unix_times_count_from_the_first_arrival(tmp_path, unit, arrivals):
    at_s, remarks = trace(tmp_path, arrivals)
    assert at_s == list(map(float, OFFSETS))
    assert remarks == [
        f"The arrivals are Unix times in {unit}; 0 s of the run is the first, 2023-11-14 22:13:20 UTC."
    ]


def test_a_window_after_the_first_arrival_or_in_unix_time_can_be_chosen(tmp_path):
    arrivals = ["1700000000", "1700000001", "1700000003"]
    assert trace(tmp_path, arrivals, start_s=1)[0] == [0.0, 2.0]
    assert trace(tmp_path, arrivals, start_s=1700000001) == ([0.0, 2.0], [])


def test_unsorted_unix_times_are_sorted(tmp_path):
    assert trace(tmp_path, ["1700000003", "1700000000", "1700000001"], sort=True)[0] == [0.0, 1.0, 3.0]


def test_other_times_stay_as_they_are(tmp_path):
    assert trace(tmp_path, ["5", "900000000"], start_s=0) == ([5.0, 9e8], [])


@pytest.mark.parametrize("arrivals", [["0", "1e308"], ["1e308"], ["0", "1700000000"], ["1700000000", "1e13"]])
def test_an_arrival_in_millennia_is_refused(tmp_path, arrivals):
    with pytest.raises(ValueError, match=r"trace.csv:\d:1: arrival_s: expected a number of seconds >= 0"):
        trace(tmp_path, arrivals)


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens,prompt_tokens\n0,10,5,9\n")
    with pytest.raises(ValueError, match=r":1:1: has 2 columns prompt_tokens; rename or remove all but one"):
        PlainCsv(path=path).source(seed=0, max_model_len=9999)


def mooncake(tmp_path, arrivals, **settings):
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %s, "input_length": 10, "output_length": 5, "hash_ids": [1]}\n'
    path.write_text("".join(row % at for at in arrivals))
    source = MooncakeJsonl(path=path, **settings).source(seed=0, max_model_len=9999)
    return [arrival.at_s for arrival in source.arrivals()], source.notes.remarks


@pytest.mark.parametrize(
    ("unit", "arrivals"),
    [
        ("seconds", ["1700000000", "1700000003"]),
        ("milliseconds", ["1700000000000", "1700000003000"]),
        ("microseconds", ["1700000000000000", "1700000003000000"]),
    ],
)
def test_unix_times_of_any_unit_are_found_in_a_column_of_milliseconds(tmp_path, unit, arrivals):
    at_s, (remark,) = mooncake(tmp_path, arrivals)
    assert at_s == [0.0, 3.0]
    assert f"Unix times in {unit}; 0 s of the run is the first, 2023-11-14 22:13:20 UTC" in remark
    assert mooncake(tmp_path, arrivals, start_s=1700000001) == ([2.0], [])


def test_other_milliseconds_stay_as_they_are(tmp_path):
    assert mooncake(tmp_path, ["0", "1500", "2000000000"]) == ([0.0, 1.5, 2e6], [])


def test_milliseconds_in_millennia_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r":2:2: timestamp: .* at most 1e.12 after the first, found 1e.300"):
        mooncake(tmp_path, ["0", "1e300"])
