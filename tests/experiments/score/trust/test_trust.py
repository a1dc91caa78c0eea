"""Expected errors: what is left out is never used, and the table follows from the errors by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.score.trust import cases as cases_module
from experiments.score.trust.cases import Case
from experiments.score.trust.command import coverage_lines
from experiments.score.trust.constants import KINDS, NAMES, steps, values_of, with_values
from experiments.score.trust.left_out import (
    HELD_BACK_RUNS,
    Outcome,
    expected_errors,
    left_out_tasks,
    outcomes,
    owned_by,
    ratios,
    repeated_tasks,
    rows_of,
    slope_tasks,
    to_fit,
)
from experiments.score.trust.predictions import Predictions, Task
from experiments.study.presets import base_scenario
from hwmodels.trust import ALL_ENGINES, ALL_GPUS, HELD_BACK, Level, read

SHIPPED = {
    "iteration_s": 600e-6,
    "sequence_s": 20e-6,
    "exposed_s": 600e-6,
    "frontend_s": 8e-3,
    "sustained_clock_share": 0.9,
    "start_share": 0.8,
}
TRUE = {"exposed_s": 1.5e-3, "frontend_s": 40e-3}
"""Planted: the GPU waits for 1.5 ms per iteration, and requests for 40 ms."""

GROUPS = [("llama", "h100_sxm"), ("llama", "h200_sxm"), ("qwen", "h100_sxm")]


def figures(row, values):
    """Returns figures that depend on the constants as those of an engine."""
    tpot_ms = row["least_ms"] + 1e3 * values["exposed_s"]
    return {"tpot_ms": tpot_ms, "ttft_ms": 10 * row["least_ms"] + 1e3 * values["frontend_s"] + tpot_ms}


def case_of(number, model, gpu, **measured):
    row = {
        "id": f"{model}-{gpu}-{number}",
        "source": "inferencemax",
        "isl": 1000,
        "osl": 1000,
        "concurrency": 4,
        "least_ms": 5.0 + number,
        "ttft_ok": True,
    }
    row |= {**figures(row, SHIPPED | TRUE), **measured}
    return Case(
        table="silicon",
        row=row,
        profile="vllm",
        family="vllm",
        model=model,
        gpu=gpu,
        device=gpu,
        architecture="dense",
        values=dict(SHIPPED),
        overlapped=True,
    )


def predicted(tasks):
    """Returns predictions of the tasks, computed by `figures`."""
    rows = {
        task.name: {
            "id": task.name,
            "status": "ok",
            **figures(task.case.row, task.case.values | dict(task.values)),
        }
        for task in tasks
    }
    return Predictions(file=SimpleNamespace(rows=rows), jobs=1)


def all_cases(**of_first_group):
    return [
        case_of(i, *group, **(of_first_group if group == GROUPS[0] else {}))
        for group in GROUPS
        for i in range(6)
    ]


def runs_of(cases):
    rows = rows_of(to_fit(cases), predicted(slope_tasks(to_fit(cases))))
    return list(left_out_tasks(cases, rows)), rows


def test_planted_constants_are_found_and_left_out_rows_predicted_exactly(monkeypatch):
    monkeypatch.setattr("experiments.score.trust.left_out.SPREAD", {"TPOT": 1e-3, "TTFT": 1e-3})
    runs, rows = runs_of(all_cases())
    fitted = rows.fit(lambda case: False)
    assert fitted["vllm", "exposed_s"] == pytest.approx(1.5e-3, rel=0.01)
    assert fitted["vllm", "frontend_s"] == pytest.approx(40e-3, rel=0.01)
    found = list(outcomes(runs, predicted([task for task, _ in runs])))
    assert max(abs(one.error_percent) for one in found) < 0.5


def test_constants_of_a_group_do_not_depend_on_its_measured_values():
    fair, _ = runs_of(all_cases())
    wild, _ = runs_of(all_cases(tpot_ms=900.0, ttft_ms=9e4))
    own = [(a, b) for (a, level), (b, _) in zip(fair, wild, strict=True) if level is Level.measured]
    of_group = [(dict(a.values), dict(b.values)) for a, b in own if a.case.group == GROUPS[0]]
    others = [(dict(a.values), dict(b.values)) for a, b in own if a.case.group != GROUPS[0]]
    assert len(of_group) == 6
    assert all(a == b for a, b in of_group)
    assert all(a != b for a, b in others)


def test_constants_for_a_gpu_as_if_never_measured_do_not_depend_on_any_of_its_rows():
    fair, _ = runs_of(all_cases())
    wild, _ = runs_of(all_cases(tpot_ms=900.0))  # on h100_sxm
    for (a, level), (b, _) in zip(fair, wild, strict=True):
        if level is Level.relative and a.case.gpu == "h100_sxm":
            assert a.values == b.values
            assert a.calibration == "h200_sxm"


def test_rows_of_the_same_model_and_gpu_in_another_table_are_left_out_too():
    closed = case_of(0, "llama", "h100_sxm")
    opened = replace(closed, table="experiments")
    assert opened.is_in(closed.group)
    assert closed.is_in(opened.group)
    assert replace(closed, gpu="h200_sxm").is_in(opened.group)  # a model is left out on all GPUs
    assert not case_of(0, "qwen", "h100_sxm").is_in(closed.group)


def test_profile_without_other_rows_gets_neutral_constants():
    lonely = [replace(case, profile="sglang") for case in all_cases() if case.group == GROUPS[0]]
    cases = [*(case for case in all_cases() if case.group != GROUPS[0]), *lonely]
    runs, _ = runs_of(cases)
    values = next(
        task.values for task, level in runs if task.case.profile == "sglang" and level is Level.measured
    )
    assert values["exposed_s"] == pytest.approx(KINDS["exposed_s"].neutral, abs=1e-5)
    assert values["iteration_s"] == pytest.approx(KINDS["iteration_s"].neutral)


def test_table_follows_from_the_errors():
    cases = [case_of(i, *group) for group in GROUPS[:2] for i in range(2)]
    errors = [10.0, -20.0, 30.0, -40.0]
    found = [
        Outcome(*pair, Level.measured, e)
        for pair, e in zip(((c, "TPOT") for c in cases), errors, strict=True)
    ]
    table = {(row.gpu, row.figure): row for row in expected_errors(found)}
    whole, own = table[ALL_GPUS, "TPOT"], table["h100_sxm", "TPOT"]
    assert (whole.rows, whole.groups, whole.median_percent, whole.is_widened) == (4, 2, 25.0, False)
    assert (own.rows, own.groups, own.basis_groups) == (2, 1, 2)
    assert own.is_widened
    assert own[8:10] == whole[8:10]  # its errors of 10 and 20 % are one group's
    assert whole.p90_percent > 40.0  # a third group may be worse than two are
    bad = table["h200_sxm", "TPOT"]
    assert bad.median_percent > whole.median_percent


def test_rows_count_once_however_often_they_are_simulated():
    case = case_of(0, *GROUPS[0])
    found = [Outcome(case, "TPOT", Level.measured, error) for error in (1.0, 2.0, 3.0)]
    assert {(row.rows, row.median_percent) for row in expected_errors(found)} == {(1, 2.0)}


@pytest.mark.parametrize(("share", "figures_of_tail"), [(0.0, ["TTFT p99"]), (0.02, [HELD_BACK]), (0.5, [])])
def test_tail_of_a_simulated_run_is_that_of_its_kind_of_runs(share, figures_of_tail):
    row = dict.fromkeys(cases_module.runs.METRICS, 30.0)
    case = replace(case_of(0, *GROUPS[0]), table="experiments", row=row | {"id": "r0"})
    tasks = [Task(case=case, values={}, number=number) for number in range(HELD_BACK_RUNS)]
    done = {}
    for task in tasks:
        figures_ms = dict.fromkeys(cases_module.runs.METRICS, 33.0 + 3 * task.number)
        done[task.name] = {"id": task.name, "status": "ok", **figures_ms, "held_back_share": share}
    predictions = Predictions(file=SimpleNamespace(rows=done), jobs=1)
    first = [(tasks[0], Level.measured)]
    found = list(outcomes(first, predictions))
    assert [one.figure for one in found if "TTFT p99" in one.figure] == figures_of_tail
    assert [one.error_percent for one in found] == [pytest.approx(10.0)] * len(found)
    more = list(repeated_tasks(first, predictions))
    is_repeated = figures_of_tail == [HELD_BACK]
    assert [task for task, _ in more] == (tasks[1:] if is_repeated else [])
    again = [(one.figure, one.error_percent) for one in outcomes(more, predictions)]
    assert again == [(HELD_BACK, pytest.approx(10.0 * n)) for n in range(2, 11) if is_repeated]


def test_errors_of_a_ratio_cancel_where_they_are_common():
    cases = [case_of(i, *GROUPS[0]) for i in range(3)]
    common = [Outcome(case, "throughput", Level.measured, 25.0) for case in cases]
    assert [one.error_percent for one in ratios(common)] == [0.0, 0.0]
    twice = [common[0]._replace(error_percent=0.0), common[1]._replace(error_percent=100.0)]
    assert [abs(one.error_percent) for one in ratios(twice)] in ([50.0], [100.0])


def test_each_step_changes_one_constant_within_its_bounds():
    for overlapped in (True, False):
        found = steps(SHIPPED, overlapped=overlapped)
        assert all(len(values) == 1 for values in found)
        for [(name, value)] in map(dict.items, found):
            assert KINDS[name].lower <= value <= KINDS[name].upper
            assert value != SHIPPED[name]
        names = [name for values in found for name in values]
        assert {*names} == {*NAMES} - (set() if overlapped else {"exposed_s"})
        assert names.count("iteration_s") == 2  # hidden behind the GPU, it has two slopes
    assert all(
        value > 0
        for values in steps(dict.fromkeys(SHIPPED, 0.0), overlapped=True)
        for value in values.values()
    )


def test_values_are_applied_to_every_part_of_a_scenario():
    scenario = base_scenario("llama-3.1-8b", "h100_sxm", "vllm")
    changed = with_values(scenario, SHIPPED | TRUE | {"start_share": 0.7})
    assert values_of(changed) == SHIPPED | TRUE | {"start_share": 0.7}
    assert values_of(scenario) != values_of(changed)
    assert owned_by(case_of(0, *GROUPS[0]), "start_share") == ("h100_sxm", "start_share")


def public_case(number, *, part="fit", arrivals="closed_loop", **measured):
    row = {"id": f"p{number}", "source": "blog", "part": part, "arrivals": arrivals, **measured}
    return replace(
        case_of(number, *GROUPS[0]),
        table="public",
        row=row,
        traffic=cases_module.SOURCES["public"].traffic_of(row),
    )


def test_public_rows_are_compared_in_their_own_statistics_and_traffic():
    measured = {"ttft_p50_ms": 50.0, "itl_mean_ms": 8.0, "ttft_p99_ms": 90.0, "requests_per_s": 2.0}
    simulated = {"ttft_p50_ms": 55.0, "itl_mean_ms": 6.0, "ttft_p99_ms": 99.0, "requests_per_s": 3.0}
    figures = {}
    for arrivals in ("closed_loop", "all_at_once", "poisson"):
        case = public_case(0, arrivals=arrivals, **measured)
        task = Task(case=case, values={})
        done = {task.name: {"id": task.name, "status": "ok", **simulated}}
        predictions = Predictions(file=SimpleNamespace(rows=done), jobs=1)
        found = outcomes([(task, Level.measured)], predictions)
        figures[case.traffic] = {one.figure: round(one.error_percent, 6) for one in found}
    both = {"TTFT": 10.0, "TPOT": -25.0, "throughput": 50.0}
    assert figures == {
        "closed": both,
        "burst": both | {"TTFT p99": 10.0},
        "open": {"TTFT": 10.0, "ITL": -25.0},
    }


def test_public_rows_determine_no_constant_and_those_for_testing_no_band():
    cases = [*all_cases(), *(public_case(i, part=part) for i, part in enumerate(("fit", "test")))]
    runs, rows = runs_of(cases)
    assert all(case.table == "silicon" for case in rows.cases)
    public_runs = [(task.case.key, task.values, level) for task, level in runs if task.case.table == "public"]
    assert sorted(public_runs, key=str) == [
        ("public/p0", {}, Level.measured),
        ("public/p1", {}, Level.measured),
    ]
    found = [Outcome(case, "TPOT", Level.measured, 10.0) for case in cases if not case.is_for_testing]
    wild = [Outcome(case, "TPOT", Level.measured, 999.0) for case in cases if case.is_for_testing]
    assert expected_errors([*found, *wild]) == expected_errors(found)
    [row] = [row for row in expected_errors(found) if (row.engine, row.gpu) == (ALL_ENGINES, ALL_GPUS)]
    assert (row.groups, row.rows) == (4, 19)


def test_coverage_is_printed_from_five_groups_on_and_for_rows_for_testing():
    models = [f"m{i}" for i in range(6)]
    own = [case_of(i, model, "h100_sxm") for model in models for i in range(4)]
    found = [Outcome(case, "TPOT", Level.measured, 10.0 + i % 7) for i, case in enumerate(own)]
    found += [Outcome(public_case(i, part="test"), "TPOT", Level.measured, 500.0) for i in range(2)]
    heading, *lines = coverage_lines(found)
    assert heading[:2] == ["traffic", "figure"]
    assert [line[:7] for line in lines] == [
        ["closed", "TPOT", "measured", "dense", engine, "6", "24"] for engine in ("*", "vllm")
    ]
    assert [line[-1] for line in lines] == ["0 / 0 of 2"] * 2
    for share in lines[0][7:9]:
        half, nine_in_ten = map(int, share.split(" / "))
        assert 30 <= half <= 70
        assert nine_in_ten >= 80
    assert len(coverage_lines(found[:16])) == 1  # four groups


def silicon_row(number, model, gpu):
    return {
        "id": f"s{number}",
        "source": "inferencemax",
        "backend": "vllm",
        "backend_version": "0.15.0",
        "model": model,
        "gpu": gpu,
        "weights": "bf16",
        "mode": "agg",
        "isl": 100 + number,
        "osl": 16,
        "concurrency": 2,
        "tp_size": 1,
        "pp_size": 1,
        "attention_dp_size": 1,
        "moe_tp_size": 1,
        "moe_ep_size": 1,
        "gpus": 1,
        "ttft_ms": 25.0,
        "tpot_ms": 6.5,
        "core": number != 5,
    }


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Makes a folder of tables with a few rows, public ones among them."""
    models = [("llama-3.1-8b", "h100_sxm"), ("llama-3.1-8b", "h200_sxm"), ("qwen3-8b", "h100_sxm")]
    rows = [silicon_row(2 * i + j, *model) for i, model in enumerate(models) for j in range(2)]
    run = {
        "id": "r0",
        "model": "llama-3.1-8b",
        "gpu": "H100",
        "tp": 1,
        "precision": "BF16",
        "stages": "4x5",
        "system_prompt_len": 100,
        "question_len": 50,
        "output_len": 5,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9,
        "prefix_caching": False,
    }
    run |= dict.fromkeys(cases_module.runs.METRICS, 30.0) | {"itl_mean_ms": 7.0}
    blog = [
        {
            **dict.fromkeys([*cases_module.public.COLUMNS, *cases_module.public.MEASURED]),
            **{"id": f"p{number}", "part": part, "source": "blog", "date": "2026-01", "backend": "vllm"},
            **{"backend_version": "0.15.0", "model": "llama-3.1-8b", "weights": "bf16", "gpu": "h100_sxm"},
            **{"gpus": 1, "tp_size": 1, "pp_size": 1, "attention_dp_size": 1, "lengths": "fixed"},
            **{"arrivals": "all_at_once", "num_requests": 3, "isl": 50, "osl": 5, "ttft_p50_ms": 20.0},
        }
        for number, part in enumerate(("fit", "test"))
    ]
    public = cases_module.SOURCES["public"]._replace(file="public.csv")
    pairs = [
        {
            **dict.fromkeys(cases_module.lora.COLUMNS),
            **{"id": f"l{number}", "source": "blog", "backend": "vllm", "engine": "vllm", "kernels": "vllm"},
            **{"model": "llama-3.1-8b", "weights": "bf16", "gpu": "h100_sxm", "tp_size": 1},
            **{"num_requests": 3, "isl": 50, "osl": 5, "max_loras": 1, "max_lora_rank": 16, "adapters": 1},
            **{"requests": "adapters", "baseline": "none", "compared": "tokens_per_s"},
            **{"without": 100.0, "with_adapters": 70.0, "used": used},
        }
        for number, used in enumerate(("true", "false"))
    ]
    monkeypatch.setitem(cases_module.SOURCES, "public", public)
    pairs_of = cases_module.SOURCES["lora"]._replace(file="lora.csv")
    monkeypatch.setitem(cases_module.SOURCES, "lora", pairs_of)
    tables = {"silicon": rows, "experiments": [run], "public": blog, "lora": pairs}
    for table, source in tables.items():
        path = tmp_path / "data" / cases_module.SOURCES[table].file
        path.parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(source).to_csv(path, index=False)
    return tmp_path / "data"


