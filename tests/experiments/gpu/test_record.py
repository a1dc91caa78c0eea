"""Rows, parts and tables of the GPU measurements, and the numbers that they are judged by."""

from __future__ import annotations

import importlib
import json

import pytest

pytest.importorskip("torch")

pytest.importorskip("triton")

import torch

from experiments import gpu_run
from experiments.gpu.comparison import compared, relative_error
from experiments.gpu.engine_correct import agreement
from experiments.gpu.engine_models import (
    LLAMA_8B,
    TINY,
    kv_token_bytes,
    layer_weights,
    prefill_flops,
    public_workload,
    read_once_bytes,
)
from experiments.gpu.gaps import idle_of
from experiments.gpu.limits import Limits
from experiments.gpu.parts import CALLS, PARTS, in_order, limit_s, named
from experiments.gpu.record import UnavailableError, read
from experiments.gpu.speed_cases import Target, shares
from experiments.gpu.table import MOST_LINES, table_of
from experiments.gpu.tile_search import DRY_RUN, SEARCHES, replaced
from kernels.case import Case
from tests.experiments.gpu.records import make_record


def test_rows_are_on_disk_as_they_come_and_what_fails_does_not_stop_the_others(tmp_path):
    record = make_record(tmp_path)

    def missing():
        raise UnavailableError("not here")

    assert record.measure("a", lambda: {"x": float("nan")})["x"] is not None
    assert read(record.path)["rows"][0]["x"] == "nan"  # JSON has none
    assert record.measure("b", missing) is None
    assert record.finish()
    assert record.measure("c", lambda: 1 / 0) is None
    assert record.measure("d", lambda: {"ok": True})["ok"]
    assert "ZeroDivisionError" in read(record.path)["rows"][2]["error"]
    assert not record.finish()


def test_a_check_that_does_not_hold_fails_and_a_number_not_reached_does_not(tmp_path):
    record = make_record(tmp_path)
    record.measure("slow", lambda: {"target": 0.8, "reached": 0.5, "met": False})
    assert record.finish()
    record.measure("wrong", lambda: {"ok": False})
    assert not record.finish()
    assert not make_record(tmp_path).finish()  # no rows: nothing was found


def test_rows_without_time_are_named_and_not_begun(tmp_path):
    record = make_record(tmp_path, limit_s=1.0)
    assert record.measure("late", lambda: pytest.fail("was begun")) is None
    assert read(record.path)["not_measured"] == ["late"]


def test_resumed_rows_are_kept_and_not_measured_again(tmp_path):
    make_record(tmp_path).measure("a", lambda: {"x": 1})
    record = make_record(tmp_path)
    record.resume()
    assert record.measure("a", lambda: pytest.fail("was begun"))["x"] == 1


def test_needed_parts_come_first_unless_they_are_done():
    assert in_order(["kernels_speed"]) == ["limits", "compile", "kernels_speed"]
    assert in_order(["kernels_speed"], done=["limits"]) == ["compile", "kernels_speed"]
    assert in_order(["validate_llama_1b"]) == ["calibrate_llama_1b", "validate_llama_1b"]
    assert in_order([]) == list(CALLS["call1"])
    assert in_order(["call2"], done=CALLS["call1"]) == list(CALLS["call2"])
    assert named("engine") == [name for name in PARTS if name.startswith("engine_")]
    assert named("eng") == []


def test_the_calls_run_every_part_once():
    assert sorted(name for parts in CALLS.values() for name in parts) == sorted(PARTS)
    assert [name for parts in CALLS.values() for name in parts] == list(PARTS)


def test_time_is_shared_by_shares_and_what_is_left_goes_to_later_parts():
    shares = [PARTS[name].share for name in ("limits", "compile")]
    assert limit_s("limits", ["compile"], 100.0) == pytest.approx(100 * shares[0] / sum(shares))
    assert limit_s("compile", [], 90.0) == 90.0
    for call in CALLS:  # of nine minutes, less the reserve for the table
        names, left_s = in_order([call]), 536.0
        for place, name in enumerate(names):  # each part may use all of its limit, and all still fit
            part_s = limit_s(name, names[place + 1 :], left_s)
            assert part_s - gpu_run.GRACE_S >= PARTS[name].least_s
            left_s -= part_s
        assert left_s == pytest.approx(0.0, abs=1e-6)


