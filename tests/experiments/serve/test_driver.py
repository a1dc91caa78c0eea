"""The clock of the server: it says when it is behind, and when the simulation has failed."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.serve.simulated.driver import LATE_S
from experiments.serve.simulated.fleet import SimulatedFleet
from tests.worlds.serving import complete, get, served, streamed, until_it_fails


def test_clients_are_told_that_the_simulation_has_failed(monkeypatch, caplog):
    fleets, begin = [], SimulatedFleet.__init__

    def noted(self, *arguments, **settings):
        begin(self, *arguments, **settings)
        fleets.append(self)

    monkeypatch.setattr(SimulatedFleet, "__init__", noted)

    async def test(client):
        assert (await complete(client))[0] == 200
        stream = streamed(client, max_tokens=2000)
        assert (await anext(stream))["choices"]
        body = {"prompt": "hello", "stream": True, "max_tokens": 2000}
        raw = await client.post("/v1/completions", json=body)
        assert (await raw.content.readuntil(b"\n\n")).startswith(b"data: ")

        def fail(*_):
            raise ZeroDivisionError("a policy that fails")

        monkeypatch.setattr(fleets[0].simulation.replicas[0].core.__class__, "plan", fail)
        events, error = await until_it_fails(stream)
        assert error is None
        assert events[-1]["error"]["code"] == 500
        *_, failure, last, end = (await raw.text()).split("\n\n")
        assert (json.loads(failure.removeprefix("data: ")), last, end) == (events[-1], "data: [DONE]", "")
        assert (await get(client, "/health"))[0] == 503
        assert (await complete(client))[0] == 503
        assert (await get(client, "/load"))[1] == {"server_load": 0}
        assert isinstance(fleets[0].driver.failure, ZeroDivisionError)

    served(test)
    assert "a policy that fails" in caplog.text


def test_a_server_that_cannot_keep_up_says_so(caplog):
    caplog.set_level("WARNING", "windtunnel.serve")

    async def test(client):
        many = (complete(client, max_tokens=1000, ignore_eos=True) for _ in range(20))
        assert {status for status, _ in await asyncio.gather(*many)} == {200}
        text = (await get(client, "/metrics"))[1]
        late_s = float(re.search(r"^windtunnel:serve_max_late_seconds (\S+)$", text, re.MULTILINE)[1])
        assert late_s > LATE_S

    served(test, "time_scale=1000000")
    assert "behind the clock" in caplog.text


def test_the_delay_of_tokens_is_counted_for_streams():
    async def test(client):
        assert (await complete(client))[0] == 200
        assert [each async for each in streamed(client, max_tokens=20)]
        text = (await get(client, "/metrics"))[1]
        for name in ("delay", "work"):
            count, total = (
                float(
                    re.search(rf"^windtunnel:serve_token_{name}_seconds_{each} (\S+)$", text, re.MULTILINE)[1]
                )
                for each in ("count", "sum")
            )
            assert 1 <= count <= 20
            assert 0 < total < 10 * count

    served(test)
