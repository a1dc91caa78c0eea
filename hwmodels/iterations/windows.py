"""Attention windows: counts the context tokens and query-key pairs of a batch inside the window.

A batch holds only sums, so its sequences (and its chunks) are assumed to be equal. That is exact if all
contexts are longer than the window, or all shorter; a mixture is counted up to a few percent too high.
"""

from __future__ import annotations

from typing import Any

from hwmodels.exact import larger, smaller
from hwmodels.iterations.layout import RankBatch


def within_window(batch: RankBatch, window: int | None) -> RankBatch:
    """Returns the batch with contexts and pairs cut to the last `window` tokens, the query's own included."""
    if window is None:
        return batch
    return batch._replace(
        decode_context_tokens=smaller(batch.decode_context_tokens, window * batch.decode_seqs),
        prefill_pairs=_pairs(batch, window),
        prefill_context_tokens=smaller(
            batch.prefill_context_tokens, batch.prefill_tokens + window * batch.prefill_seqs
        ),
    )


def seen(
    num_seqs: Any, context_tokens: Any, draft_tokens: Any, draft_pairs: Any, window: int | None
) -> tuple[Any, Any]:
    """Returns the KV tokens that decodes read, each once, and their query-key pairs; with draft tokens."""
    if window is not None:
        context_tokens = smaller(context_tokens, window * num_seqs)
        draft_pairs = smaller(draft_pairs, window * draft_tokens)
    return context_tokens + draft_tokens, context_tokens + draft_pairs


def decode_keys(batch: RankBatch, window: int | None = None) -> Any:
    """Returns the KV tokens that the decodes of a batch read: see `seen`."""
    return _seen(batch, window)[0]


def decode_pairs(batch: RankBatch, window: int | None = None) -> Any:
    """Returns the query-key pairs of the decodes of a batch: see `seen`."""
    return _seen(batch, window)[1]


def _seen(batch: RankBatch, window: int | None) -> tuple[Any, Any]:
    decodes, context = batch.decode_seqs, batch.decode_context_tokens
    return seen(decodes, context, batch.draft_tokens, batch.draft_pairs, window)


def _pairs(batch: RankBatch, window: int) -> Any:
    """Returns the pairs of n new tokens on c cached ones; query i = 1, 2, ... sees min(c + i, w) tokens.

    r = min(n, max(w - c, 0)) queries see all tokens; r c + r (r + 1) / 2 + (n - r) w.
    n = 4, c = 2, w = 3: r = 1: 3 + 3 x 3 = 12. The result never exceeds the pairs without a window.
    """
    chunks = larger(batch.prefill_seqs, 1)
    new = batch.prefill_tokens / chunks
    cached = larger(batch.prefill_context_tokens / chunks - new, 0.0)
    rising = smaller(new, larger(window - cached, 0.0))
    pairs = rising * cached + rising * (rising + 1) / 2 + (new - rising) * window
    return smaller(chunks * pairs, batch.prefill_pairs)
