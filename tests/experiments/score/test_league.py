"""The league: errors by hand, kept files, refusals, and what each tool is asked."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.score.league import peers, predict
from experiments.score.league.asked import FIGURES, Asked, RefusedError, sent_by
from experiments.score.league.command import cell, error_lines, refusals, tool_lines
from experiments.score.league.kept import FOLDER, Tool, kept_tools, predictions_of
from experiments.score.league.rows import COLUMNS, PATH, league_rows, sampled
from experiments.score.report import errors_by_group
from sim.settings.errors import ConfigError
from sim.workload.arrivals import AllAtOnce, ClosedLoop
from sim.workload.distributions import Fixed, Lengths
from sim.workload.synthetic import Synthetic

ROW = {
    "id": "a",
    "part": "test",
    "source": "ours",
    "date": "2025-11",
    "backend": "vllm",
    "backend_version": "0.11.0",
    "model": "qwen3-8b",
    "weights": "bf16",
    "gpu": "h100_sxm",
    "gpus": 1,
    "tp_size": 1,
    "pp_size": 1,
    "attention_dp_size": 1,
    "moe_ep_size": None,
    "arrivals": "closed_loop",
    "concurrency": 4,
    "rate_per_s": None,
    "num_requests": 8,
    "lengths": "fixed",
    "isl": 600,
    "osl": 20,
    "ttft_p50_ms": 40.0,
    "tpot_mean_ms": 8.0,
    "total_tokens_per_s": 9000.0,
}


def asked(**changes) -> Asked:
    return Asked(row={**ROW, **changes})


def measured(*ttft_ms: float) -> pd.DataFrame:
    """Returns rows of one group with these TTFTs, and no other figure."""
    rows = [
        {"id": f"row-{i}", "ttft_ms": value, "arch": "dense", "arrivals": "closed_loop", "gpu": "h100_sxm"}
        for i, value in enumerate(ttft_ms)
    ]
    return pd.DataFrame(rows).assign(tpot_ms=float("nan"), tokens_per_s=float("nan"), backend="vllm")


def kept(*ttft_ms: float | None, reason: str = "no tables of the GPU") -> pd.DataFrame:
    """Returns a tool's predictions of such rows; None: refused."""
    rows = [
        {
            "id": f"row-{i}",
            "ttft_ms": value,
            "cpu_s": 2.0,
            "estimated": 0.0,
            "status": "ok" if value else reason,
        }
        for i, value in enumerate(ttft_ms)
    ]
    return pd.DataFrame(rows).reindex(columns=COLUMNS)


def tools(**predictions) -> list[Tool]:
    return [Tool(name, "1.0", "2026-12-01", "", table) for name, table in predictions.items()]


def test_errors_are_those_computed_by_hand():
    """Errors of +10, -20 and +50 %: their median is 20, p90 44, bias +10; a refusal lowers the share only."""
    rows, own = measured(100, 100, 100, 100), kept(110, 80, 150, None)
    answered = own[own["status"] == "ok"].set_index("id")
    heading, *lines = error_lines(rows, {"a": answered})["ttft_ms"]
    assert heading == ["group", "rows", "a"]
    assert lines[0] == ["all", "4", "75 %: 20 / 44, +10"]
    assert ["arch dense", "4", "75 %: 20 / 44, +10"] in lines
    assert ["answered by all", "3", "100 %: 20 / 44, +10"] in lines


def test_tools_are_compared_on_the_rows_that_all_answered():
    rows = measured(100, 100, 100)
    own = {
        name: table[table["status"] == "ok"].set_index("id")
        for name, table in {"a": kept(110, 300, 120), "b": kept(90, None, 105)}.items()
    }
    lines = {line[0]: line[1:] for line in error_lines(rows, own)["ttft_ms"]}
    assert lines["all"][1:] == ["100 %: 20 / 164, +20", "67 %: 7.5 / 9.5, -2"]
    assert lines["answered by all"] == ["2", "100 %: 15 / 19, +15", "100 %: 7.5 / 9.5, -2"]


def test_a_tool_without_an_answer_has_a_dash():
    rows = measured(100)
    table = errors_by_group(rows.assign(ttft_ms_predicted=float("nan")), ["ttft_ms"], [])["ttft_ms"]
    assert cell({str(name): value for name, value in table.to_dict("records")[0].items()}) == "-"


def test_tools_are_listed_with_their_refusals_and_the_reason_why_they_were_not_run():
    rows = measured(100, 100)
    found = [*tools(a=kept(110, None)), Tool("b", "commit 1", "", "needs a compiler", None)]
    _, first, second = tool_lines(rows, found)
    assert first == ["a", "1.0", "2026-12-01", "2", "1", "0", "2"]
    assert second[:3] == ["b", "commit 1", "not run"]
    assert refusals(rows, found) == ["a: 1 row refused: no tables of the GPU", "b: not run: needs a compiler"]


