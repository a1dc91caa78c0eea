"""Failures of the scenario come to clients as those of a real service."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.worlds.serving import complete, get, served, served_before_it_is_late, streamed, until_it_fails

CRASH = (
    "failures=crash",
    "failures.events.0.at_s=2",
    "failures.events.0.duration_s=2",
)
LONG = {"max_tokens": 800, "ignore_eos": True, "return_token_ids": True}
"""An output of some 6 s, so that the crash falls into it."""


def num_tokens(events) -> int:
    return sum(len(each["choices"][0]["token_ids"]) for each in events)


def test_a_crash_cuts_the_streams_that_have_begun_and_ends_with_a_restart():
    async def test(client):
        events, error = await until_it_fails(streamed(client, **LONG))
        assert error is aiohttp.ClientPayloadError
        assert 0 < num_tokens(events) < 800
        status, body = await complete(client)
        assert (status, body["error"]["message"]) == (503, "no replica takes requests")
        assert (await get(client, "/health"))[0] == 503
        while (await get(client, "/health"))[0] != 200:
            await asyncio.sleep(0.01)
        assert (await complete(client))[0] == 200

    served_before_it_is_late(test, *CRASH)


def test_a_stream_that_is_cut_leaves_the_fleet():
    async def test(client):
        await until_it_fails(streamed(client, **LONG))
        assert (await get(client, "/load"))[1] == {"server_load": 0}
        assert (await complete(client))[0] == 200

    served_before_it_is_late(test, *CRASH, "replicas=2")


def test_an_answer_that_has_not_begun_is_made_by_another_replica():
    async def test(client):
        status, body = await complete(client, **LONG)
        assert (status, body["usage"]["completion_tokens"]) == (200, 800)

    served_before_it_is_late(test, *CRASH, "replicas=2")


def test_an_answer_that_no_replica_can_make_again_is_refused():
    async def test(client):
        status, body = await complete(client, **LONG)
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")

    served_before_it_is_late(test, *CRASH)


@pytest.mark.parametrize("recovery", ["tokens", "kv"])
def test_a_stream_goes_on_in_another_replica_if_its_tokens_are_kept(recovery):
    async def test(client):
        events, error = await until_it_fails(streamed(client, **LONG))
        assert error is None
        assert num_tokens(events) == 800

    served_before_it_is_late(test, *CRASH, "replicas=2", f"recovery={recovery}")


def test_a_straggler_streams_more_slowly():
    async def test(client):
        for _ in range(2):  # round robin: the first replica is slow
            assert (await complete(client, max_tokens=100, ignore_eos=True))[0] == 200
        lines = (await get(client, "/metrics"))[1].splitlines()
        name = "vllm:request_decode_time_seconds_sum"  # in simulated seconds
        slow_s, usual_s = (float(line.split()[-1]) for line in lines if line.startswith(name))
        assert slow_s == pytest.approx(4 * usual_s, rel=1e-6)

    slow = ("failures=straggler", "failures.events.0.at_s=0", "failures.events.0.factor=4")
    served(test, *slow, "failures.events.0.duration_s=1e6", "replicas=2")


def test_a_server_that_starts_cold_is_healthy_once_a_replica_serves():
    async def test(client):
        assert (await get(client, "/health"))[0] == 503
        assert (await get(client, "/health/ready"))[0] == 503
        assert (await complete(client))[0] == 200  # it waits for the replica, as in `simulate`
        assert (await get(client, "/health"))[0] == 200
        assert (await get(client, "/health/ready"))[0] == 200

    served_before_it_is_late(
        test, "serve.cold_start=true", "cold_start=in_memory", "cold_start.provision_s=4"
    )
