"""`windtunnel explain`: the phases of one request, and the message for a request without any."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.report.explain.comparison import compare, compared_rows, compared_sentence
from experiments.report.explain.narrative import heading
from experiments.report.explain.run_folder import read_request
from sim.report.numbers import milliseconds

SMALL = ("workload=poisson", "output.progress=false", "output.report=false")


def simulate(folder: Path, *arguments: str) -> pd.DataFrame:
    """Simulates, and returns the table of requests by request id."""
    asked = {argument.partition("=")[0] for argument in arguments}
    small = [choice for choice in SMALL if choice.partition("=")[0] not in asked]
    assert main(["simulate", *small, f"hydra.run.dir={folder}", *arguments]) == 0
    return pd.read_parquet(folder / "requests.parquet").set_index("request_id")


@pytest.fixture(scope="module")
def pressed(tmp_path_factory):
    """Simulates with preemptions; returns the run's folder and its requests."""
    folder = tmp_path_factory.mktemp("pressed")
    requests = simulate(
        folder,
        *("workload.num_requests=60", "workload.arrivals.rate_per_s=30", "engine.num_kv_blocks=400"),
        *("caching=prefix", "slo.ttft_ms=30"),
    )
    return folder, requests


@pytest.fixture
def explain(capsys):
    """Returns a function that gives what the command prints for a request of a run."""

    def run(folder, request_id):
        capsys.readouterr()
        assert main(["explain", f"run={folder}", f"request={request_id}"]) == 0
        return capsys.readouterr().out

    return run


def test_an_undisturbed_life(pressed, explain):
    folder, _ = pressed
    lines = [line.split() for line in explain(folder, 0).splitlines()]
    assert " ".join(lines[0]).startswith(
        "Request 0 on replica 0: finished. 512 prompt tokens, 256 output tokens"
    )
    text = explain(folder, 0)
    assert "arrived with 512 prompt tokens" in text
    assert "waiting: frontend" in text
    assert "admitted: 0 of 512 tokens found in the cache" in text
    assert "prefill in 1 iteration\n" in text.replace(" \n", "\n").replace("  ", "")
    assert "first token" in text
    assert "ms to spare (limit 50.0 ms); 100.0 % of this time: decoding" in text


def test_a_preemption_says_why_and_for_which_request(pressed, explain):
    folder, requests = pressed
    request_id = requests.index[requests["preemptions"] > 0][0]
    events = pd.read_parquet(folder / "events.parquet")
    lost = events[(events["request_id"] == request_id) & (events["event"] == "preempt")].iloc[0]
    text = explain(folder, request_id)
    by = "no KV memory for its next tokens" if lost["by"] == request_id else f"request {lost['by']}"
    assert by in text
    assert f"KV of {lost['tokens']:,} tokens freed" in text
    assert "waiting to be resumed: no KV memory" in text
    assert "first token after the preemption" in text
    assert "of its tokens recomputed" in text


def test_a_missed_term_says_by_how_much_and_what_dominated(pressed, explain):
    folder, requests = pressed
    late = requests[requests["ttft_s"] > 0.1]
    ttft_ms = late["ttft_s"].iloc[0] * 1e3
    text = explain(folder, late.index[0])
    assert f"ms, missed by {ttft_ms - 30:,.0f} ms (limit 30.0 ms);" in text
    assert "% of this time: waiting (no KV memory)" in text


def test_a_disaggregated_life_tells_both_replicas_and_the_hand_over_between(tmp_path, explain):
    """The whole KV is copied at the end, and arrives while another iteration is under way."""
    sent_whole = ("kv_transfer.transfer=at_end", "kv_transfer.first_token_at=prefill")
    slow = (*sent_whole, "workload.num_requests=20", "workload.arrivals.rate_per_s=10")
    requests = simulate(tmp_path, "pools=disaggregated", *slow)
    request_id = requests.index[requests["kv_transfer_s"] > 0][5]
    mine = requests.loc[request_id]
    events = pd.read_parquet(tmp_path / "events.parquet").query("request_id == @request_id")
    time_s = events.drop_duplicates("event").set_index("event")["time_s"]
    sent_ms, waited_ms = ((b - a) * 1e3 for a, b in pairwise(time_s[["load", "loaded", "adopt"]]))
    assert sent_ms == pytest.approx(mine["kv_transfer_s"] * 1e3) != 0
    text = " ".join(explain(tmp_path, request_id).split())
    source, target = mine["prefill_replica"], mine["replica"]
    in_order = [
        f"Request {request_id}, prefill on replica {source}, decode on replica {target}: finished",
        f"admitted on replica {source}: 0 of 512 tokens",
        "prefill in 1 iteration",
        f"prefill finished on replica {source}; KV of 512 of 513 tokens is kept until its transfer",
        f"waiting for replica {target}: ",
        f"got a slot on replica {target}; KV of 512 of 513 tokens is being sent from replica {source}",
        f"KV transfer {sent_ms:.3g} ms, then current iteration {waited_ms:.3g} ms",
        f"continues on replica {target}: KV of 512 of 513 tokens has arrived",
        "decoding",
    ]
    places = [text.find(line) for line in in_order]
    assert places == sorted(places), text
    assert places[0] >= 0, text


