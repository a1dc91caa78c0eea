"""Times and tokens that a client records of a server that streams at known times."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.observe.figures import client_notes
from experiments.observe.scripted_server import Script, ScriptedServer
from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import capture_table, chunks_table
from sim.metrics.measured import request_metrics
from sim.metrics.output import check_conservation
from sim.records.requests import Status
from sim.workload.arrivals import AllAtOnce, ClosedLoop
from sim.workload.distributions import Fixed
from tests.experiments.observe.jumping_clock import JumpingLoop, run_jumping
from tests.experiments.observe.observing import NUM_QUESTIONS, figures, make_workload, records, run

SHARED_RUNS = Path(__file__).resolve().parents[4] / "shared" / "data" / "vllm_requests" / "requests.csv.gz"


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


def test_a_whole_batch_leaves_before_its_first_answer_comes():
    observed, server = run(
        lambda body: Script(first_s=1.5),
        make_workload(num_requests=150, arrivals=AllAtOnce(), output_tokens=1),
    )
    came_s = [served.came_s for served in server.served[NUM_QUESTIONS:]]
    assert max(came_s) - min(came_s) < 1.5
    assert {reply.status for reply in observed.load.replies} == {Status.finished}


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


def test_request_ids_need_not_be_in_the_order_of_sending():
    """A request's row is found by its id, whatever was sent first."""
    loop = ClosedLoop(num_users=3, think_time_s=Fixed(value=0.001))
    observed, _ = run(lambda body: Script(first_s=0.01), make_workload(num_requests=30, arrivals=loop))
    ids = [reply.request.request_id for reply in observed.load.replies]
    assert sorted(ids) == list(range(30))
    table = records(observed).requests.set_index("request_id")
    for reply in observed.load.replies:
        assert table.loc[reply.request.request_id, "arrival_s"] == reply.sent_s
