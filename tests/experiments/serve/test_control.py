"""Prefix caches are emptied, servers sleep and wake, and tell their settings."""

from __future__ import annotations

import asyncio

import pytest

from tests.worlds.serving import complete, get, make_job, post, served, streamed, until_it_fails

PROMPT = list(range(100, 612))
CACHED = "caching=prefix"


async def num_cached(client) -> int:
    status, body = await complete(client, PROMPT)
    assert status == 200
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("caching", ["prefix", "radix"])
def test_a_reset_empties_the_prefix_caches(caching):
    async def test(client):
        assert await num_cached(client) == 0
        assert await num_cached(client) >= 480
        assert (await post(client, "/reset_prefix_cache", None))[0] == 200
        assert await num_cached(client) == 0
        assert await num_cached(client) >= 480

    served(test, f"caching={caching}")


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_refuses_requests_and_wakes_after_its_load_without_kv(level):
    pool = make_job(CACHED).scenario
    load_s = {1: pool.load_from_host_s, 2: pool.load_s}[level]

    async def test(client):
        await num_cached(client)
        assert (await post(client, f"/sleep?level={level}", None))[0] == 200
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": True}
        assert (await complete(client))[0] == 503
        assert (await get(client, "/health"))[0] == 200
        begin_s = asyncio.get_running_loop().time()
        assert (await post(client, "/wake_up", None))[0] == 200
        assert asyncio.get_running_loop().time() - begin_s >= 0.95 * load_s / 20
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": False}
        assert await num_cached(client) == 0

    served(test, CACHED)


def test_level_1_wakes_faster_than_level_2():
    pool = make_job().scenario
    assert 0.1 < pool.load_from_host_s < 0.5 * pool.load_s


def test_a_server_whose_parts_are_woken_sleeps_until_all_are_awake():
    async def test(client):
        await post(client, "/sleep", None)
        await post(client, "/wake_up?tags=weights", None)
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": True}
        await post(client, "/wake_up?tags=kv_cache", None)
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": False}

    served(test)


def test_requests_in_progress_are_aborted_by_a_sleep():
    async def test(client):
        stream = streamed(client, max_tokens=100_000, ignore_eos=True)
        first = await anext(stream)
        assert (await post(client, "/sleep", None))[0] == 200
        events, error = await until_it_fails(stream)
        assert error is None
        assert [first, *events][-1]["choices"][0]["finish_reason"] == "abort"

    served(test)


def test_requests_in_progress_end_before_a_sleep_that_waits():
    async def test(client):
        stream = streamed(client, max_tokens=200, ignore_eos=True, return_token_ids=True)
        events = [await anext(stream)]
        sleeping = asyncio.create_task(post(client, "/sleep?mode=wait", None))
        found, error = await until_it_fails(stream)
        events += found
        assert error is None
        assert sum(len(each["choices"][0]["token_ids"]) for each in events) == 200
        assert (await sleeping)[0] == 200
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": True}

    served(test)


def test_a_sleep_goes_on_to_its_end_if_its_client_goes_away():
    load_s = make_job().scenario.load_from_host_s

    async def test(client):
        stream = streamed(client, max_tokens=1000, ignore_eos=True)
        await anext(stream)
        sleeping = asyncio.create_task(post(client, "/sleep?mode=wait", None))
        while not (await get(client, "/is_sleeping"))[1]["is_sleeping"]:
            await asyncio.sleep(0.001)
        sleeping.cancel()
        _, error = await until_it_fails(stream)
        assert error is None
        begin_s = asyncio.get_running_loop().time()
        assert (await post(client, "/wake_up", None))[0] == 200
        assert asyncio.get_running_loop().time() - begin_s >= 0.95 * load_s / 20

    served(test)


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/sleep?level=3", 400, "level"),
        ("/sleep?level=one", 400, "level"),
        ("/sleep?mode=keep", 400, "mode"),
        ("/wake_up?tags=all", 400, "tags"),
        ("/reset_prefix_cache?reset_external=true", 501, "reset_external"),
        ("/reset_prefix_cache?reset_running_requests=1", 501, "reset_running_requests"),
    ],
)
def test_rejects_wrong_parameters(path, status, param):
    async def test(client):
        found, body = await post(client, path, None)
        assert (found, body["error"]["param"]) == (status, param)
        assert (await get(client, "/is_sleeping"))[1] == {"is_sleeping": False}

    served(test)


def test_server_info_has_the_settings():
    async def test(client):
        _, body = await get(client, "/server_info")
        assert body["config"]["replicas"] == 2
        assert body["config"]["model"]["name"].startswith("llama-3.1-8b")

    served(test, "replicas=2")
