"""Many streams of `windtunnel serve` for minutes: no token is lost or doubled, and its memory does not grow.

    python -m experiments.bench.serve_load --streams 1000 --minutes 10 -- replicas=32

Each of the streams is a client that sends its next request when its last one has ended. It asks for the ids
of its tokens and for a known number of them, and checks that every token comes once: its ids are those of
the seed. At the end, the counts are compared with the counters of the server. Printed are tokens/s over SSE,
the CPU time of the server, its memory at the start, in the middle and at the end, how late its clock was, and
the delay of tokens behind their simulated time until they are written (`/metrics`), with the load of the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from experiments.app.terminal import plain_table, terminal_console
from experiments.bench.serve import Server, serving
from experiments.observe.reply import Reply
from experiments.serve.metrics.table import TOKEN_DELAY, TOKEN_WORK
from policies.core.request import Prompt, Request

SAMPLE_S = 5.0
"""Seconds between two readings of the server's memory."""
WARM_UP_SHARE = 0.1
"""Share of the run after which the memory at its start is read: connections and caches are there by then."""
SEEDS = 64
"""Different seeds of requests: requests with the same one have the same tokens."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts of the requests and tokens that the clients have seen, and of mistakes in them."""

    num_requests: int = 0
    num_tokens: int = 0
    mistakes: Counter[str] = field(default_factory=Counter)
    tokens_of_seed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, reply: Reply, seed: int, num_asked: int) -> None:
        """Checks a finished request, and counts its tokens."""
        self.num_requests += 1
        self.num_tokens += len(reply.token_ids)
        found = tuple(reply.token_ids)
        known = self.tokens_of_seed.setdefault(seed, found)
        shorter = min(len(known), len(found))
        if len(found) > len(known):
            self.tokens_of_seed[seed] = found
        if reply.error:
            self.mistakes[reply.error] += 1
        elif len(found) != num_asked:
            self.mistakes["a wrong number of tokens"] += 1
        elif found[:shorter] != known[:shorter]:
            self.mistakes["wrong tokens"] += 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the load; exits with status 1 if tokens are lost or doubled."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.serve_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--output", type=int, default=100, help="mean output tokens; they vary by a half")
    parser.add_argument("overrides", nargs="*", help="settings of the scenario")
    given = parser.parse_args(arguments)
    rows, mistakes = run(given)
    terminal_console().print(plain_table(rows))
    if mistakes:
        raise SystemExit(f"mistakes: {dict(mistakes)}")


