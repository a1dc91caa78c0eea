"""`windtunnel observe` against a server that streams at known times, dies, refuses and asks for keys."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.app import cli
from experiments.observe.figures import client_notes, observed_figures
from experiments.observe.scripted_server import Script, ScriptedServer
from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import capture_table, chunks_table, records_of
from sim.metrics.measured import request_metrics
from sim.metrics.settings import MetricsSettings
from sim.metrics.summary import check_conservation
from sim.records.requests import Status
from sim.records.run import RunRecords
from sim.settings.errors import ConfigError
from sim.workload.arrivals import AllAtOnce, ClosedLoop, Constant
from sim.workload.conversation import Conversation
from sim.workload.distributions import Fixed
from sim.workload.lengths import Lengths
from sim.workload.synthetic import Synthetic
from tests.experiments.observe.jumping_clock import JumpingLoop, run_jumping

SHARED_RUNS = Path(__file__).resolve().parents[4] / "shared" / "data" / "vllm_requests" / "requests.csv.gz"
NUM_QUESTIONS = 1
"""Requests with which the server is asked what it takes, if it takes all."""


def make_workload(
    num_requests: int = 20,
    rate_per_s: float = 100.0,
    prompt_tokens: int = 64,
    output_tokens: int = 5,
    **more: Any,
) -> Synthetic:
    lengths = Lengths(prompt_tokens=Fixed(value=prompt_tokens), output_tokens=Fixed(value=output_tokens))
    arrivals = more.pop("arrivals", Constant(rate_per_s=rate_per_s))
    return Synthetic(arrivals=arrivals, lengths=lengths, num_requests=num_requests, **more)


def run(
    script_of: Callable[[dict[str, Any]], Script] = lambda body: Script(),
    workload: Any = None,
    *,
    dies_at: int | None = None,
    **settings: Any,
) -> tuple[Observed, ScriptedServer]:
    """Observes a scripted server in the client's event loop; both sides read its clock, which does not wait.

    dies_at: index of the request at which the server dies.
    """
    servers = []

    def script_or_death(body: dict[str, Any]) -> Script:
        server = servers[0]
        if dies_at is not None and len(server.served) >= dies_at:
            server.die()
        return script_of(body)

    async def both() -> Observed:
        async with ScriptedServer(script_or_death) as server:
            servers.append(server)
            given = ObserveSettings(url=server.url, workload=workload or make_workload(), **settings)
            return await observe(given)

    return run_jumping(both()), servers[0]


def records(observed: Observed) -> RunRecords:
    return records_of(observed.load.replies, observed.load.end_s)


def figures(observed: Observed) -> dict[str, Any]:
    return observed_figures(
        records(observed), observed.load, slo=None, metrics=MetricsSettings(), late_s=0.01
    )


def test_recorded_times_are_the_servers():
    script_s = 0.1 + 0.03 * np.arange(5)
    observed, server = run(lambda body: Script(first_s=0.1, gap_s=0.03), make_workload(num_requests=12))
    served = server.served[NUM_QUESTIONS:]
    sent_s = np.array([one.sent_s for one in served]) - np.array([[one.came_s] for one in served])
    seen_s = np.array([np.array(reply.chunks().time_s) - reply.sent_s for reply in observed.load.replies])
    np.testing.assert_allclose(sent_s, np.broadcast_to(script_s, sent_s.shape), atol=1e-9)
    np.testing.assert_allclose(seen_s, sent_s, atol=1e-9)
    table = request_metrics(records(observed).requests, None)
    np.testing.assert_allclose(table["ttft_s"], 0.1, atol=1e-9)
    np.testing.assert_allclose(table["tpot_s"], 0.03, atol=1e-9)
    np.testing.assert_allclose(records(observed).gap_s, 0.03, atol=1e-9)


def test_no_chunk_is_seen_before_it_was_sent():
    """Here in real time, in which both sides may be late."""

    async def both() -> Observed:
        async with server:
            return await observe(ObserveSettings(url=server.url, workload=make_workload(num_requests=12)))

    server = ScriptedServer(lambda body: Script(first_s=0.03, gap_s=0.01))
    observed = asyncio.run(both())
    served = server.served[NUM_QUESTIONS:]
    sent_s = np.array([one.sent_s for one in served]) - np.array([[one.came_s] for one in served])
    seen_s = np.array([np.array(reply.chunks().time_s) - reply.sent_s for reply in observed.load.replies])
    assert (sent_s >= 0.03 + 0.01 * np.arange(5) - 1e-4).all()
    assert (seen_s >= sent_s).all()


def test_an_open_loop_does_not_wait_for_answers():
    observed, _ = run(lambda body: Script(first_s=0.5), make_workload(num_requests=20, rate_per_s=100))
    table = records(observed).requests
    assert table["arrival_s"].max() < table["first_token_s"].min()
    np.testing.assert_allclose(table["due_s"], np.arange(20) / 100 + table["due_s"].iloc[0], atol=1e-9)
    np.testing.assert_allclose(table["lag_s"], 0.0, atol=1e-9)


def test_a_closed_loop_waits_for_its_answers():
    loop = ClosedLoop(num_users=2, think_time_s=Fixed(value=0.02))
    observed, _ = run(lambda body: Script(first_s=0.03), make_workload(num_requests=8, arrivals=loop))
    table = records(observed).requests.sort_values("request_id")
    assert len(table) == 8
    for _, mine in table.groupby("session_id"):
        thought_s = mine["due_s"].to_numpy()[1:] - mine["finished_s"].to_numpy()[:-1]
        np.testing.assert_allclose(thought_s, 0.02, atol=1e-9)


def test_several_tokens_in_a_chunk_come_at_one_time():
    observed, _ = run(lambda body: Script(tokens_per_chunk=3, gap_s=0.03), make_workload(output_tokens=7))
    found = records(observed)
    check_conservation(found)
    assert set(found.requests["output_tokens"]) == {7}
    assert set(found.requests["chunks"]) == {3}
    assert np.count_nonzero(found.gap_s == 0) == 4 * 20  # 2 + 2 + 0 within the chunks of 3, 3 and 1
    chunks = chunks_table(observed.load.replies)
    assert chunks.groupby("request_id")["tokens"].apply(list).tolist() == [[3, 3, 1]] * 20
    note = "66.7 % of the chunks held several tokens (mean 2.33, at most 3)"
    assert any(note in text for text in client_notes(figures(observed)))


def test_without_a_count_for_each_chunk_the_total_is_spread_and_said_to_be():
    observed, _ = run(lambda body: Script(tokens_per_chunk=3, usage="last"), make_workload(output_tokens=7))
    assert set(records(observed).requests["output_tokens"]) == {7}
    assert any("spread evenly" in text for text in client_notes(figures(observed)))


def test_a_client_that_was_late_says_so():
    """Here it computes for 60 ms, every 20."""
    observed = run_jumping(slow_client())
    summary = figures(observed)
    assert summary["client"]["late_share"] > 0.5
    assert summary["client"]["stall"]["p99_s"] > 0.03
    notes = client_notes(summary)
    assert any("the client was the bottleneck" in text for text in notes)
    assert any("The client stalled for" in text for text in notes)


async def slow_client() -> Observed:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)

    async def hold() -> None:
        while True:
            await asyncio.sleep(0.02)
            loop.take(0.06)

    async with ScriptedServer() as server:
        holding = asyncio.create_task(hold())
        settings = ObserveSettings(url=server.url, workload=make_workload(num_requests=40))
        observed = await observe(settings)
        holding.cancel()
        return observed


def test_an_endpoint_that_dies_leaves_what_came_and_failures():
    observed, _ = run(
        lambda body: Script(first_s=0.02, gap_s=0.05),
        make_workload(num_requests=60),
        dies_at=30,
        give_up_after=8,
    )
    found = records(observed)
    counts = check_conservation(found)
    assert counts["finished"] >= 1  # those ahead by more than an answer, 0.22 s
    cut = found.requests[found.requests["failed"]]
    assert len(cut) == counts["aborted"] >= 8
    assert (cut["output_tokens"] > 0).any()  # tokens that came before the cut stay
    assert "connections in a row were lost" in observed.load.stopped
    assert counts["arrived"] < 60  # the rest was not sent
    notes = client_notes(figures(observed))
    assert any("requests failed" in text for text in notes)
    assert any("Stopped after" in text for text in notes)


def test_a_broken_stream_is_a_failure_of_its_request_alone():
    observed, _ = run(
        lambda body: Script(dies_after=2 if body["seed"] == 4 and body["prompt"][0] % 2 else None),
        make_workload(num_requests=30),
        seed=4,
    )
    failed = [reply for reply in observed.load.replies if reply.has_failed]
    assert 0 < len(failed) < 30
    assert {reply.num_tokens for reply in failed} == {2}
    assert not observed.load.stopped
    check_conservation(records(observed))


def test_a_refusal_is_rejected_and_no_failure():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) % 2 == 0 else Script(status=429, error="slow down"),
    )
    summary = figures(observed)
    assert summary["requests"] == {
        "arrived": 20,
        "finished": 10,
        "rejected": 10,
        "aborted": 0,
        "unfinished": 0,
    }
    assert summary["failed"] == {"count": 0, "by_error": {}, "refusals": {"429 slow down": 10}}


def test_an_error_of_the_server_is_a_failure():
    calls = iter(range(1000))
    observed, _ = run(lambda body: Script() if next(calls) % 2 == 0 else Script(status=503, error="dead"))
    assert figures(observed)["failed"]["by_error"] == {"dead": 10}


def test_a_silent_server_fails_after_the_timeout():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) == 0 else Script(first_s=5.0),
        make_workload(num_requests=3),
        silence_timeout_s=0.2,
    )
    assert [reply.error for reply in observed.load.replies] == ["no data for 0.2 s"] * 3
    assert observed.load.end_s < 2


def test_a_client_without_patience_aborts():
    calls = iter(range(1000))
    observed, _ = run(
        lambda body: Script() if next(calls) == 0 else Script(first_s=0.02, gap_s=0.2),
        make_workload(num_requests=5, patience_s=0.1),
    )
    replies = observed.load.replies
    assert {reply.status for reply in replies} == {Status.aborted}
    assert {reply.num_tokens for reply in replies} == {1}
    assert not any(reply.has_failed for reply in replies)
    assert [reply.ended_s - reply.sent_s for reply in replies] == pytest.approx([0.1] * 5)
    assert any("aborted by their client" in text for text in client_notes(figures(observed)))


def test_until_s_leaves_the_rest_unfinished():
    observed, _ = run(
        lambda body: Script(first_s=0.05, gap_s=0.1),
        make_workload(num_requests=1000, rate_per_s=50),
        until_s=0.4,
    )
    found = records(observed)
    counts = check_conservation(found)
    assert 5 <= counts["unfinished"] <= counts["arrived"] < 1000
    assert found.end_s >= 0.4


def test_a_whole_batch_leaves_before_its_first_answer_comes():
    observed, server = run(
        lambda body: Script(first_s=1.5),
        make_workload(num_requests=150, arrivals=AllAtOnce(), output_tokens=1),
    )
    came_s = [served.came_s for served in server.served[NUM_QUESTIONS:]]
    assert max(came_s) - min(came_s) < 1.5
    assert {reply.status for reply in observed.load.replies} == {Status.finished}


def test_later_turns_quote_the_servers_answers():
    talk = Conversation(
        arrivals=Constant(rate_per_s=50.0),
        turns=Fixed(value=2),
        message_tokens=Fixed(value=10),
        answer_tokens=Fixed(value=4),
        think_time_s=Fixed(value=0.01),
        system_prompt_tokens=Fixed(value=20),
        num_conversations=3,
    )
    _, server = run(workload=talk)
    prompts = [served.body["prompt"] for served in server.served[NUM_QUESTIONS:]]
    first, second = ([p for p in prompts if len(p) == n] for n in (30, 44))
    assert (len(first), len(second)) == (3, 3)
    assert {tuple(prompt[:20]) for prompt in prompts} == {tuple(first[0][:20])}
    assert {tuple(prompt[30:34]) for prompt in second} == {(7, 7, 7, 7)}  # what the scripted server says
    assert {tuple(p[:30]) for p in second} == {tuple(p) for p in first}


def test_chat_is_sent_words_of_about_the_right_length():
    """The scripted server counts two tokens a word and ten around a message."""
    observed, server = run(api="chat", workload=make_workload(prompt_tokens=110))
    sent = [len(served.body["messages"][0]["content"].split()) for served in server.served[-20:]]
    assert set(sent) == {50}
    table = records(observed).requests
    assert set(table["prompt_tokens"]) == {110}
    assert set(table["output_tokens"]) == {5}
    assert "Prompts are words of 2 tokens each plus 10 tokens of overhead" in observed.probed.notes[0]


def test_a_server_without_token_ids_is_sent_words():
    def script(body: dict[str, Any]) -> Script:
        return (
            Script(status=400, error="prompt: must be text") if isinstance(body["prompt"], list) else Script()
        )

    observed, _ = run(script)
    assert set(records(observed).requests["prompt_tokens"]) == {64}
    with pytest.raises(ConfigError, match=r"the server rejects them \(prompt: must be text"):
        run(script, prompts="token_ids")


def test_a_small_vocabulary_is_found():
    def script(body: dict[str, Any]) -> Script:
        return Script(status=400, error="out of vocabulary") if max(body["prompt"]) >= 500 else Script()

    observed, server = run(script)
    assert max(max(served.body["prompt"]) for served in server.served[-20:]) < 400
    assert "The server has a small vocabulary: token ids from 100 to 399 were sent." in observed.probed.notes


def test_options_that_a_server_refuses_are_not_sent_to_it():
    def script(body: dict[str, Any]) -> Script:
        unknown = {"ignore_eos", "min_tokens"} & body.keys()
        return Script(status=400, error=f"Unrecognized: {min(unknown)}") if unknown else Script()

    observed, server = run(script)
    assert not {"ignore_eos", "min_tokens"} & server.served[-1].body.keys()
    assert observed.probed.notes == (
        "The server does not support min_tokens, ignore_eos: outputs may be shorter than in the workload.",
    )


def test_answers_may_have_their_own_length():
    """Completions end after 16 tokens unless max_tokens is sent: it is what the context leaves."""
    observed, server = run(
        lambda body: Script(gap_s=0.0, tokens_per_chunk=1000),
        make_workload(num_requests=3),
        exact_output=False,
    )
    body = server.served[-1].body
    assert not {"ignore_eos", "min_tokens"} & body.keys()
    assert body["max_tokens"] == 4096 - 64
    assert figures(observed)["tokens"]["off_outputs"] == 0
    observed, server = run(workload=make_workload(max_tokens=5), exact_output=False)
    assert server.served[-1].body["max_tokens"] == 5
    observed, server = run(api="chat", exact_output=False)
    assert "max_tokens" not in server.served[-1].body
    assert set(records(observed).requests["output_tokens"]) == {16}


def test_the_servers_context_limits_the_traffic():
    observed, _ = run(workload=make_workload(num_requests=3, prompt_tokens=5000, output_tokens=3))
    assert observed.probed.max_model_len == 4096
    assert {reply.request.prompt.num_tokens for reply in observed.load.replies} == {4093}
    assert observed.source.notes.num_clipped == 3


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts scripted servers in a thread, for commands; each call returns the server's address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def begin(script_of: Callable[[dict[str, Any]], Script] = lambda body: Script(), **settings: Any) -> str:
        server = ScriptedServer(script_of, **settings)
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        servers.append(server)
        return server.url

    begin.servers = servers  # type: ignore[attr-defined]
    yield begin

    async def end() -> None:
        for server in servers:
            await server.__aexit__()

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


TRAFFIC = (
    "workload=synthetic",
    "workload/lengths=fixed",
    "workload.lengths.output_tokens.value=5",
    "workload.arrivals.rate_per_s=100",
)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs `windtunnel observe ...` in a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*arguments: str, num_requests: int = 20) -> tuple[int, str, str]:
        given = ["observe", *TRAFFIC, f"workload.num_requests={num_requests}", *arguments]
        code = cli.main(given)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_folder_holds_what_a_simulated_run_leaves(command, serve, tmp_path):
    code, shown, _ = command(f"url={serve()}", "hydra.run.dir=out", "slo.ttft_ms=5000", "slo.tpot_ms=500")
    assert code == 0
    assert "SLO chat attained: 100.0 % of 20 requests met it" in shown
    folder = tmp_path / "out"
    names = {file.name for file in folder.iterdir()}
    assert names == {
        *("config.yaml", "summary.json", "report.html"),
        *("requests.parquet", "chunks.parquet", "events.parquet", "requests.csv.gz"),
    }
    requests = pd.read_parquet(folder / "requests.parquet")
    summary = json.loads((folder / "summary.json").read_text())
    assert requests.attrs["config_digest"] == summary["config_digest"]
    assert len(summary["config_digest"]) == 32
    assert {"ttft_s", "tpot_s", "e2e_s", "slo_met", "status", "prompt_tokens", "due_s"} <= set(requests)
    assert summary["endpoint"]["model"] == "scripted"
    assert summary["itl"]["count"] == 80
    assert "cdn" not in (folder / "report.html").read_text()[:5000]
    assert cli.main(["explain", f"run={folder}", "request=3"]) == 0


def test_the_digest_is_of_the_configuration(command, serve, tmp_path):
    url = serve()
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert command(f"url={url}", f"hydra.run.dir={name}", f"seed={seed}", "report=false")[0] == 0
        digests.append(json.loads((tmp_path / name / "summary.json").read_text())["config_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_the_capture_has_the_columns_of_the_shared_runs():
    observed, _ = run(workload=make_workload(num_requests=6, prompt_tokens=40))
    table = capture_table(records(observed).requests, observed.load.replies, "mine")
    shared = (
        Path(__file__).resolve().parents[3].parent / "shared" / "data" / "vllm_requests" / "requests.csv.gz"
    )
    if shared.exists():
        with gzip.open(shared, "rt") as file:
            assert list(table) == file.readline().strip().split(",")
    assert table["id"].tolist() == [f"mine/{i}" for i in range(6)]
    assert table["prefix_block_ids"].tolist() == [f"{2 * i} {2 * i + 1}" for i in range(6)]
    np.testing.assert_allclose(
        table["ttft_ms"], (table["first_token_s"] - table["queued_s"]) * 1e3, atol=2e-3
    )
    np.testing.assert_allclose(table["tpot_ms"] * 4, table["e2e_ms"] - table["ttft_ms"], atol=4e-3)
    assert (table["queued_s"] >= table["arrival_s"]).all()


def test_all_that_a_dying_endpoint_was_answering_has_failed():
    """30 answers are under way, more than the failures in a row that end a run."""
    lasting = make_workload(num_requests=60, rate_per_s=200, output_tokens=100)
    observed, _ = run(lambda body: Script(gap_s=0.1), lasting, dies_at=30, give_up_after=4)
    statuses = {reply.status for reply in observed.load.replies}
    assert statuses == {Status.aborted}
    assert all(reply.has_failed for reply in observed.load.replies)
    assert len(observed.load.replies) >= 28
    assert "4 connections in a row were lost" in observed.load.stopped


def test_answers_that_hang_when_the_run_is_given_up_have_failed():
    """The first eight answers take 60 s; all later connections are cut."""
    calls = iter(range(1000))

    def script(body: dict[str, Any]) -> Script:
        return Script(gap_s=1.0) if next(calls) < 8 else Script(dies_after=0)

    workload = make_workload(num_requests=60, rate_per_s=50, output_tokens=60)
    observed, _ = run(script, workload, give_up_after=5)
    errors = [reply.error for reply in observed.load.replies]
    assert errors.count("still running when the run gave up") == 7  # one call was the probe's
    assert all(reply.has_failed for reply in observed.load.replies)
    assert 12 <= len(errors) < 30
    assert observed.load.end_s < 5


def test_a_dead_endpoint_is_reported_by_the_exit_code_and_the_result_is_kept(command, serve, tmp_path):
    calls = iter(range(1000))

    def script(body: dict[str, Any]) -> Script:
        server = serve.servers[0]
        if next(calls) >= 10 and any(len(served.sent_s) == 5 for served in server.served):
            server.die()
        return Script(first_s=0.01, gap_s=0.001)

    code, shown, errors = command(
        f"url={serve(script)}", "hydra.run.dir=out", "give_up_after=5", num_requests=400
    )
    assert code == 3
    assert "requests failed; the result is in out" in errors
    assert "requests failed:" in " ".join(shown.split())
    statuses = pd.read_parquet(tmp_path / "out" / "requests.parquet")["status"].value_counts()
    assert statuses["finished"] >= 1
    assert statuses["aborted"] >= 5


def test_nothing_but_refusals_is_reported_by_the_exit_code(command, serve):
    calls = iter(range(1000))
    url = serve(lambda body: Script() if next(calls) == 0 else Script(status=429, error="slow down"))
    code, shown, _ = command(f"url={url}", "report=false")
    assert code == 3
    assert "20 of 20 requests were rejected: 20 x 429 slow down." in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["url=localhost:8000"], "url=localhost:8000: must be an address such as http://localhost:8000"),
        ([], "url: must be given, for example url=http://localhost:8000"),
        (["url=http://me:secret@host"], "url: must not contain a password"),
        (["url=http://h", "api=chat", "prompts=token_ids"], "messages are text; choose prompts=text or"),
        (
            ["url=http://h", "token_ids=[9,9]"],
            "token_ids=[9,9]: must be two integers >= 0, the second",
        ),
        (
            ["url=http://h", "workload.branching.width=2"],
            "workload.branching.width=2: observe supports one output",
        ),
        (["url=http://h", "until_s=-1"], "until_s=-1: must be finite and > 0"),
        (["url=http://127.0.0.1:9"], "url=http://127.0.0.1:9: no connection"),
        (["url={url}/wrong"], "/wrong/v1/models returned status 404; OpenAI-compatible servers list"),
        (["url={url}", "served_model_name=script"], "nearest: scripted; allowed: scripted"),
        (["url={url}", "max_model_len=9999"], "max_model_len=9999: must be <= 4096, the server's limit"),
        (
            ["url={locked}"],
            "the server requires an API key (401); export OPENAI_API_KEY=..., or name another",
        ),
        (
            ["url={two}"],
            "served_model_name: must be given, because the server has several models; allowed: a, b",
        ),
        (["url={broken}"], "a request for 4 output tokens returned status 500: no engine"),
        (["url={mute}"], "the server rejects a plain request: none of your questions"),
    ],
)
def test_rejects_what_cannot_be_observed_in_one_line(command, serve, arguments, message):
    urls = {
        "url": serve(),
        "locked": serve(api_key="secret"),
        "two": serve(models=("a", "b")),
        "broken": serve(lambda body: Script(status=500, error="no engine")),
        "mute": serve(lambda body: Script(status=400, error="none of your questions")),
    }
    code, _, errors = command(*(argument.format(**urls) for argument in arguments))
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_the_key_is_sent_and_written_nowhere(command, serve, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    code, _, _ = command(f"url={serve(api_key='s3cret-key')}", "api_key_env=MY_KEY", "hydra.run.dir=out")
    assert code == 0
    assert not any(b"s3cret-key" in file.read_bytes() for file in (tmp_path / "out").iterdir())


def test_a_url_may_be_given_with_any_part_of_its_path():
    for given in (
        "http://h:1",
        "http://h:1/",
        "http://h:1/v1",
        "http://h:1/v1/chat/completions",
        "http://h:1/v1/completions/",
    ):
        assert ObserveSettings(url=given, workload=make_workload()).base_url == "http://h:1/v1"
    assert ObserveSettings(url="https://h/api", workload=make_workload()).base_url == "https://h/api/v1"


def test_help_and_simulate_do_without_the_client_library(command, monkeypatch):
    code = cli.main(["observe", "--help"])
    assert code == 0
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, _, errors = command("url=http://h")
    assert code == 2
    assert "pip install 'windtunnel[observe]'" in errors


def test_request_ids_need_not_be_in_the_order_of_sending():
    """A request's row is found by its id, whatever was sent first."""
    loop = ClosedLoop(num_users=3, think_time_s=Fixed(value=0.001))
    observed, _ = run(lambda body: Script(first_s=0.01), make_workload(num_requests=30, arrivals=loop))
    ids = [reply.request.request_id for reply in observed.load.replies]
    assert sorted(ids) == list(range(30))
    table = records(observed).requests.set_index("request_id")
    for reply in observed.load.replies:
        assert table.loc[reply.request.request_id, "arrival_s"] == reply.sent_s
