"""The records of a server end when their memory is full, and the server goes on without growing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.serve.backend import Generation, Sampling
from experiments.serve.settings import ServeSettings, full_note
from experiments.serve.simulated.record_limit import MAX_DISCARDED_BYTES
from tests.worlds.serving import make_job

LIMIT = "serve.max_record_mib=0.25"


async def answered(fleet, number, num_tokens=4):
    """Returns the number of tokens of one request."""
    generation = Generation(
        request_id=f"r{number}",
        prompt_token_ids=list(range(number % 50, number % 50 + 40)),
        sampling=Sampling(max_tokens=num_tokens, ignore_eos=True),
        model="",
    )
    found = 0
    async with aclosing(fleet.generate(generation)) as deltas:
        async for delta in deltas:
            found += len(delta.token_ids)
    return found


def run(*overrides, num_rounds, together=50, num_tokens=4):
    """Serves rounds of requests; returns the fleet and its records."""
    fleet = make_job("time_scale=10000", "caching=prefix", *overrides).fleet()

    async def serve():
        fleet.driver.start()
        for start in range(0, num_rounds * together, together):
            numbers = range(start, start + together)
            found = await asyncio.gather(*(answered(fleet, each, num_tokens) for each in numbers))
            assert found == [num_tokens] * together
        fleet.driver.stop()

    asyncio.run(serve())
    return fleet


def test_everything_is_recorded_within_the_limit():
    fleet = run(num_rounds=2)
    assert fleet.records_full_s is None
    assert (fleet.simulation.close().requests["status"] == "finished").sum() == 100


def test_records_end_at_the_limit_and_the_server_goes_on(monkeypatch):
    monkeypatch.setattr("experiments.serve.simulated.record_limit.MIN_SPARE", 100)
    fleet = run(LIMIT, num_rounds=30)
    simulation, log = fleet.simulation, fleet.simulation.requests
    assert fleet.records_full_s is not None
    assert simulation.num_record_bytes < (1 << 18) + MAX_DISCARDED_BYTES
    records = simulation.close()
    assert records.end_s == fleet.records_full_s
    assert 50 <= len(records.requests) < 700
    assert set(records.requests["status"]) <= {"finished", "unfinished"}
    assert records.iterations["start_s"].max() <= records.end_s
    assert sum(log.has_arrived) <= len(records.requests) + 200  # of 1,500


def test_logs_that_are_not_recorded_are_dropped(monkeypatch):
    monkeypatch.setattr("experiments.serve.simulated.record_limit.MAX_DISCARDED_BYTES", 10_000)
    monkeypatch.setattr("experiments.serve.simulated.record_limit.CHECKED_EVERY", 1)
    fleet = run(LIMIT, num_rounds=12, num_tokens=20)
    assert fleet.records_full_s is not None
    sizes = [replica.recorder.num_bytes for replica in fleet.simulation.replicas]
    assert sum(sizes) < 200_000  # those of the last round; 850,000 in all
    fleet.simulation.close()


def test_the_summary_says_so():
    assert "serve.max_record_mib" in full_note(12.0)


def test_rejects_a_negative_limit():
    with pytest.raises(ValueError, match="max_record_mib=-1"):
        ServeSettings(max_record_mib=-1)