def test_all_kept_files_have_an_answer_or_a_reason_for_every_row_of_the_league():
    rows = league_rows()
    found = {tool.name: tool for tool in kept_tools(rows["id"].tolist())}
    assert {"windtunnel", "aisimulate", "aiconfigurator", "blis", "vidur", "llmservingsim"} == set(found)
    assert set(rows["part"]) == {"test"}
    for tool in found.values():
        if tool.predictions is None:
            assert tool.not_run
            continue
        own = tool.predictions.set_index("id")
        is_answered = own["status"] == "ok"
        assert own.loc[~is_answered, list(FIGURES)].isna().all(axis=None)
        assert (own.loc[is_answered, "cpu_s"] > 0).all()
        stated = rows.set_index("id")[list(FIGURES)].notna()
        assert (own.loc[is_answered, list(FIGURES)].notna() == stated.loc[own.index][is_answered]).all(
            axis=None
        )
    assert {path.stem for path in FOLDER.glob("*.csv")} == {
        "tools",
        *(name for name, tool in found.items() if tool.predictions is not None),
    }


def test_a_cell_has_a_given_number_of_rows_at_most():
    table = pd.DataFrame({"id": list("abcd"), "source": "s", "model": "m", "gpu": ["h", "h", "h", "l"]})
    chosen = sampled(table, 2)["id"].tolist()
    assert len(chosen) == 3
    assert chosen == sorted(chosen)
    assert chosen[-1] == "d"
    assert set(sampled(table, 1)["id"]) < set(chosen)
    assert sampled(table.iloc[::-1], 2)["id"].tolist() == chosen[::-1]


def test_a_kept_file_without_a_row_of_the_league_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    kept(110, 120).to_csv(path, index=False)
    assert len(predictions_of(path, ["row-0", "row-1"])) == 2
    with pytest.raises(ConfigError, match=r"a\.csv: id=row-2: must be a row of the league"):
        predictions_of(path, ["row-0", "row-1", "row-2"])


def test_a_tool_has_a_command_or_a_reason(tmp_path):
    line = dict.fromkeys(("id", "version", "date", "install", "command", "settings", "not_run"), "")
    pd.DataFrame([{**line, "id": "a"}]).to_csv(tmp_path / "tools.csv", index=False)
    with pytest.raises(ConfigError, match="id=a: must have a command, or else the reason"):
        kept_tools([], tmp_path)


def test_every_tool_gets_the_same_requests_in_their_order():
    lengths = Lengths(prompt_tokens=Fixed(value=100), output_tokens=Fixed(value=5))
    loop = ClosedLoop(num_users=2, think_time_s=None, ramp_up_s=0.0)
    for arrivals in (loop, AllAtOnce()):
        workload = Synthetic(arrivals=arrivals, lengths=lengths, num_requests=5, max_tokens="exact")
        sent = sent_by(workload.source(seed=0, max_model_len=1000))
        assert [one[1:] for one in sent] == [(100, 5)] * 5


def test_aisimulate_gets_the_layout_the_limits_and_a_trace_without_shared_blocks(tmp_path):
    call = peers.aisimulate_call(asked(gpus=4, tp_size=2, max_num_seqs=64, memory_fraction=0.95), tmp_path)
    engine = call["engine"]
    assert (engine["model"], engine["hardware"], engine["backend"]) == ("Qwen/Qwen3-8B", "h100_sxm", "vllm")
    assert engine["gemm_quant_mode"] == "bfloat16"
    assert "moe_quant_mode" not in engine
    worker = engine["workers"]["aggregated"]
    assert worker["parallelism"] == {"replicas": 2, "tensor": 2, "pipeline": 1, "attention_data": 1}
    assert worker["scheduler"]["max_sequences"] == 64
    assert worker["kv_cache"]["capacity"] == {"memory_fraction": 0.95}
    assert call["traffic"]["load"] == {"type": "concurrency", "concurrency": 4}
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [(one["input_length"], one["output_length"]) for one in lines] == [(600, 20)] * 8
    hashes = [hash_id for one in lines for hash_id in one["hash_ids"]]
    assert len(hashes) == len(set(hashes)) == 16


