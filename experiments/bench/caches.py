"""CPU time of caches and preemption in the simulator: `python -m experiments.bench.caches [part ...]`.

pools: replays a trace with content hashes in the block pools of the prefix and radix caches alone, with room
for every block. Prints the CPU time per request and the prefix hit share, which must equal the share of
reusable tokens in the trace (`tokens_reusable`, computed from its hashes alone).
simulator: simulates the same trace.
pressure: simulates policies that preempt, swap and load KV, with too little memory for all requests.

The time covers making the traffic and simulating it. The fastest of several repetitions counts, because
machines are noisy. A bare SimPy timeout, timed beside each case, is the yardstick for the machine's speed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.bench.sim import SHARED_TRACES, timeout_s
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.decode_set import DecodeSet
from policies.core.request import Request
from policies.core.sequence import FinishReason
from policies.core.sequence import Sequence as EngineSequence
from sim.settings.scenario import build_run
from sim.workload.formats import MooncakeJsonl

MAX_CONTEXT = 1_000_000

ON_H100 = ("model=llama3_1_8b", "hardware=h100_sxm", "slo=none")
TRACE = (*ON_H100, "workload=mooncake_jsonl", "load=0.1")  # one replica just keeps up
SIMULATED = {
    "no cache": ("caching=paged",),
    "prefix": ("caching=prefix",),
    "radix": ("caching=radix",),
    "radix, blocks of 16": ("caching=radix", "caching.block_size=16"),
    "tiered, 200 GiB": ("caching=tiered", "caching.host_gib=200"),
}
SWAP = ("scheduling.preemption_mode=swap", "engine.swap_space_gib=64")
PRESSURE = (  # four times the load that 32k tokens of KV can serve, with lengths that vary widely
    *ON_H100,
    "workload=synthetic",
    "workload.num_requests=2000",
    "workload.arrivals.rate_per_s=20",
    "workload.lengths.prompt_tokens.mean=512",
    "workload.lengths.prompt_tokens.cv=1",
    "workload.lengths.output_tokens.mean=256",
    "workload.lengths.output_tokens.cv=2",
    "engine.num_kv_blocks=2048",
)
TALKS = (
    *ON_H100,
    "workload=conversation",
    "workload.num_conversations=500",
    "workload.arrivals.rate_per_s=10",
    "engine.num_kv_blocks=2048",
)
PRESSED = {
    "fcfs": PRESSURE,
    "fcfs, swap": (*PRESSURE, *SWAP),
    "mlfq": (*PRESSURE, "scheduling=mlfq"),
    "mlfq, swap": (*PRESSURE, "scheduling=mlfq", *SWAP),
    "mlfq, 64 active, swap": (*PRESSURE, "scheduling=mlfq", "scheduling.max_active=64", *SWAP),
    "s3": (*PRESSURE, "scheduling=s3", "prediction=buckets"),
    "srpt": (*PRESSURE, "scheduling=shortest_remaining", "prediction=oracle"),
    "conversations, prefix": (*TALKS, "caching=prefix"),
    "conversations, tiered": (*TALKS, "caching=tiered"),
    "conversations, tiered, disk": (*TALKS, "caching=tiered", "caching.host_gib=2", "caching.disk_gib=100"),
    "conversations, write through": (*TALKS, "caching=tiered", "caching.write=through"),
}
PARTS = ("pools", "simulator", "pressure")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts named on the command line, or all parts."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.caches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="part", help=f"{', '.join(PARTS)}; default: all"
    )
    parser.add_argument("--repeat", type=int, default=3, help="repetitions; the fastest counts")
    parser.add_argument(
        "--trace",
        type=Path,
        default=SHARED_TRACES / "mooncake_conversation.jsonl.gz",
        help="a trace in Mooncake's format",
    )
    options = parser.parse_args(arguments)
    for part in options.parts or PARTS:
        if part == "pressure":
            _print_runs(PRESSED, options.repeat)
        elif not options.trace.exists():
            print(f"{part}: not measured, there is no trace {options.trace}; name one with --trace=FILE")
        elif part == "pools":
            _print_pools(requests_of(options.trace), options.repeat)
        else:
            trace = (*TRACE, f"workload.path={options.trace}")
            _print_runs({name: (*trace, *own) for name, own in SIMULATED.items()}, options.repeat)


def requests_of(trace: Path) -> list[Request]:
    """Returns the requests of a trace with content hashes; prompts are not truncated."""
    source = MooncakeJsonl(path=trace).source(seed=0, max_model_len=MAX_CONTEXT)
    return [arrival.request for arrival in source.arrivals()]


def tokens_reusable(requests: Sequence[Request], block_size: int) -> int:
    """Returns the prompt tokens, in whole blocks, that an earlier prompt has as its prefix.

    At most all tokens of a prompt but the last count. This is what a cache without eviction finds if every
    prompt is cached before the next arrives. It is computed from the content hashes alone: a tree of hashes,
    each with the largest number of its tokens seen so far.
    """
    children: dict[tuple[int, int, int], int] = {}  # (node, its tokens before, content) -> node
    longest: list[int] = [0]
    total = 0
    for request in requests:
        node, before, num_common, is_common = 0, 0, 0, True
        for content_id, num_tokens in request.prompt.segments:
            name = (node, before, content_id)
            child = children.get(name)
            if child is None:
                child = children[name] = len(longest)
                longest.append(0)
            if is_common:
                num_common += min(num_tokens, longest[child])
                is_common = num_tokens <= longest[child]
            longest[child] = max(longest[child], num_tokens)
            node, before = child, num_tokens
        num_common = min(num_common, request.prompt.num_tokens - 1)
        total += num_common // block_size * block_size
    return total


def tokens_found(pool: BlockPool, requests: Sequence[Request]) -> int:
    """Returns the prompt tokens that a pool finds cached if the requests run one after the other."""
    decodes = DecodeSet(1, pool.block_size, {})
    total = 0
    for request in requests:
        num_tokens = request.prompt.num_tokens
        seq = EngineSequence(request, decodes, num_tokens + 1, FinishReason.stop, num_tokens + 1)
        num_cached = pool.num_cached(seq)
        if not pool.can_admit(seq, num_cached, True):
            raise ValueError(f"a prompt of {num_tokens} tokens does not fit in {pool.num_blocks} KV blocks")
        pool.admit(seq, num_cached)
        pool.grow(seq, num_cached, num_tokens)
        pool.computed(seq, num_tokens)
        pool.release(seq, num_tokens)
        total += num_cached
    return total


def pool_for(caching: Caching, requests: Sequence[Request]) -> BlockPool:
    """Returns a block pool with room for the prompts of all requests."""
    num_tokens = sum(request.prompt.num_tokens + caching.block_size for request in requests)
    return caching.pool(KvMemory(num_tokens // caching.block_size))


def _print_pools(requests: Sequence[Request], repeat: int) -> None:
    columns = "".join(f"{name:>9}" for name in ("timeouts", "found", "bound", "requests"))
    print(f"{'pool alone, room for all':30}{'us/request':>11}{columns}")
    for name, caching, served in (
        ("prefix, blocks of 16", PrefixCaching(), requests),
        ("radix, blocks of 16", Radix(block_size=16), requests),
        ("radix, blocks of 1", Radix(), requests),
    ):
        best_s, found = float("inf"), 0
        for _ in range(repeat):
            pool, start_s = pool_for(caching, served), time.process_time()
            found = tokens_found(pool, served)
            best_s = min(best_s, time.process_time() - start_s)
        bound = tokens_reusable(served, caching.block_size)
        num_tokens = sum(request.prompt.num_tokens for request in served)
        print(
            f"{name:30}{best_s / len(served) * 1e6:11.1f}{best_s / len(served) / timeout_s():9.0f}"
            f"{found / num_tokens:9.2%}{bound / num_tokens:9.2%}{len(served):9,}"
            + ("" if found == bound else "  NOT EQUAL"),
            flush=True,
        )


def _print_runs(cases: dict[str, tuple[str, ...]], repeat: int) -> None:
    print(
        f"{'whole simulator':30}{'ms/request':>11}{'timeouts':>9}{'preempted':>10}{'found':>9}{'requests':>9}"
    )
    for name, overrides in cases.items():
        cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]).compose(list(overrides))
        best_s = float("inf")
        for _ in range(repeat):
            scenario, _ = build_run(cfg)
            start_s = time.process_time()
            records = scenario.simulate(scenario.source())
            best_s = min(best_s, time.process_time() - start_s)
        table, count = records.requests, len(records.requests)
        found = table["cached_tokens"].sum() / table["prompt_tokens"].sum()
        print(
            f"{name:30}{best_s / count * 1e3:11.3f}{best_s / count / timeout_s():9.0f}"
            f"{table['preemptions'].sum() / count:10.2f}{found:9.2%}{count:9,}",
            flush=True,
        )


if __name__ == "__main__":
    main()
