"""The runner of a step's measurements: lines as they come, shared set-ups; what fails leaves the others."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments.gpu.measurement import Measurement, Recorder, Run, UnavailableError
from experiments.gpu.targets import rows_of


def recorded(folder, measurements, left_s=60.0):
    """Records measurements; returns their rows by name."""
    run = Run(folder, "cpu", rehearse=True, seed=0, left_s=left_s)
    Recorder(run, folder / "limits.jsonl").record(measurements)
    return {row["name"]: row for row in rows_of(folder / "limits.jsonl")}


def missing(run, _):
    raise UnavailableError("not here")


def test_what_fails_does_not_stop_the_others(tmp_path):
    rows = recorded(
        tmp_path,
        [
            Measurement("a", lambda run, _: {"x": float("nan"), "name": "another"}),
            Measurement("b", missing),
            Measurement("c", lambda run, _: 1 / 0),
            Measurement("d", lambda run, _: {"ok": True}),
        ],
    )
    assert rows["a"]["x"] == "nan"  # JSON has none
    assert rows["b"]["unavailable"] == "not here"
    assert "ZeroDivisionError" in rows["c"]["error"]
    assert rows["d"]["ok"]
    assert not (tmp_path / "limits.now").exists()


def test_consecutive_measurements_share_a_set_up_and_it_is_ended(tmp_path):
    events = []

    @contextmanager
    def engine(run):
        events.append("start")
        yield "engine"
        events.append("end")

    def use(run, given):
        events.append(given)
        return {}

    recorded(tmp_path, [Measurement(n, use, engine) for n in "ab"] + [Measurement("c", use)])
    assert events == ["start", "engine", "engine", "end", None]


def test_a_set_up_that_fails_fails_its_measurements_only(tmp_path):
    @contextmanager
    def broken(run):
        raise ValueError("no memory")
        yield

    rows = recorded(
        tmp_path,
        [
            Measurement("a", lambda run, _: {}, broken),
            Measurement("b", lambda run, _: {}, broken),
            Measurement("c", lambda run, _: {"x": 1}),
        ],
    )
    assert "ValueError: no memory" in rows["a"]["error"]
    assert "ValueError: no memory" in rows["b"]["error"]
    assert rows["c"]["x"] == 1


def test_measurements_without_time_are_named_and_not_begun(tmp_path):
    begun = Measurement("late", lambda run, _: pytest.fail("was begun"))
    assert "late" in recorded(tmp_path, [begun], left_s=0.5)["late"]


def test_measurements_that_have_a_line_are_not_made_again(tmp_path):
    recorded(tmp_path, [Measurement("a", lambda run, _: {"x": 1})])
    again = [Measurement("a", lambda run, _: pytest.fail("was begun")), Measurement("b", lambda run, _: {})]
    assert recorded(tmp_path, again)["a"]["x"] == 1


def test_shares_are_of_limits_that_were_measured(tmp_path):
    (tmp_path / "limits.jsonl").write_text('{"name": "rates", "read": 4.0}\n')
    run = Run(tmp_path, "cpu", rehearse=False, seed=0, left_s=1.0)
    assert run.share(2.0, "read") == 0.5
    assert run.share(2.0, "bf16") is None
    assert run.row("limits", "copy") is None
    assert run.size(8192, 8) == 8192
