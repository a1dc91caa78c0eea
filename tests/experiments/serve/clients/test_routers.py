"""Other projects' routers in front of `serve.expose=replicas`: each simulated engine looks like vLLM's.

Requests of seven groups come in turn, and those of a group share a long beginning. A router that knows what
each engine has cached sends a group to one engine; one that takes turns, or draws, spreads it over all four,
and each of these computes the beginning once. The first requests of the groups come together and have long
outputs, so that routers see loads. Only counts are compared, so that a busy machine does not matter.
"""

import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

NUM_GROUPS, NUM_ROUNDS, NUM_REPLICAS = 7, 6, 4
FLEET = (
    "model=llama3_1_8b",
    f"replicas={NUM_REPLICAS}",
    "caching=prefix",
    "serve.expose=replicas",
    "time_scale=2",
)
POLICIES = [
    ("sglang-router", ("launch",), "cache_aware", "round_robin"),
    ("vllm-router", (), "cache_aware", "power_of_two"),
]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def routing(program, arguments, policy, urls, log):
    """Yields the URL of a router in front of engines, once it serves."""
    port = free_port()
    command = [program, *arguments, "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield until_it_serves(f"http://127.0.0.1:{port}", process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_it_serves(url, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            complete(url, "are you there?")
            return url
        except (HTTPError, URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-4000:])


def complete(url, prompt, max_tokens=4):
    """Completes a prompt with so many tokens."""
    body = {"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    with urlopen(
        Request(f"{url}/v1/completions", json.dumps(body).encode(), headers), timeout=60
    ) as response:
        assert json.loads(response.read())["usage"]["completion_tokens"] == max_tokens


def counters(url):
    """Returns the values of the counters of one engine."""
    with urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total", "prompt_tokens_total")
    found = {name: re.search(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE) for name in names}
    counts = {name: float(match[1]) for name, match in found.items()}
    finished = re.findall(r"^vllm:request_success_total{.*} (\S+)$", text, re.MULTILINE)
    return counts | {"requests": sum(map(float, finished))}


def beginning(policy, group):
    return f"{group} {policy}: all prompts of this group have this long beginning. " * 20


def sent_through(running, program, arguments, policy, log):
    """Sends the groups through a router; returns what the counters of each engine grew by."""
    before = [counters(url) for url in running.replica_urls]
    with routing(program, arguments, policy, running.replica_urls, log) as url:
        with ThreadPoolExecutor(NUM_GROUPS) as pool:
            list(pool.map(lambda group: complete(url, beginning(policy, group), 300), range(NUM_GROUPS)))
        for turn in range(1, NUM_ROUNDS):
            for group in range(NUM_GROUPS):
                complete(url, f"{beginning(policy, group)} question {turn}")
    after = [counters(url) for url in running.replica_urls]
    return [{name: new[name] - old[name] for name in new} for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize(("name", "arguments", "aware", "unaware"), POLICIES, ids=lambda each: str(each))
def test_a_router_that_knows_prefixes_gets_more_cache_hits(
    server, program, tmp_path, name, arguments, aware, unaware
):
    router = program("others", name)
    shares = {}
    with server(*FLEET) as running:
        assert len(running.replica_urls) == NUM_REPLICAS
        for policy in (aware, unaware):
            grown = sent_through(running, router, arguments, policy, tmp_path / f"{policy}.log")
            requests = [engine["requests"] for engine in grown]
            assert sum(requests) >= NUM_GROUPS * NUM_ROUNDS, "and those with which the router was tried"
            assert sum(count > 0 for count in requests) >= 2, f"{policy} must spread requests: {requests}"
            if policy == "round_robin":
                assert max(requests) - min(requests) <= 1
            hits = sum(engine["prefix_cache_hits_total"] for engine in grown)
            shares[policy] = hits / sum(engine["prefix_cache_queries_total"] for engine in grown)
            print(name, policy, requests, shares)
    first = NUM_GROUPS / (NUM_GROUPS * NUM_ROUNDS)
    assert shares[aware] == pytest.approx(1 - first, abs=0.1), "each group is computed about once"
    assert shares[unaware] < shares[aware] - 0.15
