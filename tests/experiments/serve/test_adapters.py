"""LoRA adapters are loaded and unloaded while a server runs; the engines treat them as their policy says."""

from __future__ import annotations

import asyncio

import pytest

from tests.worlds.serving import complete, get, post, served, streamed, until_it_fails

POLICIES = ("fixed_slots", "unified_paging", "exchange", "merged")
SLOTS = "adapters=fixed_slots"


async def load(client, name="sql", **fields):
    return await post(
        client, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "/etc/passwd", **fields}
    )


async def unload(client, name="sql"):
    return await post(client, "/v1/unload_lora_adapter", {"lora_name": name})


async def names(client):
    return [(each["id"], each["parent"]) for each in (await get(client, "/v1/models"))[1]["data"]]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_adapter_serves_requests_until_it_is_unloaded(policy):
    async def test(client):
        base = (await names(client))[0][0]
        assert (await complete(client, model="sql"))[0] == 404
        assert await load(client) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert await names(client) == [(base, None), ("sql", base)]
        status, body = await complete(client, model="sql")
        assert (status, body["model"]) == (200, "sql")
        assert (await complete(client))[0] == 200
        assert await unload(client) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        assert await names(client) == [(base, None)]
        assert (await complete(client, model="sql"))[0] == 404

    served(test, f"adapters={policy}", "replicas=2")


@pytest.mark.parametrize("policy", POLICIES)
def test_more_adapters_than_slots_take_turns(policy):
    async def test(client):
        for i in range(12):
            assert (await load(client, f"a{i}", rank=8))[0] == 200
        for i in [*range(12), 0]:
            assert (await complete(client, model=f"a{i}"))[0] == 200

    served(test, f"adapters={policy}")


def test_errors_of_loads_are_those_of_vllm():
    async def test(client):
        assert (await load(client, rank=65))[0] == 400
        assert (await load(client))[0] == 200
        status, body = await load(client)
        assert (status, body["error"]["message"]) == (400, "The lora adapter 'sql' has already been loaded.")
        status, body = await unload(client, "other")
        assert (status, body["error"]["type"]) == (404, "NotFoundError")
        assert body["error"]["message"] == "The lora adapter 'other' cannot be found."
        for wrong in ({}, {"lora_name": "x"}, {"lora_name": "", "lora_path": "p"}, {"lora_name": 3}):
            assert (await post(client, "/v1/load_lora_adapter", wrong))[0] == 400
            assert (await post(client, "/v1/unload_lora_adapter", {"lora_name": None}))[0] == 400
        for rank in (0, -1, 1.5, "x", 1 << 40):
            assert (await load(client, "ranked", rank=rank))[0] == 400
        assert (await load(client, (await names(client))[0][0]))[0] == 400

    served(test, SLOTS)


def test_an_adapter_is_replaced_and_its_requests_keep_the_old_one():
    async def test(client):
        await load(client)
        stream = streamed(client, model="sql", max_tokens=300, ignore_eos=True)
        events = [await anext(stream)]
        assert (await load(client, load_inplace=True, rank=8))[0] == 200
        assert (await complete(client, model="sql"))[0] == 200
        await unload(client)
        found, error = await until_it_fails(stream)
        assert error is None
        assert [*events, *found][-1]["choices"][0]["finish_reason"] == "length"
        assert (await load(client))[0] == 200
        assert (await complete(client, model="sql"))[0] == 200

    served(test, SLOTS)


def test_a_replaced_adapter_shares_no_kv_with_the_old_one():
    async def cached(client):
        _, body = await complete(client, list(range(100, 400)), model="sql")
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def test(client):
        await load(client)
        assert [await cached(client), await cached(client)] == [0, 288]
        await load(client, load_inplace=True)
        assert [await cached(client), await cached(client)] == [0, 288]

    served(test, SLOTS, "caching=prefix")


def test_a_replica_that_has_crashed_knows_the_adapters_of_its_time():
    async def test(client):
        await load(client)
        await asyncio.sleep(0.4)  # the crash and the restart have passed
        while (await get(client, "/health"))[0] == 503:
            await asyncio.sleep(0.01)
        assert (await complete(client, model="sql"))[0] == 200

    crash = ("failures=crash", "failures.events.0.at_s=4", "failures.events.0.duration_s=1")
    served(test, SLOTS, *crash)


def test_a_server_without_an_adapter_policy_says_so():
    async def test(client):
        status, body = await load(client)
        assert (status, "adapters=fixed_slots" in body["error"]["message"]) == (400, True)

    served(test)
