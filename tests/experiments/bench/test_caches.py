"""The benchmark of caches: its bound by hand, its figures on the real trace, and that it runs."""

import re
from pathlib import Path

import pytest

from experiments.bench import caches as bench_caches
from experiments.bench.caches import pool_for, requests_of, tokens_found, tokens_reusable
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.core.request import Prompt, Request, Segment

pytestmark = pytest.mark.slow

TRACE = Path(__file__).resolve().parents[4] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"


def asks(*prompts):
    """Returns requests whose prompts are (content, tokens) pieces."""
    return [
        Request(i, 0.0, Prompt(sum(n for _, n in pieces), tuple(Segment(*piece) for piece in pieces)))
        for i, pieces in enumerate(prompts)
    ]


def test_the_bound_counts_common_beginnings_in_whole_blocks_and_leaves_a_token():
    requests = asks(
        [(1, 40), (2, 10)],
        [(1, 40), (2, 10)],  # 49 of 50 tokens: 3 blocks
        [(1, 40), (2, 30)],  # 50: 3 blocks
        [(1, 40), (2, 30), (3, 5)],  # 70: 4 blocks
        [(1, 20), (2, 10)],  # 20, as content 2 stood elsewhere: 1 block
        [(2, 10), (1, 40)],  # nothing
        [(1, 40)],  # 39: 2 blocks
    )
    assert tokens_reusable(requests, 16) == 16 * (3 + 3 + 4 + 1 + 0 + 2)
    assert tokens_reusable(requests, 1) == 49 + 50 + 70 + 20 + 0 + 39
    assert tokens_found(pool_for(PrefixCaching(), requests), requests) == 16 * 13
    assert tokens_found(pool_for(Radix(), requests), requests) == 228


@pytest.mark.skipif(not TRACE.exists(), reason="the Mooncake trace is not here")
@pytest.mark.parametrize("caching", [PrefixCaching(), Radix(block_size=16)], ids=["prefix", "radix"])
def test_with_room_for_all_a_cache_finds_just_what_the_trace_repeats(caching):
    requests = requests_of(TRACE)
    assert len(requests) == 12_031
    found = tokens_found(pool_for(caching, requests), requests)
    assert found == tokens_reusable(requests, 16)
    assert found / sum(request.prompt.num_tokens for request in requests) == pytest.approx(0.3736, abs=1e-4)


def test_a_pool_that_is_too_small_is_named():
    requests = asks([(1, 100)])
    with pytest.raises(ValueError, match="a prompt of 100 tokens does not fit in 3 KV blocks"):
        tokens_found(pool_for(PrefixCaching(), asks([(1, 40)])), requests)


def test_it_prints_a_line_a_case(monkeypatch, capsys, tmp_path):
    small = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=20")
    monkeypatch.setattr(bench_caches, "PRESSED", {"small": small})
    bench_caches.main(["--repeat=1", f"--trace={tmp_path}/none.jsonl"])
    pools, simulator, _, line = capsys.readouterr().out.splitlines()
    assert pools.startswith("pools: not measured, there is no trace")
    assert simulator.startswith("simulator: not measured, there is no trace")
    assert re.fullmatch(r"small +\d+\.\d{3} +\d+ +0\.00 +0\.00% +20", line), line