def test_one_command_writes_the_table_and_resumes(data, tmp_path, capsys, monkeypatch):
    table, out = tmp_path / "errors.csv", tmp_path / "predictions.csv"
    words = ["score", "--update-trust", f"measured={data}", f"out={out}", f"trust_table={table}", "jobs=1"]
    run, calls = Task.run, []

    def interrupted(task):
        calls.append(task.name)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return run(task)

    monkeypatch.setattr(Task, "run", interrupted)
    assert main(words) == 130
    assert not table.exists()
    assert "continue with the same settings and resume=true" in capsys.readouterr().out
    assert main([*words, "resume=true"]) == 0
    assert len(calls) == len({*calls}) + 1  # the interrupted one ran again, and no other one
    rows = read(table.read_text(), table)
    assert {(row.traffic, row.gpu, row.level.value) for row in rows} == {
        ("closed", "H100 SXM", "measured"),
        ("closed", "H200 SXM", "measured"),
        ("closed", "*", "measured"),
        ("closed", "*", "relative"),
        ("open", "H100 SXM", "measured"),
        ("open", "*", "measured"),
        ("burst", "H100 SXM", "measured"),
        ("burst", "*", "measured"),
        ("lora", "H100 SXM", "measured"),
        ("lora", "*", "measured"),
    }
    assert {row.rows for row in rows if row.traffic == "lora"} == {1}  # not the one that set a constant
    [one] = [r for r in rows if (r.figure, r.engine, r.gpu, r.level) == ("TPOT", "vllm", "*", Level.measured)]
    assert (one.rows, one.groups) == (5, 3)  # the row that is not core is left out
    text = capsys.readouterr().out
    line = next(
        line.split()
        for line in text.splitlines()
        if line.split()[:4] == ["closed", "measured", "dense", "TPOT"]
    )
    assert line[4] == "5"
    assert [words.split()[:2] for words in text.splitlines()].count(["vllm", "exposed_s"]) == 1


