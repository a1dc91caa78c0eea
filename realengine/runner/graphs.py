"""Decode steps captured as CUDA graphs: one launch in place of hundreds.

A graph is captured for a number of rows and a way to draw. A step runs in the smallest graph that fits, and
padding fills the other rows. Input words and tokens stay at fixed addresses. Graphs share one memory pool, so
the largest is captured first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from realengine.model.lora import num_decode_segments
from realengine.runner.work import DecodeWords, Draw, Padding, Shape


class Logprobs(NamedTuple):
    """Log-probabilities of S drawn tokens, and of the K most likely ones."""

    drawn_S: torch.Tensor
    top_SK: torch.Tensor
    tokens_SK: torch.Tensor


class Drawn(NamedTuple):
    """Result of a step on the device: tokens int64 [iterations, S]."""

    tokens_IS: torch.Tensor
    logprobs: Logprobs | None = None
    """Log-probabilities of the last iteration's tokens; of a pass with drafts, of all rows of tokens_IS."""
    accepted_IS: torch.Tensor | None = None
    """Accepted draft tokens, int64 [passes, S]: of a pass's rows of tokens_IS, so many and one more count."""


class DecodeGraphs:
    """Captures and replays decode steps.

    sizes: numbers of rows to capture. decode: runs one iteration, and writes the next input into its words.
    """

    def __init__(
        self,
        decode: Callable[[torch.Tensor, Shape], Drawn],
        sizes: Sequence[int],
        padding: Padding,
        max_context_len: int,
        max_loras: int,
        device: torch.device,
    ) -> None:
        self.sizes = sorted(sizes)
        self._decode = decode
        self._padding = padding
        self._max_context_len = max_context_len
        self._max_loras = max_loras
        largest = sum(DecodeWords.sizes(self._shape(self.sizes[-1], Draw.sample, bool(max_loras))))
        self._words = torch.zeros(largest, dtype=torch.int32, device=device)
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(
            device
        )  # one stream for all, because libraries keep a workspace per stream

    def size_for(self, num_rows: int) -> int | None:
        """Returns the number of rows of the graph for a step of num_rows rows; None if too large."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def fit(self, shape: Shape) -> bool:
        """Returns whether there is a graph for a step. Penalties and logprobs are computed eagerly."""
        return (
            shape.is_decode
            and shape.draw is not Draw.penalised
            and shape.num_logprobs < 0
            and shape.num_rows in self.sizes
        )

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all sizes, greedy and sampled, with and without adapters, before serving starts."""
        for num_rows in reversed(self.sizes):
            for draw in (Draw.greedy, Draw.sample):
                for has_adapters in {False, self._max_loras > 0}:
                    self._captured(self._shape(num_rows, draw, has_adapters))

    def run(self, shape: Shape, words: torch.Tensor) -> Drawn:
        """Replays the iterations of a step. words: on the host, pinned."""
        captured = self._shape(shape.num_rows, shape.draw, shape.num_segments > 0)
        graph, tokens_B = self._captured(captured)
        self._words[: len(words)].copy_(words, non_blocking=True)
        drawn_IB = tokens_B.new_empty(shape.num_iterations, shape.num_rows)
        for tokens_out_B in drawn_IB:
            graph.replay()
            tokens_out_B.copy_(tokens_B)
        return Drawn(drawn_IB)

    def _shape(self, num_rows: int, draw: Draw, has_adapters: bool) -> Shape:
        """Returns the captured shape: for any context lengths and adapters."""
        num_segments = num_decode_segments(num_rows, self._max_loras) if has_adapters else 0
        return Shape(
            num_rows,
            num_rows,
            num_rows,
            num_rows,
            0,
            self._max_context_len,
            draw,
            num_segments=num_segments,
        )

    def _captured(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        captured = self._graphs.get(shape)
        if captured is None:
            captured = self._graphs[shape] = self._capture(shape)
        return captured

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        words = self._words[: sum(DecodeWords.sizes(shape))]
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels before the capture, which cannot
            self._pad(words, shape)
            self._decode(words, shape)
            self._pad(words, shape)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because NCCL's watchdog thread queries events during the capture.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            drawn = self._decode(words, shape)
        return graph, drawn.tokens_IS[0]

    def _pad(self, words: torch.Tensor, shape: Shape) -> None:
        """Fills the words with padding rows."""
        words.zero_()
        views = DecodeWords.of(words, shape)
        views.contexts_B.fill_(1)
        views.slots_B.fill_(self._padding.slot)
        views.places_B.fill_(self._padding.place)


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the captured sizes: 1, 2, 4, every 8th up to 64, then every 16th up to 512."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 513, 16)]
    within = [size for size in sizes if size < max_num_seqs]
    return (*within, min(max_num_seqs, 512))
