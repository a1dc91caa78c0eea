"""Strategies of hypothesis that draw policies, with settings that matter to a few requests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from policies.batching.chunked import Chunked
from policies.batching.inflight import (
    CAPACITY_SCHEDULER_POLICIES,
    CONTEXT_CHUNKING_POLICIES,
    InFlight,
)
from policies.batching.paced_prefills import PacedPrefills
from policies.batching.partial_prefills import PartialPrefills
from policies.batching.sglang import Sglang
from policies.batching.slots import Slots
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Dynamic, OneAtATime, Static
from policies.batching.tgi import Tgi
from policies.batching.whole_prompts import Orca, PrefillFirst
from policies.caching.adaptive import FastGen
from policies.caching.contiguous import Contiguous
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.selective import H2o, SnapKv
from policies.caching.streaming import StreamingLlm
from policies.caching.tiered import GIB, Tiered
from policies.routing.adapter_aware import AdapterAffinity, Dedicated
from policies.routing.load_balancing import (
    Freest,
    JoinShortestKv,
    LeastOutstanding,
    PowerOfTwo,
    Random,
    RoundRobin,
    Weighted,
)
from policies.routing.prefix_aware import PrefixAffinity, PrefixIndex, WeightedScore
from policies.routing.session_affinity import SessionAffinity
from policies.routing.slo_aware import CostAware, SloAware
from policies.scheduling.deadlines import EarliestDeadlineFirst, LeastSlack
from policies.scheduling.fcfs import Fcfs, QueueOrder
from policies.scheduling.longest_prefix import LongestPrefix
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import OnlineBatch, Priority
from policies.scheduling.s3 import S3
from policies.scheduling.shortest_job import LengthAware, ShortestJobFirst, ShortestRemaining
from policies.scheduling.virtual_token_counter import VirtualTokenCounter


@st.composite
def draw_tiered(draw: st.DrawFn, block_size: int) -> Tiered:
    """Draws a prefix cache with host memory for some tokens, and perhaps a disk; a token takes one byte."""
    host_tokens = draw(st.sampled_from([0, 20, 200]))
    return Tiered(
        block_size=block_size,
        host_gib=host_tokens / GIB,
        disk_gib=(draw(st.sampled_from([0, 50])) if host_tokens else 0) / GIB,
        write=draw(st.sampled_from(["back", "through"])),
        min_load_tokens=draw(st.sampled_from([1, 8])),
    )


def draw_contiguous(block_size: int) -> st.SearchStrategy[Any]:
    """Draws a contiguous cache with any reservation and allocator."""
    return st.builds(
        Contiguous,
        reserve=st.sampled_from(["max_tokens", "predicted", "predicted"]),
        pow2_output=st.booleans(),
        allocator=st.sampled_from(["first_fit", "best_fit", "buddy"]),
        moves=st.booleans(),
        block_size=st.just(block_size),
    ) | st.builds(
        Contiguous, allocator=st.sampled_from(["first_fit", "buddy"]), block_size=st.just(block_size)
    )


def draw_lossy(block_size: int) -> st.SearchStrategy[Any]:
    """Draws a lossy cache, which keeps few tokens of a sequence."""
    kept = st.sampled_from([1, 3, 4, 8, 13, 32])
    return (
        st.builds(
            StreamingLlm,
            num_sink_tokens=st.integers(0, 4),
            num_recent_tokens=kept,
            block_size=st.just(block_size),
        )
        | st.builds(H2o, num_heavy_tokens=kept, num_recent_tokens=kept, block_size=st.just(block_size))
        | st.builds(
            SnapKv, num_kept_tokens=kept, num_window_tokens=st.just(1), block_size=st.just(block_size)
        )
        | st.builds(FastGen, recovery=st.floats(0.1, 1.0), block_size=st.just(block_size))
    )


def draw_caching(block_size: int) -> st.SearchStrategy[Any]:
    """Draws a caching policy of any kind."""
    return (
        st.builds(
            Paged,
            block_size=st.just(block_size),
            watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
            presume_cached=st.sampled_from([False, False, True]),
        )
        | st.builds(
            PrefixCaching, block_size=st.just(block_size), watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3])
        )
        | st.builds(
            Radix,
            block_size=st.just(block_size),
            watermark=st.sampled_from([0.0, 0.3]),
            eviction=st.sampled_from(["lru", "lfu", "fifo", "size_aware", "two_q", "s3_fifo", "priority"]),
        )
        | draw_tiered(block_size)
        | draw_contiguous(block_size)
        | draw_lossy(block_size)
    )


def draw_batching(tick_s: float) -> st.SearchStrategy[Any]:
    """Draws a batching policy of an engine that prefills and decodes, with settings for a few requests."""
    budget, size = st.integers(1, 64), st.integers(1, 8)
    some = st.integers(0, 12)
    return (
        st.builds(Chunked, max_num_batched_tokens=budget)
        | st.builds(
            Chunked,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=st.booleans(),
            long_prefill_token_threshold=st.integers(1, 12),
            long_prefill_token_threshold_adaptive=st.booleans(),
            max_num_active_seqs=st.none() | st.integers(1, 6),
            scheduler_reserve_full_isl=st.booleans(),
        )
        | st.builds(
            PacedPrefills,
            max_num_batched_tokens=budget,
            prefill_schedule_interval=st.integers(1, 5),
            scheduler_reserve_full_isl=st.booleans(),
        )
        | st.builds(PrefillFirst, max_num_batched_tokens=budget)
        | st.builds(
            Sglang,
            max_num_batched_tokens=budget,
            max_prefill_tokens=st.integers(1, 60),
            schedule_conservativeness=st.sampled_from([0.1, 1.0, 1.5]),
            mixed_chunk=st.booleans(),
        )
        | st.builds(Static, batch_size=size)
        | st.builds(
            Dynamic,
            batch_size=st.integers(2, 8),
            max_num_batched_tokens=budget,
            max_queue_delay_s=st.integers(0, 40).map(lambda n: n * tick_s / 2),
        )
        | st.builds(OneAtATime, max_num_batched_tokens=budget)
        | st.builds(Orca, batch_size=size)
        | st.builds(
            PartialPrefills,
            max_num_batched_tokens=budget,
            max_num_partial_prefills=st.integers(2, 4),
            max_long_partial_prefills=st.integers(1, 2),
            long_prefill_token_threshold=some,
        )
        | st.builds(SplitFuse, max_num_batched_tokens=budget)
        | st.builds(
            Tgi,
            waiting_served_ratio=st.sampled_from([0.0, 0.3, 1.2, 5.0]),
            max_waiting_tokens=some,
            max_batch_prefill_tokens=budget,
            max_batch_total_tokens=st.none() | st.integers(64, 400),
        )
        | st.builds(
            InFlight,
            max_num_batched_tokens=budget,
            capacity_scheduler_policy=st.sampled_from(CAPACITY_SCHEDULER_POLICIES),
            enable_chunked_context=st.booleans(),
            context_chunking_policy=st.sampled_from(CONTEXT_CHUNKING_POLICIES),
            batch_wait_timeout_iters=st.integers(0, 5),
            batch_wait_max_tokens_ratio=st.sampled_from([0.0, 0.5, 1.0]),
        )
        | st.builds(Slots, n_parallel=size, n_batch=st.integers(8, 64))
    )


def draw_routing(num_replicas: int, tick_s: float) -> st.SearchStrategy[Any]:
    """Draws a routing policy, with settings that matter to a few requests."""
    count = st.sampled_from(["requests", "tokens"])
    by_replica = st.just(()) | st.tuples(*[st.sampled_from([1.0, 0.3, 7.0])] * num_replicas)
    ttft_s = st.sampled_from([1, 3, 10]).map(lambda n: n * tick_s)
    tokens_per_s = st.sampled_from([1.0, 20.0]).map(lambda n: n / tick_s)
    return (
        st.sampled_from([RoundRobin(), Random(), JoinShortestKv(), Dedicated(), Freest()])
        | st.builds(AdapterAffinity, max_excess=st.integers(0, 3))
        | st.builds(Weighted, weights=by_replica)
        | st.builds(LeastOutstanding, count=count)
        | st.builds(PowerOfTwo, num_choices=st.integers(1, num_replicas), count=count)
        | st.builds(SessionAffinity, max_load=st.sampled_from([1.1, 1.25, float("inf")]))
        | st.builds(
            PrefixAffinity,
            cache_threshold=st.sampled_from([0.0, 0.3]),
            balance_abs_threshold=st.sampled_from([0, 1, 64]),
            max_tree_tokens=st.sampled_from([20, 2**24]),
        )
        | st.builds(PrefixIndex, overlap_weight=st.sampled_from([0.0, 1.0, 5.0]))
        | st.builds(WeightedScore, prefix_weight=st.sampled_from([0.0, 3.0]))
        | st.builds(
            SloAware,
            ttft_s=ttft_s,
            headroom=st.sampled_from(["least", "most"]),
            initial_tokens_per_s=tokens_per_s,
        )
        | st.builds(CostAware, ttft_s=ttft_s, initial_tokens_per_s=tokens_per_s)
    )


def draw_scheduling(tick_s: float) -> st.SearchStrategy[Any]:
    """Draws a scheduling policy, with settings that matter within a few ticks."""
    mode = st.sampled_from(["recompute", "swap"])
    ticks = st.integers(1, 100).map(lambda n: n * tick_s / 2)
    maybe_ticks = st.none() | ticks
    tokens = st.integers(0, 12)
    by_priority = st.lists(ticks, min_size=1, max_size=3).map(tuple)
    return (
        st.builds(Fcfs, preemption_mode=mode)
        | st.builds(QueueOrder, preemption_mode=mode)
        | st.builds(Priority, aging_s=maybe_ticks, preemption_mode=mode)
        | st.builds(ShortestJobFirst, max_wait_s=maybe_ticks, preemption_mode=mode)
        | st.builds(ShortestRemaining, min_gain_tokens=tokens, preemption_mode=mode)
        | st.builds(S3, window=st.sampled_from([1, 3, 256]), preemption_mode=mode)
        | st.builds(
            Mlfq,
            quantum_tokens=st.integers(1, 12),
            prompt_token_service=st.sampled_from([0.0, 0.1, 1.0]),
            num_levels=st.integers(1, 4),
            starvation_s=ticks,
            max_active=st.none() | st.integers(1, 4),
            min_free_share=st.sampled_from([0.0, 0.1, 0.5]),
            preemption_mode=mode,
        )
        | st.builds(EarliestDeadlineFirst, ttft_s=by_priority, preemption_mode=mode)
        | st.builds(
            LeastSlack,
            ttft_s=by_priority,
            tpot_s=by_priority,
            prefill_tokens_per_s=st.sampled_from([0.5, 4.0]).map(lambda n: n / tick_s),
            margin_s=ticks,
            preemption_mode=mode,
        )
        | st.builds(
            VirtualTokenCounter,
            tenant_weights=st.sampled_from([{}, {"a": 3.0, "b": 0.7}]),
            preemption_mode=mode,
        )
        | st.builds(
            OnlineBatch,
            batch_priority=st.integers(0, 2),
            promote_before_s=ticks,
            preempts=st.booleans(),
            preemption_mode=mode,
        )
        | st.builds(LongestPrefix, max_sorted=st.sampled_from([1, 128]), preemption_mode=mode)
        | st.builds(LengthAware, long_first=st.booleans(), max_wait_s=maybe_ticks, preemption_mode=mode)
    )
