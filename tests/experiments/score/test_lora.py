"""Published runs with and without LoRA adapters: `windtunnel score kind=lora`."""

from pathlib import Path

import pandas as pd
import pytest

import experiments.score
from experiments.score import lora
from experiments.score.kinds import KINDS
from experiments.score.table import read_table
from experiments.score.trust.cases import SOURCES
from hwmodels.levels import Calibrated
from hwmodels.trust import LORA
from sim.settings.errors import ConfigError

ROWS = Path(experiments.score.__file__).parent / "data" / "lora_rows.csv"


@pytest.fixture(scope="module")
def table():
    return lora.checked(read_table(ROWS, lora.COLUMNS, lora.POSITIVE), ROWS).set_index("id", drop=False)


def test_the_measured_share_is_that_of_the_report(table):
    assert table.loc["vllm_11267_1", lora.METRIC] == pytest.approx(7.60 / 11.45)
    assert table.loc["vllm_9452_050", lora.METRIC] == pytest.approx(49.33 / 58.96, rel=1e-4)  # seconds
    assert table.loc["vllm_3316", lora.METRIC] == pytest.approx(400 / 780)  # ms
    assert table[lora.METRIC].between(0.1, 1).all()
    assert table["address"].str.len().gt(10).all()
    assert table["assumed"].str.len().gt(2).all()


def test_a_row_is_two_runs_of_equal_requests(table):
    row = table.loc["vllm_10062"].to_dict() | {"num_requests": 8}
    scenario = lora.scenario_of(row, Calibrated())
    assert (scenario.adapters.max_loras, scenario.adapters.max_lora_rank) == (1, 64)
    assert scenario.engine.kernels.lora.backend == "vllm_v0"
    share = lora.kept(row, scenario)[lora.METRIC]
    assert 0.3 < share < 0.95
    assert KINDS["lora"].predict(row, Calibrated()) == {lora.METRIC: share}
    idle = row | {"baseline": "idle_slots"}
    assert share < lora.predict(idle, Calibrated())[lora.METRIC] < 1  # idle slots cost, too


def test_requests_to_the_base_model_pay_for_idle_slots_only(table):
    row = table.loc["vllm_25914_idle"].to_dict() | {"num_requests": 2, "osl": 8}
    scenario = lora.scenario_of(row, Calibrated())
    assert scenario.workload.base_share == 1
    assert 0.5 < lora.kept(row, scenario)[lora.METRIC] < 1


def test_a_device_and_limits_that_differ_are_set(table):
    scenario = lora.scenario_of(table.loc["bsc_050_r8"].to_dict(), Calibrated())
    assert scenario.hardware.memory_bytes == 68e9
    assert scenario.hardware.memory_bandwidth_bytes_per_s == 2.02e12
    assert (scenario.engine.max_num_seqs, scenario.engine.num_kv_blocks) == (4096, 3812)
    assert not lora.scenario_of(table.loc["vllm_13204"].to_dict(), Calibrated()).engine.cuda_graphs.enabled


def test_expected_errors_rest_on_rows_of_which_no_constant_was_set(table):
    source = SOURCES["lora"]
    assert source.file == str(ROWS)
    kept = source.checked(read_table(ROWS, source.columns, source.positive), ROWS)
    assert set(kept["id"]) == set(table[table["used"] == "false"]["id"])
    assert source.measured({lora.METRIC: 0.5}) == source.predicted({}, {lora.METRIC: 0.5}) == {LORA: 0.5}


@pytest.mark.parametrize(
    ("column", "value"),
    [("compared", "seconds"), ("baseline", "idle"), ("used", "maybe"), ("requests", "all")],
)
def test_a_wrong_value_is_named(table, column, value):
    wrong = pd.DataFrame([table.iloc[0].to_dict() | {column: value}])
    with pytest.raises(ConfigError, match=rf"id=vllm_11267_1: {column}={value}: must be one of "):
        lora.checked(wrong, Path("rows.csv"))
