"""The benches of the server print their tables, and find lost and doubled tokens."""

import argparse
import re
from collections import Counter

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from experiments.bench import serve, serve_load
from experiments.observe.reply import Reply
from policies.core.request import Prompt, Request


def reply_of(token_ids, error=""):
    reply = Reply(request=Request(0, 0.0, Prompt(1)), num_asked=3, due_s=0.0)
    reply.token_ids, reply.error = token_ids, error
    return reply


def test_wrong_tokens_are_mistakes():
    counts = serve_load.Counts()
    counts.add(reply_of([1, 2, 3]), seed=0, num_asked=3)
    counts.add(reply_of([1, 2, 3, 4]), seed=0, num_asked=4)
    counts.add(reply_of([5, 6, 7]), seed=1, num_asked=3)
    assert not counts.mistakes
    counts.add(reply_of([1, 2]), seed=0, num_asked=3)
    counts.add(reply_of([1, 2, 2, 3]), seed=0, num_asked=3)
    counts.add(reply_of([1, 3, 2]), seed=0, num_asked=3)
    counts.add(reply_of([1], "cut"), seed=0, num_asked=3)
    assert counts.mistakes == {"a wrong number of tokens": 2, "wrong tokens": 1, "cut": 1}


def test_counters_that_differ_are_mistakes():
    counts = serve_load.Counts(num_requests=2, num_tokens=7)
    counters = {"vllm:request_success_total": 2.0, "vllm:generation_tokens_total": 7.0}
    assert serve_load.differences(counters, counts) == Counter()
    counters |= {"vllm:generation_tokens_total": 3.0, "vllm:request_success_total": 1.0}
    assert serve_load.differences(counters, counts) == {
        "requests of the server": 1,
        "tokens of the server": 4,
    }


@pytest.mark.slow
def test_streams_have_all_their_tokens():
    given = argparse.Namespace(streams=20, minutes=0.05, prompt=20, output=20, overrides=["time_scale=2"])
    rows, mistakes = serve_load.run(given)
    assert not mistakes
    values = dict(rows)
    assert int(values["requests, tokens"].split(",")[0]) >= 20
    assert re.fullmatch(r"[0-9.]+ ms", values["tokens written within, p99"])


@pytest.mark.slow
def test_latencies_are_compared(capsys):
    serve.main(["--rate", "5", "--seconds", "2", "--output", "8", "--", "replicas=2"])
    table = capsys.readouterr().out
    assert all(name in table for name in ("TTFT", "TPOT", "E2E", "own ms"))
