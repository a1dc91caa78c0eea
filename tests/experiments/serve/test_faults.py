"""Faults that requests ask for by a header come as asked, and not on a server without them."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from experiments.serve.errors import ApiError
from experiments.serve.faults import Fault
from tests.experiments.serve.test_metrics import Scrape
from tests.worlds.serving import complete, get, served, streamed, until_it_fails

ON = "serve.faults=true"


def asked(fault):
    return {"headers": {"X-Fault": fault}}


def test_a_status_is_answered():
    async def test(client):
        status, body = await complete(client, **asked("status=429"))
        assert (status, body["error"]["code"]) == (429, 429)

    served(test, ON)


def test_a_connection_is_cut_at_once():
    async def test(client):
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await complete(client, **asked("reset"))
        assert (await complete(client))[0] == 200

    served(test, ON)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_is_cut_after_some_tokens(n):
    async def test(client):
        stream = streamed(client, max_tokens=2000, n=n, return_token_ids=True, **asked("reset_after=3"))
        events, error = await until_it_fails(stream)
        assert error is aiohttp.ClientPayloadError
        assert 3 <= sum(len(each["choices"][0]["token_ids"]) for each in events) < 2000

    served(test, ON, "time_scale=1")


def test_a_stream_stalls_and_its_connection_stays_open():
    async def test(client):
        stream = streamed(client, max_tokens=2000, ignore_eos=True, **asked("stall_after=2"))
        first = await anext(stream)
        events, error = await until_it_fails(stream, silence_s=0.5)
        assert error is TimeoutError
        assert all(event["choices"][0]["finish_reason"] is None for event in (first, *events))

    served(test, ON, "time_scale=1")


def test_a_delayed_request_is_answered_later():
    async def test(client):
        begin_s = time.monotonic()
        assert (await complete(client, **asked("delay=0.4")))[0] == 200
        assert time.monotonic() - begin_s >= 0.4

    served(test, ON)


def test_a_slow_request_takes_a_multiple_of_its_time():
    """Compared with its simulated latency, which is the same however busy the machine is."""

    async def test(client):
        assert (await complete(client, max_tokens=40))[0] == 200
        least_s = Scrape((await get(client, "/metrics"))[1]).total("e2e_request_latency_seconds_sum") / 4
        begin_s = time.monotonic()
        assert (await complete(client, max_tokens=40, headers={"X-Fault": "slow=5"}))[0] == 200
        assert time.monotonic() - begin_s > 4 * least_s > 0

    served(test, ON, "time_scale=4")


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        ("", "must be one of status, reset"),
        ("explode", "explode: must be one of"),
        ("status", "needs a value"),
        ("reset=1", "takes no value"),
        ("status=200", "from 400 on"),
        ("status=499", "from 400 on"),
        ("status=x", "status=x: must be a whole number"),
        ("slow=x", "slow=x: must be a number"),
        ("delay=nan", ">= 0 and <= 3600"),
        ("delay=-1", ">= 0 and <= 3600"),
        ("slow=0.5", ">= 1 and <= 1000"),
        ("slow=inf", ">= 1 and <= 1000"),
        ("reset_after=-1", ">= 0 tokens"),
    ],
)
def test_rejects_a_fault_that_it_does_not_know(fault, match):
    with pytest.raises(ApiError, match=match):
        Fault.of(fault)


@given(st.text(max_size=60))
def test_any_header_is_read_or_refused(text):
    """A refusal is an error of the client that names the header; what is read has at least one fault."""
    refusal = fault = None
    try:
        fault = Fault.of(text)
    except ApiError as error:
        refusal = (error.status, error.param)
    assert fault != Fault()
    assert (fault is None) == (refusal == (400, "X-Fault"))


def test_a_wrong_fault_is_an_error_of_the_client():
    async def test(client):
        assert (await complete(client, **asked("explode")))[0] == 400

    served(test, ON)


def test_a_server_without_faults_ignores_the_header():
    async def test(client):
        assert (await complete(client, **asked("status=503")))[0] == 200

    served(test)
