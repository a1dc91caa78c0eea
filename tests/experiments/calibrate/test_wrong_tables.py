"""Measured tables and settings of calibrate that are refused or left out, and named."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.calibrate.fit import fit_calibration, residuals, validation
from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.tables import Measured, read_tables
from hwmodels.fitting.limits import TOO_SLOW, slowness
from sim.settings.errors import ConfigError
from tests.experiments.calibrate.known_curves import OPS, TRUTH, measured, preset, shapes, table, write


@pytest.mark.parametrize("name", ["mla", "moe"])
def test_tables_that_do_not_determine_the_capability_need_it(h100, name):
    rows = {column: np.arange(9) for column in OPERATORS[name].columns}
    given = {name: Measured(rows, np.ones(9, dtype=bool), "")}
    with pytest.raises(
        ConfigError, match="cannot be inferred from rows of mla and moe alone; give compute_cap"
    ):
        fit_calibration(given, h100, compute_capability=None, source="")


def bad_value(operator: str, column: str, value: object):
    def change(tables):
        rows = tables[operator].astype({column: object}) if isinstance(value, str) else tables[operator]
        rows.loc[3, column] = value
        tables[operator] = rows.astype({column: str}) if isinstance(value, str) else rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(gemm=t["gemm"].drop(columns="kernel")),
            r"gemm.parquet: has no column kernel; (nearest: \w+; )?allowed: m, n, k",
        ),
        (bad_value("gemm", "latency_us", 0.0), r"id=gemm-3: latency_us=0.0: must be a finite number > 0"),
        (bad_value("gemm", "latency_us", np.nan), r"id=gemm-3: latency_us=nan: must be a finite number > 0"),
        (bad_value("gemm", "m", -1), r"id=gemm-3: m=-1: must be a finite number > 0"),
        (bad_value("gemm", "dtype", "fp3"), r"id=gemm-3: dtype=fp3: must be one of bfloat16, fp8, fp8_block"),
        (
            lambda t: t["gemm"].update(t["gemm"]["latency_us"] / 1000),
            r"id=gemm-\d+: latency_us=[\d.e-]+, less than the .* us that H100 SXM needs .*; "
            r"is the column in us\?",
        ),
        (
            lambda t: t["gemm"].update(t["gemm"]["latency_us"] * 1000),
            r"gemm.parquet: latency_us: large rows take \d,\d{3} times as long .*; is the column in us\?",
        ),
        (
            lambda t: t["attention_prefill"].update(t["attention_prefill"]["latency_us"] * 1000),
            r"attention_prefill.parquet: latency_us: large rows take \d,\d{3} times",
        ),
        (
            lambda t: t.update(gemm=t["gemm"].assign(gpu="h101"), attention_decode=t["gemm"].head(0)),
            r"attention_decode.parquet: has no column",
        ),
        (
            lambda t: [t.update({name: rows.assign(gpu="b200_sxm")}) for name, rows in t.items()],
            r"no rows of H100 SXM; .*allowed: b200_sxm; give gpu=NAME",
        ),
        (
            lambda t: t["attention_decode"].update(
                pd.Series("torch_flow", t["attention_decode"].index, name="kernel")
            ),
            r"compute_capability: rows name kernels of no chip; give the one to fit",
        ),
    ],
)
def test_wrong_tables_are_refused(tmp_path, h100, change, message):
    tables = {name: measured(name, rows, h100) for name, rows in shapes().items()}
    change(tables)
    with pytest.raises(ConfigError, match=message):
        fit_calibration(read_tables(write(tmp_path, tables), h100), h100, compute_capability=None, source="")


def test_rows_a_little_too_fast_are_left_out_and_named(tmp_path, h100):
    rows = measured("gemm", shapes()["gemm"], h100)
    least_us = 1e6 * OPERATORS["gemm"].least_seconds({name: rows[name] for name in rows}, h100)
    slowest = int(np.argmax(least_us))
    rows.loc[slowest, "latency_us"] = 0.9 * least_us[slowest]
    found = read_tables(write(tmp_path, {"gemm": rows}), h100)["gemm"]
    assert np.flatnonzero(~found.sound).tolist() == [slowest]
    assert found.caveat.startswith(f"1 row faster than the data sheet allows, such as id=gemm-{slowest}: ")
    lines = residuals(OPERATORS["gemm"], found, h100, TRUTH)
    assert np.flatnonzero(lines["predicted_s"].isna()).tolist() == [slowest]


@pytest.mark.skipif(not OPS.exists(), reason="needs ../shared/data/ops")
def test_measured_tables_are_far_from_both_limits():
    device, _ = preset("rtx_pro_6000_server")
    tables = read_tables(OPS, device)
    assert set(tables) == set(OPERATORS)
    for name, measured_table in tables.items():
        rows = measured_table.rows
        seconds = 1e-6 * rows["latency_us"]
        assert 1 < slowness(seconds, OPERATORS[name].least_seconds(rows, device)) < TOO_SLOW / 5


def test_small_tensors_may_beat_memory(tmp_path, h100):
    """8 MiB of weights in 2 us are 4.2e12 bytes/s: out of the L2 cache."""
    rows = table(("m", "n", "k"), [1], [1024], [4096], framework="vllm", kernel="x", dtype="bfloat16")
    rows = rows.assign(id="warm", latency_us=2.0)
    assert read_tables(write(tmp_path, {"gemm": rows}), h100)["gemm"].sound.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ops=nowhere", "out=x.yaml"], "ops=nowhere: is not a folder"),
        (["ops=.", "out=x.yaml"], "ops=.: must contain at least one of the tables gemm.parquet"),
        (["ops=.", "out=no/folder/x.yaml"], "out=no/folder/x.yaml: there is no folder "),
        (["ops=.", "out=."], "out=.: is a folder; name a file in it"),
        (["ops=.", "out=x.yaml", "report=."], "report=.: is a folder; name a file in it"),
        (["ops=.", "out=x.yaml", "compute_capability=sm10"], "compute_capability=sm10: must be one of sm80"),
        (["ops=."], "out: must be given"),
        (["ops=.", "out=x.yaml", "raport=x.html"], "raport: no such group or setting; nearest: report"),
    ],
)
def test_wrong_settings_exit_2_with_one_message(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"windtunnel: {message}")


def test_a_table_with_nothing_left_to_fit_is_named(tmp_path, h100):
    rows = measured("gemm", shapes()["gemm"], h100)
    held_out = validation("gemm", {name: rows[name].to_numpy() for name in rows})
    tables = read_tables(write(tmp_path, {"gemm": rows[held_out]}), h100)
    with pytest.raises(
        ConfigError, match=f"gemm: none of the {held_out.sum()} rows is left to fit.*more n, k"
    ):
        fit_calibration(tables, h100, compute_capability=None, source="")
