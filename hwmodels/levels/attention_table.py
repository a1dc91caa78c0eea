"""Attention seconds from a measured table: decodes alone, one prompt chunk alone, and both in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwmodels.exact import larger, smaller
from hwmodels.iterations.iteration import IterationShape
from hwmodels.levels.grid import Grid


class AttentionTable:
    """Interpolates the attention of one layer, or of as many layers as the times given are for.

    The table has sequences of equal length and one chunk; an iteration has sums over sequences and chunks.
    Decodes count as that many sequences of the mean length. Chunks, T tokens in s chunks with Q query-key
    pairs, count as the cheaper of two readings, both upper bounds and equal for s = 1:

        one chunk of T tokens            after   max(Q / T - (T + 1) / 2, 0)      cached ones
        s chunks of T / s, one by one,   after   max(Q / T - (T / s + 1) / 2, 0)  each

    The first is accurate if cached tokens dominate, the second if long prompts are computed from scratch.

    An engine that computes chunks separately and masks surplus products takes the time of neither: the times
    of its chunks add up, and n new tokens after c cached ones count n (n + c) products. For all chunks
    together A = Q + (N - T) / 2, where N, the sum of n n, follows from Q if C cached tokens are spread evenly
    before them:

        s chunks of T / s, one by one,   after   A / T - T / s  each              N = 2 (Q - T C / s) - T

    What such an engine does once per call, or only slowly for the first chunk, the other chunks save.
    """

    def __init__(
        self,
        *,
        decode: Grid,
        prefill: Grid,
        mixed: Grid | None,
        chunks_apart: bool = False,
        saved_s: float = 0.0,
    ) -> None:
        """Takes grids of seconds by these sizes.

        decode(num_seqs, kv_tokens), prefill(tokens, cached), mixed(tokens, cached, num_seqs, kv_tokens).
        chunks_apart: the engine computes chunks separately; it has no `mixed`. Without `mixed`, a mixed batch
        takes the sum of both. Engines that run both in one kernel need `mixed`: they take 1.2 to 1.4 times
        the sum at the median, 4 times for 128 long decodes (vLLM 0.19, FlashAttention).
        saved_s: seconds that each chunk after the first takes less than alone, with chunks_apart.
        """
        self._decode = decode
        self._prefill = prefill
        self._mixed = mixed
        self._saved_s = saved_s
        self._chunks = self._apart if chunks_apart else self._cheaper

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the attention seconds of an iteration, or of each of many.

        If the numbers of sequences or of tokens are arrays, all fields are float arrays of one length.
        """
        fields: tuple[Any, ...] = shape.counts[:6]
        decodes, chunks = fields[0] > 0, fields[3] > 0
        prices = {(1, 0): self._of_decodes, (0, 1): self._of_chunks, (1, 1): self._of_both}
        if not isinstance(decodes, np.ndarray):
            return prices[decodes, chunks](*fields)
        seconds = np.zeros(len(decodes))
        for (has_decodes, has_chunks), price in prices.items():
            rows = (decodes == has_decodes) & (chunks == has_chunks)
            if rows.any():
                seconds[rows] = price(*(field[rows] for field in fields))
        return seconds

    def _of_decodes(self, num_seqs: Any, context: Any, *_: Any) -> Any:
        return self._decode.at(num_seqs, context / num_seqs)

    def _of_chunks(self, _: Any, __: Any, *chunks: Any) -> Any:
        return self._chunks(*chunks)[2]

    def _of_both(self, num_seqs: Any, context: Any, chunks: Any, tokens: Any, *others: Any) -> Any:
        cached, together, best = self._chunks(chunks, tokens, *others)
        if self._mixed is None:
            return best + self._decode.at(num_seqs, context / num_seqs)
        both = self._mixed.at(tokens, cached, num_seqs, context / num_seqs)
        return larger(both - (together - best), best)

    def _cheaper(self, chunks: Any, tokens: Any, pairs: Any, _: Any) -> tuple[Any, Any, Any]:
        """Returns cached tokens before the one chunk, its seconds, and the seconds of the cheaper reading."""
        cached = larger(pairs / tokens - 0.5 * (tokens + 1), 0.0)
        cached_each = larger(pairs / tokens - 0.5 * (tokens / chunks + 1), 0.0)
        together = self._prefill.at(tokens, cached)
        if not isinstance(chunks, np.ndarray) and chunks == 1:
            return cached, together, together
        return cached, together, smaller(together, chunks * self._prefill.at(tokens / chunks, cached_each))

    def _apart(self, chunks: Any, tokens: Any, pairs: Any, ends: Any) -> tuple[Any, Any, Any]:
        """Computes `_cheaper` for chunks computed separately: the one chunk's seconds are the sum of all."""
        each = tokens / chunks
        squares = 2.0 * (pairs - each * (ends - tokens)) - tokens
        squares = smaller(larger(squares, tokens * each), 1.0 * tokens * tokens)
        cached = larger((pairs + 0.5 * (squares - tokens)) / tokens - each, 0.0)
        first_s = self._prefill.at(each, cached)
        others_s = larger(first_s - self._saved_s, 0.0)
        seconds = first_s + (chunks - 1) * others_s
        return cached, seconds, seconds
