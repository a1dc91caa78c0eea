"""Converts a plan of the policies to the iteration shape that the hardware models price."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from operator import le

from hwmodels.exact import Num
from hwmodels.iterations.iteration import AdapterBatch, DraftWork, Gathered, IterationShape, causal_pairs
from policies.core.plan import Chunk, RankWork, StepPlan


def shape_of(plan: StepPlan, step: Num) -> IterationShape:
    """Returns the shape of the plan's iteration `step` (from 0).

    An array of steps gives arrays where iterations differ: from one iteration to the next, a decode attends
    to one more token, and a chunk to the chunks before it.
    """
    context = plan.num_decode_context_tokens + plan.num_widening * step
    adapters = None if plan.adapters is None else AdapterBatch(*plan.adapters)
    return _shape(plan.num_decodes, context, plan.chunks, step, adapters)


def _shape(
    num_decodes: int, context: Num, chunks: SequenceOf[Chunk], step: Num, adapters: AdapterBatch | None
) -> IterationShape:
    """Returns the shape of decodes and of chunks that repeat."""
    num_sampled, num_tokens = num_decodes, 0
    num_pairs: Num = 0
    num_context: Num = 0
    for _, num_cached, n, completes in chunks:
        cached = num_cached + n * step
        num_tokens += n
        num_pairs = num_pairs + causal_pairs(n, cached)
        num_context = num_context + cached + n
        num_sampled += completes
    return IterationShape(
        num_decodes, context, len(chunks), num_tokens, num_pairs, num_context, num_sampled, adapters
    )


def shapes_of_ranks(plan: StepPlan, whole: IterationShape, step: Num) -> list[IterationShape]:
    """Returns the iteration as the ranks see it that may be the slowest; whole: its shape over all ranks.

    Each is the work of a rank times their number, beside the totals: see `IterationShape.gathered`.
    """
    size, ranks = len(plan.ranks), _fullest(plan.ranks)
    drafts = whole.drafts
    if (
        len(ranks) == 1
        and ranks[0].num_decodes * size == plan.num_decodes
        and not plan.chunks
        and drafts is None
    ):
        context = ranks[0].num_decode_context_tokens + ranks[0].num_widening * step
        return [whole._replace(decode_context_tokens=size * context)]  # equal ranks
    totals = Gathered(*whole.totals)
    num_tokens = totals.decode_seqs + totals.prefill_tokens + totals.draft_tokens
    shapes = []
    for rank in ranks:
        context = rank.num_decode_context_tokens + rank.num_widening * step
        own = _shape(rank.num_decodes, context, rank.chunks, step, None)
        decodes, in_decodes, chunks, new, pairs, in_chunks, rows = (size * count for count in own.counts)
        of_drafts, adapters = None, whole.adapters
        if drafts is not None:
            of_drafts = _share_of(drafts, rank, size)
            rows = rows + of_drafts.tokens
        if adapters is not None:
            share = size * (own.decode_seqs + own.prefill_tokens + rank.num_draft_tokens) / num_tokens
            tokens, rank_tokens = adapters.tokens * share, adapters.rank_tokens * share
            adapters = adapters._replace(tokens=tokens, rank_tokens=rank_tokens)
        shape = IterationShape(
            decodes, in_decodes, chunks, new, pairs, in_chunks, rows, adapters, of_drafts, totals
        )
        shapes.append(shape)
    return shapes


def _share_of(drafts: DraftWork, rank: RankWork, size: int) -> DraftWork:
    """Returns the draft tokens of a rank, times the number of ranks; the next are those of all."""
    return drafts._replace(tokens=size * rank.num_draft_tokens, pairs=size * rank.num_draft_pairs)


def _fullest(ranks: Iterable[RankWork]) -> list[RankWork]:
    """Returns the ranks that no other exceeds in everything, each amount of work once."""
    works: dict[tuple[Num, ...], RankWork] = {}
    for rank in ranks:
        shape = _shape(rank.num_decodes, rank.num_decode_context_tokens, rank.chunks, 0, None)
        key = (*shape.counts, rank.num_widening, rank.num_draft_tokens, rank.num_draft_pairs)
        works[key] = rank
    fullest: dict[tuple[Num, ...], RankWork] = {}
    for key in sorted(works, reverse=True):  # what exceeds a key is before it
        if not any(all(map(le, key, other)) for other in fullest):
            fullest[key] = works[key]
    return list(fullest.values())