def test_rejected_aborted_and_unfinished_requests_have_a_story(tmp_path, explain):
    requests = simulate(
        tmp_path,
        *("workload=azure_conv_like", "workload.arrivals.rate_scale=4", "workload.patience_s=4"),
        *("engine.num_kv_blocks=150", "sim.until_s=15"),
    )
    by_status = requests.reset_index().groupby("status")["request_id"].first()
    assert {"rejected", "unfinished", "finished", "aborted"} <= set(by_status.index)
    assert "the run ended" in explain(tmp_path, by_status["unfinished"])
    assert "rejected: prompt of" in explain(tmp_path, by_status["rejected"])
    assert "TTFT: missed, because the request has no TTFT (limit" in explain(tmp_path, by_status["rejected"])
    unserved = requests[(requests["status"] == "aborted") & requests["scheduled_s"].isna()]
    text = explain(tmp_path, unserved.index[0])
    assert "left the queue without being served" in text
    assert "no KV memory" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=nowhere", "request=1"], "run=nowhere: no such folder"),
        (["request=1"], "run: must be given, for example run=outputs/simulate/..."),
        (["run=x"], "request: must be given, for example request=0"),
        (["run=x", "request=two"], "request=two: must be an integer >= 0"),
        (["run=x", "requests=2"], "requests: no such setting; nearest: request; allowed: run, request"),
    ],
)
def test_rejects_what_cannot_be_explained(arguments, message, capsys):
    assert main(["explain", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_request_is_reported_with_the_range(pressed, capsys):
    assert main(["explain", f"run={pressed[0]}", "request=60"]) == 2
    assert "request=60: no such request; the run has requests 0 to 59" in capsys.readouterr().err


def test_a_run_without_tables_says_how_to_get_them(tmp_path, capsys):
    assert (
        main(
            [
                "simulate",
                *SMALL,
                "workload.num_requests=2",
                "output.tables=false",
                f"hydra.run.dir={tmp_path}",
            ]
        )
        == 0
    )
    assert main(["explain", f"run={tmp_path}", "request=0"]) == 2
    assert "contains no requests.parquet, events.parquet; simulate it again with" in capsys.readouterr().err


def test_the_folder_of_a_sweep_names_a_run_in_it(tmp_path, capsys):
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "requests.parquet").touch()
    assert main(["explain", f"run={tmp_path}", "request=0"]) == 2
    assert f"contains several runs; choose one, such as run={tmp_path}/0" in capsys.readouterr().err


def test_help_says_what_it_needs(capsys):
    assert main(["explain", "--help"]) == 0
    assert "windtunnel explain run=DIR request=ID" in capsys.readouterr().out


def test_each_phase_stands_beside_the_runs_mean_and_p99(pressed, explain):
    folder, requests = pressed
    late = requests["ttft_s"].idxmax()
    text = explain(folder, late)
    times_ms = {
        "queue, from arrival to start": requests["scheduled_s"] - requests["arrival_s"],
        "prefill, from start to first token": requests["first_token_s"] - requests["scheduled_s"],
        "decode, from first to last token": requests["last_token_s"] - requests["first_token_s"],
        "TTFT": requests["ttft_s"],
        "waiting: no KV memory": requests["wait_memory_s"],
    }
    table = text[text.index("this request") :]
    for label, times_s in times_ms.items():
        row = next(line for line in table.splitlines() if line.strip().startswith(label))
        expected = (times_s[late], times_s.mean(), times_s.quantile(0.99))
        assert row.split()[-3:] == [milliseconds(value_s) for value_s in expected]
    assert "Compared with the 60 requests of the run: E2E is " in text
    assert "longer than on average: queue " in text


def test_phases_add_up_to_e2e_and_an_unfinished_request_has_no_sentence_on_missing_phases(tmp_path):
    simulate(tmp_path, "workload.num_requests=20", "workload.arrivals.rate_per_s=200", "sim.until_s=0.3")
    requests = pd.read_parquet(tmp_path / "requests.parquet").set_index("request_id")
    unserved = requests.index[requests["scheduled_s"].isna()]
    done = requests.index[requests["last_token_s"].notna()]
    for request_id in done[:3]:
        found = compare(read_request(tmp_path, int(request_id)))
        mine = requests.loc[request_id]
        total_s = sum(found[name].value for name in ("queue", "prefill", "decode"))
        assert total_s == pytest.approx(mine["last_token_s"] - mine["arrival_s"])
    assert len(done) or len(unserved)
    for request_id in unserved[:1]:
        story = read_request(tmp_path, int(request_id))
        assert compared_sentence(story) == ""
        assert compared_rows(story)[1][1] == "–"


def test_a_request_like_all_others_has_no_long_phase(tmp_path):
    simulate(tmp_path, "workload.num_requests=20", "workload.arrivals.rate_per_s=0.01")
    sentence = compared_sentence(read_request(tmp_path, 3))
    assert sentence.endswith("no phase takes much longer than on average.")


def test_the_heading_says_how_many_tokens_were_drafted(tmp_path):
    simulate(tmp_path, "workload.num_requests=5", "speculation=eagle3")
    bursts = pd.read_parquet(tmp_path / "bursts.parquet")
    num_kept = int(bursts["kept_tokens"][bursts["request_id"] == 3].sum())
    assert num_kept > 0
    assert f"output tokens ({num_kept:,} of them accepted draft tokens)" in heading(read_request(tmp_path, 3))