def run(given: argparse.Namespace) -> tuple[list[list[str]], Counter[str]]:
    """Returns the rows of the printed table, and the mistakes with their counts."""
    with serving(*given.overrides) as server:
        before_s, began_s = server.cpu_s(), time.perf_counter()
        load = Load(server, given)
        asyncio.run(load.run())
        wall_s, used_s, metrics = time.perf_counter() - began_s, server.cpu_s() - before_s, server.metrics()
    counts = load.counts
    mistakes = counts.mistakes + differences(metrics, counts)
    seen = load.rss_mib
    places = [int(WARM_UP_SHARE * len(seen)), len(seen) // 2, len(seen) - 1]
    memory = ", ".join(f"{seen[place]:.0f}" for place in places)
    tenths = ", ".join(f"{seen[min(tenth * len(seen) // 10, len(seen) - 1)]:.0f}" for tenth in range(1, 11))
    grown = (seen[places[2]] - seen[places[1]]) * (1 << 20) / max(1, load.num_since_middle)
    return [
        ["streams, minutes", f"{given.streams}, {wall_s / 60:.1f}"],
        ["requests, tokens", f"{counts.num_requests:,}, {counts.num_tokens:,}"],
        ["mistakes", str(dict(mistakes)) if mistakes else "none"],
        ["tokens/s over SSE", f"{counts.num_tokens / wall_s:,.0f}"],
        ["server, CPU us/token", f"{1e6 * used_s / max(1, counts.num_tokens):.1f}"],
        ["server, share of a core", f"{used_s / wall_s:.2f}"],
        ["server, RSS at start, middle, end", f"{memory} MiB"],
        ["RSS after each tenth of the run", f"{tenths} MiB"],
        ["bytes per request since the middle", f"{grown:,.0f}"],
        ["latest event, s", f"{metrics['windtunnel:serve_max_late_seconds']:.3f}"],
        *[[f"tokens written within, p{p}", quantile(metrics, TOKEN_DELAY, p / 100)] for p in (50, 99)],
        *[
            [f"CPU time of the server till then, p{p}", quantile(metrics, TOKEN_WORK, p / 100)]
            for p in (50, 99)
        ],
        ["load average of the machine", f"{max(load.load_averages):.1f} at most"],
    ], mistakes


class Load:
    """The clients of one run."""

    def __init__(self, server: Server, given: argparse.Namespace) -> None:
        self.counts = Counts()
        self.rss_mib: list[float] = []
        self.load_averages: list[float] = []
        self.num_since_middle = 0
        self._server = server
        self._given = given

    async def run(self) -> None:
        """Runs all clients for the given time, and lets their last requests end."""
        duration_s = 60 * self._given.minutes
        self._end_s = asyncio.get_running_loop().time() + duration_s
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
        async with aiohttp.ClientSession(self._server.url, connector=connector, timeout=timeout) as session:
            sampling = asyncio.create_task(self._sample(duration_s))
            clients = (self._client(session, number) for number in range(self._given.streams))
            await asyncio.gather(*clients)
            await sampling

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        clock, given = asyncio.get_running_loop().time, self._given
        await asyncio.sleep(number * min(5.0, 6 * given.minutes) / given.streams)  # they begin one by one
        place = number
        while clock() < self._end_s:
            seed, num_tokens = place % SEEDS, given.output // 2 + (place * 7919) % max(1, given.output)
            body = {
                "prompt": [1 + (seed * 31 + each) % 1000 for each in range(given.prompt)],
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "seed": seed,
                "stream": True,
                "return_token_ids": True,
            }
            reply = Reply(request=Request(0, 0.0, Prompt(given.prompt)), num_asked=num_tokens, due_s=clock())
            try:
                async with session.post("/v1/completions", json=body) as response:
                    reply.http_status = response.status
                    async for data in response.content.iter_any():
                        reply.feed(data, clock())
                reply.close(clock())
            except (aiohttp.ClientError, OSError) as error:
                reply.fail(f"{type(error).__name__}: {error}", clock(), lost=True)
            self.counts.add(reply, seed, num_tokens)
            place += given.streams + 1

    async def _sample(self, duration_s: float) -> None:
        """Reads the memory of the server until the time is over."""
        num_before = 0
        loop = asyncio.get_running_loop()
        while loop.time() < self._end_s:
            await asyncio.sleep(min(SAMPLE_S, duration_s / 20))
            self.rss_mib.append(self._server.rss_bytes() / (1 << 20))
            self.load_averages.append(os.getloadavg()[0])
            if loop.time() < self._end_s - duration_s / 2:
                num_before = self.counts.num_requests
            self.num_since_middle = self.counts.num_requests - num_before


def differences(metrics: dict[str, float], counts: Counts) -> Counter[str]:
    """Returns by how much the counters of the server differ from what the clients have counted."""
    found = {
        "requests of the server": int(metrics["vllm:request_success_total"]) - counts.num_requests,
        "tokens of the server": int(metrics["vllm:generation_tokens_total"]) - counts.num_tokens,
    }
    return Counter({name: abs(number) for name, number in found.items() if number})


def quantile(metrics: dict[str, float], histogram: str, share: float) -> str:
    """Returns the smallest bound of a histogram of times that holds a share of the values."""
    name = f"{histogram}_bucket{{"
    counts = [(key[len(name) : -1], count) for key, count in metrics.items() if key.startswith(name)]
    total = counts[-1][1]
    bound = next(bound for bound, count in counts if count >= share * total)
    return f"{1e3 * float(bound):g} ms"


if __name__ == "__main__":
    main()
