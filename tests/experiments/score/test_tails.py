"""The tail of a run depends on the seed where requests wait for slots, and the last stage is told apart."""

import numpy as np
import pandas as pd
import pytest

from experiments.score import runs, tails
from experiments.score.tails import Tail, line, tail_of_requests
from sim.settings.errors import ConfigError

RUN = {
    "id": "r0",
    "model": "meta/llama-3.1-8b",
    "gpu": "H100",
    "tp": 1,
    "precision": "BF16",
    "stages": "2x10;20x10",
    "system_prompt_len": 100,
    "question_len": 50,
    "output_len": 40,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.9,
    "prefix_caching": False,
    **dict.fromkeys(runs.METRICS, 30.0),
    "stage1_ttft_p99_ms": 40.0,
}


def test_the_last_stage_has_its_own_requests_only():
    requests = pd.DataFrame({"arrival_s": [1.0, 9.0, 11.0, 19.0], "ttft_s": [5.0, 5.0, 0.1, 0.2]})
    requests["wait_slot_s"], requests["wait_memory_s"] = [0.0, 1.0, 0.0, 0.0], 0.0
    found = tail_of_requests(requests, [(0.2, 10.0), (0.2, 10.0)])
    assert found.held_back_share == 0.25
    assert found.last_stage_p99_ms == pytest.approx(np.percentile([100, 200], 99))
    assert found.p99_ms == pytest.approx(5000)


def test_a_line_has_medians_and_quantiles_over_the_seeds():
    own = [Tail(float(i), 0.001 * i, 2.0 * i) for i in range(1, 22)]
    cells = line(RUN, own)
    assert cells == [
        "r0",
        "llama-3.1-8b",
        "30.0",
        "11 (2 to 20)",
        "0.1 to 2.1",
        "40.0",
        "22 (4 to 40)",
    ]
    assert line(RUN | {"stage1_ttft_p99_ms": float("nan")}, own)[-2:] == ["", ""]


def test_tails_vary_where_slots_are_short(tmp_path, capsys):
    rows = [RUN, RUN | {"id": "r1", "max_num_seqs": 2}]
    pd.DataFrame(rows).to_csv(tmp_path / "runs.csv", index=False)
    tails.main([f"measured={tmp_path}/runs.csv", "seeds=2"])
    free, held = (text.split(" | ") for text in capsys.readouterr().out.splitlines()[2:])
    assert (free[0], held[0], free[4]) == ("| r0", "| r1", "0 to 0")
    assert not held[4].startswith("0 ")
    held_ms, free_ms = (float(cells[3].split()[0].replace(",", "")) for cells in (held, free))
    assert held_ms > 10 * free_ms
    tails.main([f"measured={tmp_path}/runs.csv", "seeds=1", "where=id=='r1'"])
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "measured: must be given"),
        (["measured=a", "out=b"], "out: no such argument; must be one of measured, seeds, where"),
        (["measured=a", "seeds=0"], "seeds=0: must be a whole number >= 1"),
        (["measured=a"], "measured=a: no such file"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tails.main(arguments)


def test_a_condition_on_a_missing_column_is_refused(tmp_path):
    pd.DataFrame([RUN]).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(ConfigError, match="where=foo>1: name 'foo' is not defined in the table"):
        tails.main([f"measured={tmp_path}/runs.csv", "where=foo>1"])