def test_the_table_is_short_and_begins_with_what_failed(tmp_path):
    rows = [{"name": f"r{i}", "said": "fine"} for i in range(50)] + [{"name": "bad", "error": "no\nway"}]
    part = {"status": "failed", "seconds": 1.0, "rows": rows}
    lines = table_of("gpu", tmp_path, {"limits": part})
    assert lines[2] == "  FAILED bad: no way"
    assert len(lines) == 3 + MOST_LINES
    assert lines[-1] == f"  {51 - MOST_LINES} more lines in limits.json"


def test_idle_time_is_what_no_interval_covers():
    """Two steps: 0-3 (two overlap, a gap of 0.5 between), 10-12; the gap between the steps is 7."""
    idle = idle_of([(10.0, 12.0), (0.0, 1.0), (0.5, 2.0), (2.5, 3.0)], num_steps=2)
    assert idle.gap_s == 7.0
    assert idle.busy_s == pytest.approx((2.0 + 0.5 + 2.0) / 2)
    assert idle.idle_s == pytest.approx((0.5 + 7.0) / 2)
    assert idle_of([(1.0, 2.0)], num_steps=1) == (0.0, 1.0, 0.0)


def test_relative_error_is_a_ratio_of_norms_and_nan_never_passes():
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert not compared({"x": (torch.tensor([torch.nan]), torch.ones(1))}, torch.float32)["ok"]
    assert compared({"x": (torch.ones(1), torch.ones(1))}, torch.float32)["ok"]


def test_agreement_says_where_answers_part():
    assert agreement([(1, 2)], [(1, 2)])["ok"]
    row = agreement([(1, 2), (3, 4, 5)], [(1, 2), (3, 9, 5)])
    assert not row["ok"]
    assert row["same_share"] == 0.5
    assert "request 1 from token 1" in row["why"]


def test_llama_8b_reads_15_gb_a_step():
    """A block: 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 = 218,103,808; and the output head."""
    assert layer_weights(LLAMA_8B) == 32 * 218_103_808
    assert read_once_bytes(LLAMA_8B, 2) == 2 * (32 * 218_103_808 + 128256 * 4096) == 15_009_316_864
    assert kv_token_bytes(LLAMA_8B, 2) == 131_072
    one_token = 2 * layer_weights(TINY) + 4 * 2 * 4 * 32 * 1 + 2 * 512 * 64
    assert prefill_flops(TINY, 1) == one_token


def test_the_public_workload_is_the_published_one():
    requests = public_workload()
    assert len(requests) == 256
    assert sum(request.num_output_tokens for request in requests) == 133_966
    assert all(100 <= len(request.prompt) <= 1024 for request in requests)


def test_shares_are_of_measured_limits_only():
    case = Case("x", lambda device: lambda: None, bytes_moved=100.0, flops=50.0)
    row = shares(case, 2.0, {"copy": 100.0, "bf16": None})
    assert row == {"bytes_per_s": 50.0, "flops_per_s": 25.0, "copy_share": 0.5}
    assert Target(share_of="copy", at_least=0.5).at_least <= row["copy_share"]


def test_limits_take_the_fastest_way_of_each_kind(tmp_path):
    rows = [
        {"name": "copy", "bytes_per_s": 4.0},
        {"name": "gemm_fp8", "flops_per_s": 5.0},
        {"name": "gemm_fp8_fast", "flops_per_s": 6.0},
        {"name": "gemm_int8", "error": "no"},
    ]
    (tmp_path / "limits.json").write_text(json.dumps({"rows": rows}))
    limits = Limits.of(tmp_path)
    assert (limits.copy_bytes_per_s, limits.fp8_flops_per_s, limits.int8_flops_per_s) == (4.0, 6.0, None)


@pytest.mark.parametrize("search", [*SEARCHES, *DRY_RUN], ids=lambda search: search.name)
def test_every_search_names_a_case_and_all_fields_of_its_table(search):
    assert search.make().name == search.case
    table = importlib.import_module(f"kernels.{search.module}").TILES
    before = dict(table)
    for values in (search.candidates()[0], search.candidates()[-1]):
        with replaced(search.module, values):
            for entry in table.values():
                for tile in tiles_in(entry):
                    assert tile._asdict() == values
        assert table == before
    assert set(search.not_compiled) <= set(search.fields)


def tiles_in(entry):
    if hasattr(entry, "_fields"):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from tiles_in(inner)
