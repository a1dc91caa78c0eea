"""The jitter of a model's runs is chosen on the runs of the other models."""

import numpy as np
import pandas as pd
import pytest

from experiments.score import held_out_jitter, runs
from experiments.score.held_out_jitter import CANDIDATES, error_table, held_out, tail_mismatch
from sim.settings.errors import ConfigError


def scored(p99_ms, models=("a", "b", "c"), **given):
    """Returns runs with a measured E2E of 100 ms and these predicted percentiles, by model."""
    table = pd.DataFrame({"id": models, "model": models})
    for metric in runs.METRICS:
        table[metric] = table[f"{metric}_predicted"] = 100.0
    table["e2e_p99_ms_predicted"] = p99_ms
    return table.assign(**given)


def test_the_own_runs_do_not_take_part_in_the_choice():
    """Jitter is right for a and b, none for c: c gets the jitter, a and b see one run for and one against."""
    tables = {"none": scored([90.0, 90.0, 100.0]), "jitter": scored([100.0, 100.0, 108.0])}
    found, chosen = held_out(tables)
    assert chosen == {"a": "jitter", "b": "jitter", "c": "jitter"}
    assert found.set_index("model")["e2e_p99_ms_predicted"].to_dict() == {"a": 100, "b": 100, "c": 108}
    tables["jitter"] = scored([100.0, 100.0, 130.0])
    assert held_out(tables)[1] == {"a": "none", "b": "none", "c": "jitter"}


def test_a_common_factor_on_all_times_is_no_mismatch():
    right = scored(100.0)
    slow = right.assign(**{name: 1.3 * right[name] for name in right if name.endswith("_predicted")})
    assert tail_mismatch(slow) == pytest.approx(0, abs=1e-12)
    assert tail_mismatch(scored(110.0)) == pytest.approx(np.log(1.1) / 2)


def test_errors_are_printed_with_their_median_and_sign():
    lines = error_table({"one": scored([90.0, 95.0, 99.0])}).splitlines()
    assert lines[:2] == ["| | one |", "|---|---|"]
    assert "| e2e_p99_ms | 5.0 (-5.0) |" in lines


def test_runs_of_a_table_are_predicted_with_every_candidate(tmp_path, monkeypatch, capsys):
    seen = []

    def predicted(table, jitter):
        seen.append(jitter)
        return table.assign(**{f"{name}_predicted": table[name] for name in runs.METRICS})

    monkeypatch.setattr(held_out_jitter, "predicted_runs", predicted)
    table = pd.DataFrame({name: [1.0, 2.0] for name in (*runs.COLUMNS, *runs.METRICS)})
    table.assign(id=["x", "y"], model=["a", "b"]).to_csv(tmp_path / "runs.csv", index=False)
    held_out_jitter.main([f"measured={tmp_path}/runs.csv"])
    assert seen == list(CANDIDATES.values())
    assert "none: chosen for 2 of 2 models" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["measured=a", "out=b"], ["out=b"]])
def test_rejects_other_arguments(arguments):
    with pytest.raises(ConfigError, match=r"measured: must be given, for example"):
        held_out_jitter.main(arguments)
