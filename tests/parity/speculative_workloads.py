"""Random workloads with speculation."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from tests.parity.drafts_script import METHODS, Speculation
from tests.parity.lockstep import Settings, Workload
from tests.parity.workloads import make_workload


def make_speculative_workload(mode: str, seed: int) -> Workload:
    """Draws a random workload of a mode: a method of vLLM's, and words of `make_workload`.

    Two more words: modules (several modules of MTP) and by_batch_size. Where vLLM stands still or dies, a
    setting is raised: the budget and the threshold of long prompts hold one padded pass, all blocks hold
    max_model_len tokens, and with several modules and a prefix cache a block holds one token of each.
    """
    words = mode.split("+")
    method = next(word for word in words if word in METHODS)
    own = {method, "modules", "by_batch_size"}
    base = make_workload("+".join(word for word in words if word not in own) or "fcfs", seed)
    random = Random(f"{mode.removeprefix('async+')}/{seed}")
    settings = base.settings
    num_drafts = random.choice((1, 2, 3, 3, 4, 7))
    num_modules = 1
    if "modules" in words:
        num_drafts = max(num_drafts, 2)
        if settings.is_prefix_caching:
            num_drafts = min(num_drafts, max(settings.block_size, 2))
        num_modules = num_drafts
    speculation = Speculation(
        method=method,
        num_speculative_tokens=num_drafts,
        num_modules=num_modules,
        by_batch_size=_by_batch_size(settings, num_drafts, random) if "by_batch_size" in words else None,
        right_share=random.choice((0.0, 0.4, 0.8, 1.0)),
        found_share=random.choice((0.3, 0.7, 1.0)),
    )
    return Workload(_that_can_run(settings, speculation), base.arrivals)


def _by_batch_size(settings: Settings, most: int, random: Random) -> tuple[tuple[int, int, int], ...]:
    """Draws ranges of batch sizes, perhaps with gaps, each with a number of draft tokens that may be 0."""
    ranges = []
    start = 1
    while start <= settings.max_num_seqs and len(ranges) < 4:
        end = start + random.randint(0, 3)
        ranges.append((start, end, random.randint(0, most)))
        start = end + random.choice((1, 1, 2))
    return tuple(ranges)


def _that_can_run(settings: Settings, speculation: Speculation) -> Settings:
    """Returns settings with which vLLM neither stands still nor fails its own assertions."""
    num_rows = 1 + speculation.num_speculative_tokens
    has_modules = speculation.num_modules > 1
    block_size = settings.block_size
    if has_modules and settings.is_prefix_caching:
        block_size = max(block_size, speculation.num_speculative_tokens)
    min_blocks = -(-settings.max_model_len // block_size)
    scheduled, threshold = settings.max_num_scheduled_tokens, settings.long_prefill_token_threshold
    if threshold:
        threshold = min(max(threshold, num_rows), settings.max_model_len)
    return replace(
        settings,
        block_size=block_size,
        num_blocks=max(settings.num_blocks, min_blocks),
        max_num_batched_tokens=max(settings.max_num_batched_tokens, num_rows + 1),
        long_prefill_token_threshold=min(max(threshold, num_rows), settings.max_model_len)
        if threshold
        else 0,
        max_num_scheduled_tokens=max(scheduled, num_rows) if scheduled is not None else None,
        speculation=speculation,
    )
