"""The pytest plugin: it checks a policy in a plain file, and old names of claims work."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from experiments.conformance import admission_promises, promises
from experiments.conformance.claims import PROMISES
from experiments.conformance.days import Day
from experiments.conformance.renamed import NEW_CLAIMS
from tests.experiments.conformance.sound_policies import Scales

ROOT = Path(__file__).resolve().parents[3]


POLICY = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    max_num_batched_tokens: int = 64
    slack: int = 0

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens + self.slack)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            if not step.admit(seq, step.tokens_left):
                break
        step.repeat()
"""


@pytest.fixture
def run_pytest(pytester):
    """Runs pytest in a folder with a policy and no test; returns its exit code and what it printed."""
    pytester.makepyfile(whole=POLICY)

    def run(*arguments):
        plugins = ("-p", "experiments.conformance.plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
        done = pytester.runpytest_inprocess(*plugins, *arguments)
        return done.ret, done.stdout.str() + done.stderr.str()

    return run


def test_pytest_checks_a_policy_in_a_plain_file(run_pytest):
    code, printed = run_pytest("--policy", "whole.Whole", "--policy-worlds", "3")
    assert (code, "6 passed" in printed) == (0, True), printed


def test_an_old_name_of_a_claim_selects_it_with_a_note(run_pytest, capfd):
    code, printed = run_pytest("--policy", "whole.Whole", "--policy-worlds", "1", "-k", "everybody_ends")
    assert (code, "1 passed" in printed) == (0, True), printed
    assert "the claim everybody_ends is now called every_request_ends" in printed + capfd.readouterr().err


def test_every_old_name_of_a_claim_stands_for_a_promise():
    names = {promise.__name__ for family in PROMISES.values() for promise in family}
    bounded = {"starvation_bound_holds", "starvation_bound_s_holds"}
    assert set(NEW_CLAIMS.values()) <= names | bounded
    for old, new in NEW_CLAIMS.items():
        module = admission_promises if hasattr(admission_promises, new) else promises
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
            assert getattr(module, old) is getattr(module, new)
    assert not hasattr(promises, "no_such_promise")


def test_the_old_name_of_a_days_simulation_works():
    day = Day(scaling=Scales(), rates_per_s=(1.0,), num_intervals=2)
    with pytest.warns(DeprecationWarning, match=r"use Day\.simulate"):
        assert day.live() == day.simulate()


def test_pytest_tells_the_smallest_world_of_a_policy_that_exceeds_its_budget(run_pytest, monkeypatch):
    monkeypatch.setattr("experiments.conformance.claims.MAX_SHRINKING_S", 0.5)
    arguments = ["--policy-settings", "slack=1", "--policy-worlds", "20", "-k", "budget"]
    code, printed = run_pytest("--policy", "whole.Whole", *arguments)
    assert (code, "1 failed" in printed) == (1, True), printed
    assert "Broken in this world:" in printed
    assert "max_num_batched_tokens is" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "whole.Hole"], "policy._target_=whole.Hole: module whole has no Hole; nearest: Whole"),
        (
            ["--policy", "whole.Whole", "--policy-settings", "slak=1"],
            "policy.slak: no such setting; nearest: policy.slack",
        ),
        (
            ["--policy", "whole.Whole", "--policy-settings", "slack"],
            "--policy-settings slack: must be key=value",
        ),
    ],
)
def test_pytest_rejects_a_policy_that_cannot_be_built(run_pytest, arguments, message):
    code, printed = run_pytest(*arguments)
    assert (code, message in printed) == (4, True), printed


def test_the_plugin_is_registered_under_its_own_name_and_hypothesis_is_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "experiments.conformance.plugin"
    assert project["entry-points"]["pytest11"] == {name: name}
    assert any(need.startswith("hypothesis") for need in project["optional-dependencies"]["conformance"])


def test_the_plugin_alone_imports_nothing_heavy():
    code = "import sys, experiments.conformance.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"simpy", "omegaconf", "numpy", "policies.core.engine"} & set(done.stdout.split())
