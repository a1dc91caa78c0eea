"""The comparison of two checkouts: which runs it makes, how it alternates, and what it refuses."""

import re
from pathlib import Path

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench import paired
from experiments.bench.commands import run_in
from sim.settings.scenario import build_run

ROOT = Path(__file__).resolve().parents[3]
ONE, OTHER = Path("one"), Path("other")


@pytest.fixture
def ran(monkeypatch):
    """Notes the checkouts in which commands run; the other one takes twice as long, with another summary."""
    order = []

    def cpu_s_of(checkout, overrides):
        order.append(checkout)
        return (1.0, {"requests": 10}) if checkout != OTHER else (2.0, {"requests": 11})

    monkeypatch.setattr(paired, "cpu_s_of", cpu_s_of)
    return order


def test_the_checkout_that_runs_first_alternates(ran):
    paired.measure((ONE, OTHER), (), rounds=3)
    assert ran == [ONE, OTHER, OTHER, ONE, ONE, OTHER]


def test_a_line_has_medians_minima_their_ratio_and_whether_the_summaries_are_equal():
    fast, slow = paired.Times([3, 1, 2], ["a"]), paired.Times([4, 9, 8], ["b"])
    assert paired.line_of(fast, slow).split() == ["2.00", "1.00", "8.00", "4.00", "0.25", "DIFFERS"]
    assert paired.line_of(slow, slow._replace(cpu_s=[8])).split()[-2:] == ["0.50", "same"]


def test_a_run_that_fails_does_not_end_the_others(monkeypatch, capsys, ran):
    def fails(checkout, overrides):
        if "engine=nope" in overrides:
            raise paired.FailedError("in other: engine=nope: unknown")
        return 1.0, {}

    monkeypatch.setattr(paired, "cpu_s_of", fails)
    assert not paired.print_runs((ONE, OTHER), {"first": ("engine=nope",), "second": ()}, 1)
    *_, failed, line = capsys.readouterr().out.splitlines()
    assert failed == "first fails in other: engine=nope: unknown"
    assert line.endswith("same      second")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "is no checkout of windtunnel"),
        ([str(ROOT), "--runs=W1,W9"], "'W9' is none of start, W1"),
        ([str(ROOT), "--rounds=0"], "must be >= 1"),
    ],
)
def test_mistakes_are_refused(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        paired.main(words)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_trace_is_not_measured(tmp_path, capsys, ran):
    assert paired.main([str(ROOT), "--runs=W3", f"--traces={tmp_path}"]) == 0
    assert "W3: not measured, there is no trace" in capsys.readouterr().out
    assert not ran


@pytest.mark.parametrize("name", [name for name in paired.RUNS if name != "W3"])  # its trace is not ours
def test_every_run_can_be_built(name):
    overrides = [*paired.RUNS[name]]
    choices = [text.split("=")[0] for text in overrides if "." not in text.split("=")[0]]
    assert len(choices) == len(set(choices)), "the command line refuses a group that is chosen twice"
    build_run(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(overrides))


@pytest.mark.slow
def test_two_checkouts_are_compared(capsys):
    assert paired.main([str(ROOT), "--runs=start", "--rounds=1"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"( +\d+\.\d\d){5}  same      start", line), line


@pytest.mark.slow
def test_a_command_that_fails_has_its_last_line():
    took = run_in(ROOT, ("simulate", "engine=nope"))
    assert took.error
    assert "nope" in took.error
