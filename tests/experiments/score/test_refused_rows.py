"""Measured tables that cannot be right: they are refused, or left out of the errors."""

import re

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.score import silicon
from experiments.score.physical import active_weight_bytes, least_step_seconds
from hwmodels.levels import Spec
from tests.experiments.score.measured_rows import REPLAYED_RUN, RUN, SILICON, replayed


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{**SILICON, "ttft_ms": 0.0}],
            {},
            "measured.csv: id=row-0: ttft_ms=0.0: must be a finite number > 0",
        ),
        ([{**SILICON, "tpot_ms": -3.0}], {}, "id=row-0: tpot_ms=-3.0: must be a finite number > 0"),
        ([{**SILICON, "isl": "many"}], {}, "id=row-0: isl=many: must be a finite number > 0"),
        (
            [{name.replace("concurrency", "concurency"): v for name, v in SILICON.items()}],
            {},
            "column concurrency is missing; .*concurency",
        ),
        ([SILICON], {"kind": "experiments"}, "measured.csv: column tp is missing"),
        ([SILICON], {"kind": "silicone"}, "kind=silicone: must be one of .*nearest: silicon"),
        ([SILICON], {"jobs": 0}, "jobs=0: must be >= 1"),
        ([SILICON], {"out": "nowhere/predicted.csv"}, "out=nowhere/predicted.csv: there is no folder"),
        ([SILICON], {"out": "."}, "out=.: is a folder; name a file in it"),
        (
            [{**SILICON, "tpot_ms": 0.5}],
            {},
            "id=row-0: tpot_ms=0.5: 1 x L4 cannot read the weights of smollm2-135m in less than 0.7[0-9]* ms",
        ),
        ([{**SILICON, "ttft_ms": 0.012}], {}, "id=row-0: ttft_ms=0.012: 1 x L4 cannot .*; times must be"),
        ([{**SILICON, "tpot_ms": 10_001}], {}, "id=row-0: tpot_ms=10001: must be <= 10,000; times"),
        ([{**SILICON, "ttft_ms": 4e6}], {}, r"id=row-0: ttft_ms=4e\+06: must be <= 3,600,000"),
        (
            [{**RUN, "itl_mean_ms": 0.003}],
            {"kind": "experiments"},
            "id=run-0: itl_mean_ms=0.003: 1 x RTX 4090 cannot read the weights",
        ),
        ([SILICON], {"measured": "absent.csv"}, "measured=absent.csv: no such file"),
        ([SILICON], {"where": "'isl>9999'"}, "where=isl>9999: no row of the table matches"),
        ([SILICON], {"where": "'no_such_column>1'"}, "where=no_such_column>1: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_tables_and_settings_exit_2_with_one_message(score, rows, settings, message):
    code, predicted, said = score(rows, **settings)
    assert (code, predicted) == (2, None)
    assert re.search(message, said), said


def test_the_measured_table_is_not_overwritten(score, tmp_path):
    code, _, said = score([SILICON], out="./measured.csv")
    assert code == 2
    assert "out=./measured.csv: is the file of measured, which it would overwrite; name another" in said
    assert list(pd.read_csv(tmp_path / "measured.csv")["id"]) == ["row-0"]
    code, _, said = score([SILICON], trust_table="predicted.csv")
    assert code == 2
    assert "trust_table=predicted.csv: is the file of out, which it would overwrite" in said


def test_weights_that_are_not_given_do_not_mean_kv_in_fp8():
    row = {**SILICON, "weights": np.nan}
    assert silicon.scenario_of(row, Spec()).model.kv_cache_dtype == "auto"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"arrival_s": np.nan}, "id=night/0: arrival_s=nan: must be seconds"),
        ({"output_tokens": np.nan}, "id=night/0: output_tokens=nan: must be a whole number of tokens"),
        ({"input_tokens": 2.5}, "id=night/0: input_tokens=2.5: must be a whole number of tokens"),
        ({"run": np.nan}, "id=night/0: run=nan: must be given"),
    ],
)
def test_requests_without_what_a_replay_needs_are_named(score, tmp_path, given, message):
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2, **given), kind="requests")
    assert code == 2
    assert message in said


def test_a_run_with_two_settings_is_named(score, tmp_path):
    pd.DataFrame([REPLAYED_RUN, REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2), kind="requests")
    assert code == 2
    assert "run=night: occurs twice in" in said


def test_a_table_without_rows_is_refused(score):
    code, predicted, said = score(pd.DataFrame(columns=list(SILICON)))
    assert (code, predicted) == (2, None)
    assert "measured=measured.csv: the table has no rows" in said


def test_a_few_impossible_rows_are_predicted_and_left_out_of_the_errors(score):
    """A few such rows may be speculative decoding that no column names; a whole table is in another unit."""
    rows = [{**SILICON, "id": f"row-{i}"} for i in range(3)]
    rows[1]["tpot_ms"] = 0.5
    code, predicted, said = score(rows)
    assert code == 0
    assert predicted["status"].tolist() == ["ok"] * 3
    assert "excluded from the errors: id=row-1: tpot_ms=0.5: 1 x L4 cannot read the weights" in said
    assert "row-0" not in said


def test_replayed_runs_in_seconds_are_refused(score, tmp_path):
    pd.DataFrame([REPLAYED_RUN]).to_csv(tmp_path / "runs.csv", index=False)
    code, _, said = score(replayed(2, tpot_ms=0.004), kind="requests")
    assert code == 2
    assert "id=night: tpot_mean_ms=0.004: 1 x L4 cannot read the weights" in said


def test_the_shortest_step_reads_what_one_token_is_multiplied_with():
    """Mixtral: 12.75e9 of its 46.7e9 weights in bf16, less the L2 of two devices."""
    row = {**SILICON, "model": "mixtral-8x7b", "gpu": "h100_sxm", "tp_size": 2, "moe_tp_size": 2, "gpus": 2}
    scenario = silicon.scenario_of(row, Spec())
    weights = 2 * (12_879_425_536 - 32_000 * 4096 - 65 * 4096)  # neither embedding table nor norms
    assert active_weight_bytes(scenario.model) == pytest.approx(weights, rel=1e-4)
    l2_bytes = 2 * scenario.hardware.l2_bytes
    assert least_step_seconds(scenario) == pytest.approx((weights - l2_bytes) / 6.7e12, rel=1e-4)
    fp8 = silicon.scenario_of({**row, "weights": "fp8", "moe_weights": "fp8"}, Spec())
    assert 0.5 < active_weight_bytes(fp8.model) / weights < 0.52


def test_a_table_must_be_named(capsys):
    assert main(["score"]) == 2
    assert "measured: must be given" in capsys.readouterr().err
