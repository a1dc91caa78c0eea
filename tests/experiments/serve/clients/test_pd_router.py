"""vllm-router uses KV of replicas as that of engines of vLLM: it hands it over, and follows its events."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")
requests = pytest.importorskip("requests", reason="asks the router")

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

POOLS = (
    "pools=disaggregated",
    "pools.prefill.replicas=2",
    "pools.decode.replicas=2",
    "serve.expose=replicas",
    "serve.duration_s=200",
)
NUM_REQUESTS = 8


def free_ports(count):
    """Returns the first of `count` consecutive free ports."""
    for base in range(20_000 + os.getpid() % 5000, 60_000, 10):
        try:
            for port in range(base, base + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")


@contextmanager
def running(*command, folder, url):
    """Runs a server until the end of the block; yields when it is healthy."""
    with (folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        until = time.monotonic() + 120
        while True:
            try:
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except requests.ConnectionError:
                pass
            assert process.poll() is None, (folder / "log.txt").read_text()[-3000:]
            assert time.monotonic() < until, (folder / "log.txt").read_text()[-3000:]
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def metric(url, name):
    text = requests.get(f"{url}/metrics", timeout=20).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}\{{.*\}} ([\d.e+]+)$", text, re.MULTILINE))


def test_vllm_router_hands_kv_from_prefill_to_decode_replicas(program, tmp_path):
    router = program("others", "vllm-router")
    windtunnel = str(Path(sys.executable).with_name("windtunnel"))
    base = free_ports(7)
    urls = [f"http://127.0.0.1:{base + 1 + index}" for index in range(4)]
    front = f"http://127.0.0.1:{base + 5}"
    serve = (windtunnel, "serve", "model=llama3_1_8b", "hardware=h100_sxm", f"port={base}", *POOLS)
    prefill, decode = urls[:2], urls[2:]
    workers = [word for url in prefill for word in ("--prefill", url)]
    workers += [word for url in decode for word in ("--decode", url)]
    route = (router, "--vllm-pd-disaggregation", "--kv-connector", "nixl", *workers)
    route += ("--host", "127.0.0.1", "--port", str(base + 5), "--policy", "round_robin")
    route += ("--prometheus-port", str(base + 6))
    with running(*serve, folder=tmp_path, url=urls[0]), running(*route, folder=tmp_path, url=front):
        for number in range(NUM_REQUESTS):
            body = {"model": "llama-3.1-8b", "prompt": list(range(number, number + 500)), "max_tokens": 6}
            reply = requests.post(f"{front}/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 6
        for url in prefill:
            assert metric(url, "request_success_total") == NUM_REQUESTS / 2
            assert metric(url, "generation_tokens_total") == NUM_REQUESTS / 2
        for url in decode:
            assert metric(url, "request_success_total") == NUM_REQUESTS / 2
            assert metric(url, "external_prefix_cache_hits_total") == 499 * NUM_REQUESTS / 2
            assert metric(url, "kv_cache_usage_perc") == 0


def test_vllm_router_follows_the_kv_events_of_replicas(program, tmp_path):
    """Prompts go to the replica that has their prefix, though the router has not sent it there."""
    router = program("others", "vllm-router")
    windtunnel = str(Path(sys.executable).with_name("windtunnel"))
    base = free_ports(10)
    urls = [f"http://127.0.0.1:{base + 1 + index}" for index in range(2)]
    front = f"http://127.0.0.1:{base + 3}"
    events = [f"tcp://127.0.0.1:{base + 5 + index}" for index in range(2)]
    serve = (windtunnel, "serve", "model=llama3_1_8b", "hardware=h100_sxm", "replicas=2", "caching=prefix")
    serve += (f"port={base}", "serve.expose=replicas", "serve.duration_s=200")
    serve += ("serve.kv_events.enable_kv_cache_events=true", f"serve.kv_events.endpoint={events[0]}")
    serve += (f"serve.kv_events.replay_endpoint=tcp://127.0.0.1:{base + 7}",)
    route = (router, "--policy", "kv_aware", "--kv-event-model", "llama-3.1-8b", "--worker-urls", *urls)
    for url, endpoint in zip(urls, events, strict=True):
        route += ("--kv-event-source", f"{url}={endpoint}")
    route += ("--host", "127.0.0.1", "--port", str(base + 3), "--prometheus-port", str(base + 4))

    def cached_tokens(url, seed, last):
        prompt = [*((seed * 1013 + place * 17) % 30_000 for place in range(640)), last]
        body = {"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": 4}
        reply = requests.post(f"{url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running(*serve, folder=tmp_path, url=urls[1]), running(*route, folder=tmp_path, url=front):
        time.sleep(1)  # the router subscribes
        for seed in range(8):
            assert cached_tokens(urls[seed % 2], seed, last=1) == 0
        time.sleep(1)  # the events arrive
        assert [cached_tokens(front, seed, last=2) for seed in range(8)] == [640] * 8
