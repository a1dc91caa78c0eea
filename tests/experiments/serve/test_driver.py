"""A policy that fails ends the simulation; clients are told, and the server says why."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

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

        def fail(*_):
            raise ZeroDivisionError("a policy that fails")

        monkeypatch.setattr(fleets[0].simulation.replicas[0].core.__class__, "plan", fail)
        events, error = await until_it_fails(stream)
        assert error is None
        assert events[-1]["error"]["code"] == 500
        assert (await get(client, "/health"))[0] == 503
        assert (await complete(client))[0] == 503
        assert (await get(client, "/load"))[1] == {"server_load": 0}
        assert isinstance(fleets[0].driver.failure, ZeroDivisionError)

    served(test)
    assert "a policy that fails" in caplog.text
