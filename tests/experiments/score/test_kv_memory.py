"""KV memory against what engines logged when they started: `windtunnel score kind=kv_memory`."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hwmodels.trust
from experiments.score import kv_memory
from experiments.score.kinds import KINDS
from experiments.score.table import read_table
from experiments.study.presets import NotSimulatedError
from hwmodels.levels import Calibrated

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("kv_memory")]  # its tests share 30 predictions

LOGS = Path(hwmodels.trust.__file__).with_name("kv_memory_logs.csv")
LATENCY = Calibrated()


@pytest.fixture(scope="module")
def scored():
    """Returns the logs with the predicted tokens and their error in percent."""
    kind = KINDS["kv_memory"]
    table = kind.rows(read_table(LOGS, kind.columns, kind.positive), LOGS)
    tokens = [kind.predict(row, LATENCY)["kv_tokens"] for row in table.to_dict("records")]
    return table.assign(error=100 * (np.array(tokens) / table["kv_tokens"] - 1))


def error_of(scored, row_id):
    return float(scored.set_index("id").loc[row_id, "error"])


def test_at_least_thirty_logs_have_their_sources(scored):
    assert len(scored) >= 30
    assert scored["source"].str.len().gt(10).all()
    assert {"vllm", "sglang", "tensorrt_llm"} <= set(scored["engine"])


@pytest.mark.parametrize("half", ["fitted", "kept"])
def test_half_of_the_errors_are_below_5_percent_and_nine_in_ten_below_12(scored, half):
    errors = scored.loc[scored["half"] == half, "error"]
    assert len(errors) >= 20
    median, p90 = np.percentile(errors.abs(), [50, 90])
    assert median <= 5
    assert p90 <= 12
    assert (errors > 0).any()
    assert (errors < 0).any()


def test_no_model_is_in_both_halves(scored):
    assert scored.groupby("model")["half"].nunique().eq(1).all()


def test_an_engine_that_started_is_never_said_not_to_fit(scored):
    assert scored["error"].gt(-100).all()


def test_vllm_and_sglang_on_the_same_gpus(scored):
    """vllm-project/vllm issue 21348, Qwen3-235B in fp8 on four H100: +55 % and -26 % before this model."""
    assert 0 < error_of(scored, "issue21348_vllm") < 25
    assert abs(error_of(scored, "issue21348_sglang")) < 3


def test_tokens_of_a_model_with_windows_are_those_of_vllms_groups(scored):
    """Gemma 3 27B: 7 groups of 10 layers, 8 of them padding; its vision tower is not in the weights here."""
    assert abs(error_of(scored, "v19_gemma3_27b")) < 8


def test_a_wrong_version_is_no_prediction():
    row = pd.read_csv(LOGS).iloc[0].to_dict() | {"version": "1"}
    with pytest.raises(NotSimulatedError, match="version=1: must be a version of vLLM with three parts"):
        kv_memory.scenario_of(row, LATENCY)
