"""`windtunnel spares`: N + 1 in theory and counted, and refused settings."""

import re

import pytest

from experiments.app.cli import main


def spares(capsys, *overrides):
    assert main(["spares", *overrides]) == 0
    return "\n".join(line.strip() for line in capsys.readouterr().out.splitlines())


def test_one_spare_is_enough_where_theory_says_so(capsys):
    """a = 36000 / 36300; 8 of 8: a^8 = 93.58 %; 8 of 9: 99.77 %; 8 of 10: 99.994 %."""
    out = spares(capsys, "replications=500", "most_spares=2")
    theory = [float(share) for share in re.findall(r"(\d+\.\d{4})%", out)]
    a = 36000 / 36300
    assert theory == pytest.approx([100 * a**8, 100 * (a**9 + 9 * a**8 * (1 - a)), 99.9934], abs=1e-3)
    assert "10 replicas (2 spares) are enough for 8 to be up for 99.9 % of the time (analytical)" in out


def test_the_interval_holds_the_theory(capsys):
    out = spares(capsys, "needed=2", "most_spares=0", "failures.events.0.mttr_s=9000", "replications=1000")
    row = next(line for line in out.splitlines() if line.startswith("2 "))
    _, _, theory, low, high, _ = row.replace("%", "").split()
    assert float(low) <= float(theory) <= float(high)
    assert float(high) - float(low) < 7


def test_spares_in_one_rack_do_not_help(capsys):
    """All are down together, for 300 of 36,300 s."""
    out = spares(capsys, "failures=rack", "replications=1000")
    counted = {line.split("%")[0].split()[-1] for line in out.splitlines() if re.match(r"8( \+ \d)? ", line)}
    assert len(counted) == 1, "a spare changes nothing"
    assert "11 replicas are not enough" in out


@pytest.mark.parametrize(("failures", "share"), [("random_crashes", "100.0%"), ("rack", "0.0%")])
def test_replicated_kv_is_left_unless_all_crash_together(capsys, failures, share):
    out = spares(capsys, f"failures={failures}", "recovery=kv", "replications=20", "most_spares=1")
    assert f"a copy survived in {share} of" in out
    assert "replicated" not in spares(capsys, f"failures={failures}", "replications=20", "recovery=tokens")


def test_a_scripted_failure_is_asked_at_a_moment(capsys):
    out = spares(capsys, "failures=crash", "at_s=100", "needed=2", "most_spares=1", "replications=5")
    rows = [line.split() for line in out.splitlines() if line.startswith("2 ")]
    assert [row[-5:-3] for row in rows] == [["0%", "–"], ["100%", "–"]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("failures=none", "failures=none: must contain a failure; choose for example"),
        ("failures=crash", "at_s=null: scripted failures and releases have no long run; give a time"),
        ("needed=0", "needed=0: must be >= 1"),
        ("wanted_share=1", "wanted_share=1: must be > 0 and < 1"),
        ("failures.events.0.mtbf_s=-1", "failures.events[0].mtbf_s=-1: must be a finite number > 0 s"),
    ],
)
def test_what_means_nothing_is_refused(capsys, override, message):
    assert main(["spares", override]) == 2
    assert message in capsys.readouterr().err
