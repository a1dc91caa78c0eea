"""Requests that meet their objectives, and objectives that are refused."""

from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from sim.metrics.slo import TERMS, WORKLOAD_TERMS, Slo, check_no_workload_terms

NAN = float("nan")
CONFIGS = sorted((Path(__file__).resolve().parents[3] / "configs" / "slo").glob("*.yaml"))


def request(*, status="finished", output_tokens=10, ttft_s=0.1, tpot_s=0.01, e2e_s=0.2):
    return pd.DataFrame(
        [
            {
                "status": status,
                "output_tokens": output_tokens,
                "ttft_s": ttft_s,
                "tpot_s": tpot_s,
                "e2e_s": e2e_s,
            }
        ]
    )


def met(slo, **what):
    return slo.met(request(**what)).tolist() == [True]


def test_every_given_term_must_hold():
    slo = Slo(ttft_ms=500, tpot_ms=50)
    assert met(slo, ttft_s=0.4, tpot_s=0.04)
    assert not met(slo, ttft_s=0.6, tpot_s=0.04)
    assert not met(slo, ttft_s=0.4, tpot_s=0.06)
    assert met(slo, ttft_s=0.4, tpot_s=0.04, e2e_s=1e9)  # not a term of this one


def test_a_latency_equal_to_its_limit_holds():
    assert met(Slo(ttft_ms=500), ttft_s=0.5)


def test_a_finished_answer_of_one_token_keeps_any_tpot():
    slo = Slo(tpot_ms=1)
    nan = float("nan")
    assert met(slo, output_tokens=1, tpot_s=nan)
    assert not met(slo, status="unfinished", output_tokens=1, tpot_s=nan)
    assert not met(slo, status="rejected", output_tokens=0, tpot_s=nan)


@pytest.mark.parametrize("status", ["rejected", "aborted", "unfinished"])
def test_only_finished_requests_are_good(status):
    assert not met(Slo(ttft_ms=500), status=status)


def test_terms_are_judged_one_by_one():
    held = Slo(ttft_ms=500, e2e_ms=100).terms_met(request(ttft_s=0.1, e2e_s=0.2))
    assert {term: values.tolist() for term, values in held.items()} == {"ttft": [True], "e2e": [False]}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no limit given: set at least one of ttft_ms, tpot_ms, e2e_ms, publish_ms, task_ms"),
        ({"task_ms": 0}, "task_ms=0: must be a finite number > 0 ms"),
        ({"ttft_ms": 0}, "ttft_ms=0: must be a finite number > 0 ms"),
        ({"tpot_ms": -5.0}, "tpot_ms=-5.0: must be a finite number > 0 ms"),
        ({"e2e_ms": float("inf")}, "e2e_ms=inf: must be a finite number > 0 ms"),
        ({"ttft_ms": float("nan")}, "ttft_ms=nan: must be a finite number > 0 ms"),
        ({"ttft_ms": 1, "attainment_target": 90}, r"attainment_target=90: must be in \(0, 1\]"),
        ({"ttft_ms": 1, "attainment_target": 0}, r"attainment_target=0: must be in \(0, 1\]"),
    ],
)
def test_rejects_an_objective_that_cannot_be_judged(settings, message):
    with pytest.raises(ValueError, match=message):
        Slo(**settings)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_builds_under_its_own_name_and_says_what_it_is(path):
    node = OmegaConf.to_container(OmegaConf.load(path)) or {}
    assert path.read_text().startswith("# ")
    if path.stem == "none":
        assert not node
        return
    assert node.pop("_target_") == "sim.metrics.slo.Slo"
    # All terms stand in every file, null or not, so that any can be set from the command line.
    assert {f"{term}_ms" for term in (*TERMS, *WORKLOAD_TERMS)} <= node.keys()
    assert Slo(**node).name == path.stem


def test_latencies_of_a_workload_are_limited_like_others():
    slo = Slo(task_ms=1000, publish_ms=500)
    assert (slo.limits_s, slo.request_limits_s) == ({"publish": 0.5, "task": 1.0}, {})
    table = pd.concat([request()] * 4).assign(task_s=[0.9, 1.1, NAN, 0.9], publish_s=[0.4, 0.4, 0.4, 0.6])
    assert slo.met(table).tolist() == [True, False, False, False]


def test_commands_that_see_single_requests_only_refuse_latencies_of_a_workload():
    check_no_workload_terms(None, "observe")
    check_no_workload_terms(Slo(ttft_ms=1), "observe")
    with pytest.raises(ValueError, match=r"slo.task_ms=1000: observe knows TTFT, TPOT and E2E of single"):
        check_no_workload_terms(Slo(ttft_ms=1, task_ms=1000), "observe")
