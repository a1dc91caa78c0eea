"""Steps with prompt chunks in pieces: everything between two attentions as a CUDA graph.

Attention depends on the chunks and contexts of a step, so it is launched kernel by kernel: by the first layer
of a kind as usual, by the others as a repetition of its launches on their own tensors. All else depends on
the number of tokens only: a step runs in the graphs of the next larger number. Tokens of padding write no KV,
and nothing reads what they compute. Larger steps run eagerly: they take longer than their launches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from kernels.launch import Repeated, recorded_launches
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.progress import QUIET, Progress
from realengine.runner.batch import Batch
from realengine.runner.graphs import Recorder

SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, *range(320, 1025, 64))
"""Numbers of tokens that are captured; on an H200, larger steps of Llama-3.1-8B outlast their launches."""

Piece = Callable[[], None]


class PiecewiseGraphs:
    """Captures and replays the pieces of steps without adapters. sizes: numbers of tokens to capture."""

    def __init__(self, decoder: Decoder, cache: KvCache, sizes: Sequence[int]) -> None:
        assert decoder.queries_shape is not None
        self._decoder = decoder
        self._cache = cache
        self._sizes = sorted(sizes)
        self._recorder = Recorder(decoder.device)
        most, device = self._sizes[-1], decoder.device
        self._tokens_T = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions_T = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots_T = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._queries_THD = torch.zeros(most, *decoder.queries_shape, dtype=decoder.dtype, device=device)
        self._attended_THD = torch.zeros_like(self._queries_THD)
        hidden_size = decoder.architecture.hidden_size
        self._states_TH = torch.zeros(most, hidden_size, dtype=decoder.dtype, device=device)
        self._pieces: dict[int, list[Piece]] = {}
        self._kinds = [decoder.attention_kind(i, cache) for i in range(decoder.architecture.num_layers)]

    @torch.inference_mode()
    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all sizes, the largest first, before serving starts."""
        for size in progress.over(self._sizes[::-1], "Capturing pieces of steps"):
            self._pieces[size] = self._captured(size)

    def fit(self, batch: Batch) -> bool:
        """Returns whether the pieces of a step have been captured."""
        return batch.adapters is None and len(batch.tokens_T) <= self._sizes[-1]

    def states(self, batch: Batch) -> torch.Tensor:
        """Computes the final hidden states [T, H] of all tokens; they hold until the next step."""
        num_tokens = len(batch.tokens_T)
        size = self._sizes[bisect_left(self._sizes, num_tokens)]
        for static_T, given_T, padding in (
            (self._tokens_T, batch.tokens_T, 0),
            (self._positions_T, batch.positions_T, 0),
            (self._slots_T, batch.slots_T, -1),
        ):
            static_T[:num_tokens].copy_(given_T)
            static_T[num_tokens:size].fill_(padding)
        queries_THD, attended_THD = self._queries_THD[:num_tokens], self._attended_THD[:num_tokens]
        first, *others = self._pieces[size]
        first()
        repeated: dict[Hashable, Repeated] = {}
        for index, (kind, piece) in enumerate(zip(self._kinds, others, strict=True)):
            tensors = self._decoder.attention_tensors(index, self._cache)
            if kind in repeated:
                repeated[kind].on(tensors)
            else:
                with recorded_launches() as launches:
                    self._decoder.attention_of(index, queries_THD, batch, self._cache, attended_THD)
                if kind is not None:
                    repeated[kind] = Repeated(launches, tensors)
            piece()
        return self._states_TH[:num_tokens]

    def _captured(self, size: int) -> list[Piece]:
        """Captures the pieces of one size.

        The residual goes from piece to piece in memory of the graphs, which is free again for other sizes
        when all pieces are captured: only one size runs at a time, and its pieces in this order.
        """
        self._slots_T.fill_(-1)
        batch = self._inputs(size)
        first = self._recorder.record(_nothing, partial(self._first, size, batch))
        pieces, residual = [first.replay], first.result
        for index in range(self._decoder.architecture.num_layers):
            recording = self._recorder.record(_nothing, partial(self._next, size, index, residual, batch))
            pieces.append(recording.replay)
            residual = recording.result
        return pieces

    def _first(self, size: int, batch: Batch) -> torch.Tensor:
        queries_THD, residual_TH = self._decoder.first_piece(batch, self._cache)
        self._queries_THD[:size].copy_(queries_THD)
        return residual_TH

    def _next(self, size: int, index: int, residual_TH: torch.Tensor, batch: Batch) -> torch.Tensor:
        attended_THD = self._attended_THD[:size]
        found, residual_TH = self._decoder.next_piece(index, attended_THD, residual_TH, batch, self._cache)
        is_last = index + 1 == self._decoder.architecture.num_layers
        (self._states_TH if is_last else self._queries_THD)[:size].copy_(found)
        return residual_TH

    def _inputs(self, size: int) -> Batch:
        """Returns the tokens of a step, without what only attention reads."""
        nothing = self._tokens_T.new_empty(0, dtype=torch.int32)
        return Batch(
            tokens_T=self._tokens_T[:size],
            positions_T=self._positions_T[:size],
            slots_T=self._slots_T[:size],
            block_tables_BM=nothing[:, None],
            chunk_starts=nothing,
            context_lens_B=nothing,
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=0,
            max_context_len=0,
        )


def _nothing() -> None:
    """Prepares nothing: the inputs of a piece are harmless at any time before serving."""