def test_a_model_that_the_packages_lack_has_a_configuration(tmp_path):
    call = peers.aiconfigurator_call(asked(model="qwen2.5-7b"), tmp_path)
    config = json.loads((Path(call["model_path"]) / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["vocab_size"]) == (
        28,
        4,
        152064,
    )


def test_experts_are_cut_or_distributed_as_in_the_row(tmp_path):
    row = asked(model="qwen3-30b-a3b", tp_size=4, gpus=4, moe_ep_size=2, weights="fp8")
    call = peers.aiconfigurator_call(row, tmp_path)
    assert (call["tp_size"], call["moe_tp_size"], call["moe_ep_size"]) == (4, 2, 2)
    assert (call["gemm_quant_mode"], call["moe_quant_mode"]) == ("fp8_block", "fp8_block")
    assert (call["batch_size"], call["isl"], call["osl"]) == (4, 600, 20)


def test_a_constant_batch_has_a_throughput_by_its_latency():
    """4 clients, TTFT 50 ms and 19 gaps of 10 ms: 4 / 0.24 s = 16.7 requests/s of 620 tokens."""
    figures = peers.aiconfigurator_figures(asked(), {"ttft": 50.0, "tpot": 10.0})
    assert figures == pytest.approx({"ttft_ms": 50.0, "tpot_ms": 10.0, "tokens_per_s": 4 / 0.24 * 620})


def test_figures_of_aisimulate_are_the_statistics_that_the_row_states():
    found = dict.fromkeys(peers.AISIMULATE_FIGURES.values(), 1.0)
    found |= {"median_ttft_ms": 31.0, "mean_tpot_ms": 7.0, "completed_requests": 8, "duration_ms": 500.0}
    found |= {"output_throughput_tok_s": 300.0, "input_throughput_tok_s": 8000.0}
    figures = peers.aisimulate_figures(asked(), found)
    assert figures == {"ttft_ms": 31.0, "tpot_ms": 7.0, "tokens_per_s": 8300.0}
    with pytest.raises(RefusedError, match="not served"):
        peers.aisimulate_figures(asked(), {**found, "completed_requests": 7})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "rtx_4090"}, "no tables of the GPU"),
        ({"model": "smollm2-135m"}, "no configuration of the model"),
        ({"arrivals": "all_at_once"}, "no arrivals"),
    ],
)
def test_a_row_that_a_peer_refuses_has_its_reason(changes, reason, tmp_path):
    with pytest.raises(RefusedError, match=reason):
        peers.aiconfigurator_call(asked(**changes), tmp_path)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """Makes packages that stand in for aiconfigurator: it knows the mode HYBRID only."""
    package = tmp_path / "aiconfigurator" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "api.py").write_text(
        "from types import SimpleNamespace\n"
        "def cli_estimate(*, database_mode, batch_size, **others):\n"
        "    print('noise')\n"
        "    if database_mode != 'HYBRID' or batch_size > 8:\n"
        "        raise ValueError('no tables\\nat all')\n"
        "    return SimpleNamespace(ttft=50.0, tpot=10.0, backend_version='1')\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_a_peer_answers_from_its_own_process_and_says_that_it_estimated(peer):
    with peers.PeerProcess("aiconfigurator", peer) as process:
        found = process.predict(asked())
        assert (found["ttft_ms"], found["estimated"]) == (50.0, 1.0)
        assert found["cpu_s"] >= 0
        with pytest.raises(RefusedError, match=r"ValueError: no tables$"):
            process.predict(asked(concurrency=9, num_requests=9))


def test_predictions_are_kept_with_their_reasons_and_continued(peer, tmp_path, monkeypatch):
    rows = pd.DataFrame([ROW, {**ROW, "id": "b", "gpu": "rtx_4090"}])
    monkeypatch.setattr(predict, "league_rows", lambda: rows)
    out = tmp_path / "aiconfigurator.csv"
    assert predict.main(["aiconfigurator", str(out), str(peer)]) == 0
    found = predictions_of(out, ["a", "b"]).set_index("id")
    assert found.loc["a", "tpot_ms"] == 10.0
    assert found.loc["a", "status"] == "ok"
    assert found.loc["b", "status"] == "the package has no tables of the GPU"
    assert predict.main(["aiconfigurator", str(out), str(peer)]) == 2  # it is finished


def test_ours_is_the_prediction_of_score(tmp_path, monkeypatch):
    rows = pd.DataFrame([ROW])
    monkeypatch.setattr(predict, "league_rows", lambda: rows)
    assert predict.main(["windtunnel", str(tmp_path / "a.csv")]) == 0
    found = predictions_of(tmp_path / "a.csv", ["a"]).iloc[0]
    assert found["status"] == "ok"
    assert found["ttft_ms"] > 0
    assert found["tpot_ms"] > 0
    assert found["tokens_per_s"] > 0


def test_a_peer_needs_its_interpreter(tmp_path, capsys):
    with pytest.raises(SystemExit):
        predict.main(["aisimulate", str(tmp_path / "a.csv")])
    assert "PYTHON=None: must be an interpreter that has aisimulate" in capsys.readouterr().err


def test_the_command_prints_the_groups_and_a_condition_selects_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["score", "league", "where='gpu == \"h200_sxm\"'"]) == 0
    said = capsys.readouterr().out
    assert "gpu h200_sxm" in said
    assert "gpu h100_sxm" not in said
    assert main(["score", "league", "where='gpu == \"none\"'"]) == 2
    assert "no row of the league matches" in capsys.readouterr().err
    assert Path(PATH).is_file()
