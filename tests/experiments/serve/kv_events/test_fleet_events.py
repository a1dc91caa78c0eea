"""A subscriber of a simulated fleet's KV events knows at every moment what the prefix caches hold."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("zmq", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("msgspec", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import zmq
import zmq.asyncio
from aiohttp.test_utils import TestClient, TestServer

from experiments.serve.kv_events.block_chain import BlockChain
from experiments.serve.kv_events.publisher import END
from policies.core.request import Prompt, Request, Segment
from sim.engine.attachment import Attachment
from sim.settings.errors import ConfigError
from tests.worlds.kv_events import KnownBlocks, decoded
from tests.worlds.serving import complete, make_app, make_job, post

ON = (
    "model=llama3_1_8b",
    "serve.kv_events.enable_kv_cache_events=true",
    "serve.kv_events.endpoint=tcp://127.0.0.1:0",
    "serve.kv_events.replay_endpoint=tcp://127.0.0.1:0",
)


class Served:
    """A fleet that publishes its events, its client, and the index of each cache."""

    def __init__(self, client, fleet, publishers, indexes, asked):
        self.client, self.fleet, self.publishers, self.indexes = client, fleet, publishers, indexes
        self._asked = asked

    async def compare(self):
        """Asserts that each known finds what the cache of its replica finds, of all requests so far."""
        for index, known in self.indexes.items():
            await known.catch_up()
            pool = self.fleet.simulation.replicas[index].core.block_pool
            for request, tokens in self._asked.values():
                num_output = len(tokens) - request.prompt.num_tokens
                whole = (*request.prompt.segments, Segment(request.answer_id, num_output))
                probe = Request(10**6, 0.0, Prompt(len(tokens), whole), adapter=request.adapter)
                chain = self.chain(request, tokens, pool.block_size)
                found = known.num_found("GPU", chain, len(tokens) - 1)
                assert pool.peek(probe) == found * pool.block_size

    @staticmethod
    def chain(request, tokens, block_size):
        return BlockChain(tokens, block_size, lora=request.adapter, lora_path=request.adapter or "")


class Requests(Attachment):
    """Keeps the requests of a fleet with their tokens, prompt and output."""

    def __init__(self, fleet):
        self.found = {}
        self._tokens = {}
        self._fleet = fleet
        fleet.on_begin.append(self._begun)
        fleet.attach(lambda replica: replica.attach(self))

    def _begun(self, request_id, generation):
        self._tokens[request_id] = [
            *generation.prompt_token_ids,
            *self._fleet.answer(request_id).token_ids(0, self._fleet.answer(request_id).num_tokens),
        ]

    def sent(self, request):
        self.found[request.request_id] = request, self._tokens[request.request_id]


@asynccontextmanager
async def publishing(*overrides):
    """Yields a served fleet."""
    job = make_job(*ON, *overrides)
    fleet = job.fleet()
    fleet.driver.start()
    context = zmq.asyncio.Context()
    try:
        async with job.publishing(fleet) as publishers:
            requests = Requests(fleet)
            indexes = {
                index: await KnownBlocks.subscribe(context, publisher)
                for index, publisher in publishers.items()
            }
            server = TestServer(make_app(job, fleet), handler_cancellation=True)
            async with TestClient(server) as client:
                yield Served(client, fleet, publishers, indexes, requests.found)
    finally:
        fleet.driver.stop()
        context.destroy(linger=0)


def tokens(seed, num_tokens):
    return [(seed * 7919 + place * 31) % 5000 for place in range(num_tokens)]


CACHES = {
    "prefix": ("caching=prefix",),
    "radix": ("caching=radix", "caching.block_size=16"),
    "tiers": ("caching=tiered", "caching.host_gib=0.05", "caching.min_load_tokens=16"),
    "written through": ("caching=tiered", "caching.host_gib=0.05", "caching.write=through"),
}


@pytest.mark.parametrize("caching", CACHES.values(), ids=CACHES)
def test_an_index_of_the_events_finds_what_the_caches_find(caching):
    async def run():
        small = ("engine.num_kv_blocks=40", "engine.max_model_len=600", "replicas=2", "routing=round_robin")
        async with publishing(*caching, *small) as served:
            history = {}
            for turn in range(8):
                asks = {}
                for seed in range(turn, turn + 4):
                    asks[seed % 5] = [
                        *history.get(seed % 5, ()),
                        *tokens(seed % 5 + turn, 40 + 16 * (seed % 3)),
                    ]
                fields = {"max_tokens": 20, "return_token_ids": True}
                replies = await asyncio.gather(
                    *(complete(served.client, each, **fields) for each in asks.values())
                )
                assert {status for status, _ in replies} == {200}
                for seed, (_, body) in zip(asks, replies, strict=True):
                    history[seed] = [*asks[seed], *body["choices"][0]["token_ids"]][-150:]
                await served.compare()
            assert all(known.num_removed > 0 for known in served.indexes.values())
            assert any(known.hashes("GPU") for known in served.indexes.values())
            assert (await post(served.client, "/reset_prefix_cache", None))[0] == 200
            await served.compare()
            assert not any(known.hashes("GPU") for known in served.indexes.values())

    asyncio.run(run())


def test_tiers_below_the_gpu_have_media_of_their_own():
    async def run():
        small = ("engine.num_kv_blocks=40", "engine.max_model_len=600", *CACHES["tiers"])
        async with publishing(*small) as served:
            for seed in range(6):
                assert (await complete(served.client, tokens(seed, 300)))[0] == 200
            await served.compare()
            (known,) = served.indexes.values()
            assert set(known.blocks) == {"GPU", "CPU"}
            assert known.hashes("CPU") - known.hashes("GPU")
            chains = [BlockChain(tokens(seed, 300), 16) for seed in range(6)]
            assert any(known.num_found("CPU", chain, 300) for chain in chains)

    asyncio.run(run())


def test_a_crash_and_the_sleep_mode_clear_the_index():
    async def run():
        crash = ("failures=crash", "failures.events.0.at_s=30", "failures.events.0.replicas=[0]")
        for_ever = "failures.events.0.duration_s=1e6"
        async with publishing("caching=prefix", "replicas=2", *crash, for_ever) as served:
            for seed in range(6):
                assert (await complete(served.client, tokens(seed, 64)))[0] == 200
            await served.compare()
            assert served.indexes[1].hashes("GPU")
            while not served.indexes[0].num_cleared:
                await asyncio.sleep(0.02)
                await served.indexes[0].catch_up()
            await served.compare()
            assert not served.indexes[0].hashes("GPU")
            assert not served.indexes[1].num_cleared
            assert (await post(served.client, "/sleep", None))[0] == 200
            await served.compare()
            assert served.indexes[1].num_cleared == 1

    asyncio.run(run())


def test_clients_that_go_away_and_adapters_leave_the_index_right():
    adapters = (
        "adapters=fixed_slots",
        "caching=prefix",
        "engine.num_kv_blocks=60",
        "engine.max_model_len=900",
    )

    async def run():
        async with publishing(*adapters, "time_scale=1") as served:
            load = {"lora_name": "sql", "lora_path": "/nowhere"}
            assert (await post(served.client, "/v1/load_lora_adapter", load))[0] == 200
            asks = [
                asyncio.create_task(
                    complete(served.client, tokens(seed, 200), max_tokens=300, **(model if seed % 2 else {}))
                )
                for seed in range(4)
                for model in [{"model": "sql"}]
            ]
            await asyncio.sleep(0.3)
            for ask in asks:
                ask.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            while served.fleet.simulation.num_in_progress:
                await asyncio.sleep(0.01)
            await served.compare()
            assert (await complete(served.client, tokens(1, 64), model="sql"))[0] == 200
            await served.compare()
            (known,) = served.indexes.values()
            stored = [
                event for batch in known.batches for event in batch[1] if event["type"] == "BlockStored"
            ]
            named = [event for event in stored if event["lora_name"] == "sql"]
            assert named
            assert all(event["lora_id"] == 1 and event["extra_keys"][0][0] == "sql" for event in named)
            assert len(named) < len(stored)

    asyncio.run(run())


def test_messages_have_the_topic_a_number_and_a_batch():
    async def run():
        topic = 'serve.kv_events.topic="kv@{replica}@{model}"'
        async with publishing(topic, "replicas=2", "caching=prefix", "routing=round_robin") as served:
            for seed in range(4):
                assert (await complete(served.client, tokens(seed, 64)))[0] == 200
            for index, known in served.indexes.items():
                await known.catch_up()
                assert set(known.topics) == {f"kv@{index}@llama-3.1-8b".encode()}
                ts, events, rank = known.batches[0]
                assert ts > 1.7e9
                assert rank == index
                assert events[0]["block_size"] == 16
                assert events[0]["parent_block_hash"] is None
                assert events[0]["token_ids"][:3] in [tokens(seed, 3) for seed in range(4)]
                assert events[0]["group_idx"] == 0

    asyncio.run(run())


def test_missed_batches_are_repeated_on_request():
    async def run():
        async with publishing("caching=prefix", "serve.kv_events.buffer_steps=5") as served:
            for seed in range(8):
                assert (await complete(served.client, tokens(seed, 64)))[0] == 200
            (known,), (publisher,) = served.indexes.values(), served.publishers.values()
            await known.catch_up()
            last = publisher.num_published - 1
            context = zmq.asyncio.Context()
            socket = context.socket(zmq.DEALER)
            socket.connect(publisher.replay_endpoint)
            await socket.send_multipart([b"", b"nonsense?"])  # is ignored
            for start, expected in (
                (last - 2, [last - 2, last - 1, last]),
                (0, [*range(last - 4, last + 1)]),
            ):
                await socket.send_multipart([b"", start.to_bytes(8, "big")])
                found = []
                while True:
                    empty, topic, number, payload = await asyncio.wait_for(socket.recv_multipart(), 20)
                    assert empty == b""
                    if number == END:
                        assert (topic, payload) == (b"", b"")
                        break
                    found.append((int.from_bytes(number, "big"), decoded(payload)))
                assert [number for number, _ in found] == expected
                assert [batch for _, batch in found] == known.batches[-len(expected) :]
            context.destroy(linger=0)

    asyncio.run(run())


def test_an_endpoint_in_use_is_an_error_of_the_user():
    async def run():
        async with publishing("caching=prefix") as served:
            (publisher,) = served.publishers.values()
            job = make_job(*ON, "caching=prefix", f"serve.kv_events.endpoint={publisher.endpoint}")
            with pytest.raises(ConfigError, match=r"serve.kv_events.endpoint=tcp://127.*cannot be used"):
                async with job.publishing(job.fleet()):
                    pass

    asyncio.run(run())


def test_a_fleet_without_prefix_caches_has_no_events():
    async def run():
        job = make_job(*ON, "caching=paged")
        with pytest.raises(ConfigError, match="no prefix cache"):
            async with job.publishing(job.fleet()):
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("endpoint=http://here", "endpoint=http://here: must be tcp://HOST:PORT"),
        ("endpoint=tcp://127.0.0.1:70000", "must be tcp://HOST:PORT"),
        ("endpoint=ipc:///tmp/socket", "must be tcp://HOST:PORT"),
        ("replay_endpoint=5558", "replay_endpoint=5558: must be tcp://HOST:PORT"),
        ("replay_endpoint=tcp://127.0.0.1:5557", "must differ from endpoint"),
        ("publisher=kafka", "publisher=kafka: must be zmq"),
        ("buffer_steps=0", "buffer_steps=0: must be >= 1"),
        ("hwm=-1", "hwm=-1: must be >= 1"),
        ("hwm=many", "hwm"),
        ("connect=true serve.kv_events.endpoint=tcp://*:1", "must name a host"),
    ],
)
def test_rejects_a_wrong_setting(setting, message):
    overrides = [
        f"serve.kv_events.{each}" if "." not in each.split("=")[0] else each for each in setting.split()
    ]
    with pytest.raises(ConfigError, match=message):
        make_job(*overrides)