def test_refuses_a_single_group_and_another_level(data, tmp_path, capsys):
    words = ["score", "--update-trust", f"measured={data}", f"out={tmp_path / 'p.csv'}"]
    assert main([*words, "where=\"gpu == 'h200_sxm'\""]) == 2
    assert "closed-loop rows are of 1 group of a model and a GPU: must be" in capsys.readouterr().err
    for condition in ("where='bar('", "where='no_such_column>1'"):
        assert main([*words, condition]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"windtunnel: {condition.replace(chr(39), '')}: ")
        assert said.count("\n") == 1
    assert main([*words, "latency=spec"]) == 2
    assert "update_trust=true: states errors of latency=calibrated" in capsys.readouterr().err
    assert main(["score", "update_trust=true", f"measured={tmp_path}"]) == 2
    assert "no such file" in capsys.readouterr().err


def test_each_run_of_an_open_loop_has_a_seed_of_its_own(data):
    [case] = [case for case in cases_module.read_cases(data) if case.table == "experiments"]
    tasks = [Task(case=case, values={}, number=number) for number in (0, 1, 1, 2)]
    first, second, again, third = (task.run() for task in tasks)
    assert second == again
    assert len({task.name for task in tasks}) == 3
    assert len({run["ttft_mean_ms"] for run in (first, second, third)}) == 3
    assert first["held_back_share"] == 0


def test_predictions_are_finite_numbers_or_reasons():
    scenario = base_scenario("llama-3.1-8b", "h100_sxm", "vllm")
    row = silicon_row(0, "llama-3.1-8b", "h100_sxm")
    case = replace(case_of(0, *GROUPS[0]), row=row, values=values_of(scenario))
    fast, slow = (Task(case=case, values={"exposed_s": s}).run() for s in (0.0, 2e-3))
    assert slow["tpot_ms"] - fast["tpot_ms"] == pytest.approx(2.0, rel=0.05)
    relative = Task(case=case, values={}, calibration="a100_80gb_sxm").run()
    assert relative["status"] == "ok"
    assert np.isfinite(relative["tpot_ms"])
    refused = Task(case=replace(case, row=row | {"isl": 10**7}), values={}).run()
    assert "context length" in refused["status"]
    assert json.dumps(refused)
