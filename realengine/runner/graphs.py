"""Decode steps captured as CUDA graphs.

A graph is captured for a number of rows and a way to draw. A step runs in the smallest graph that fits, and
padding fills the other rows. Input words and tokens stay at fixed addresses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from realengine.model.lora import num_decode_segments
from realengine.runner.recorder import Recorder, Recording
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


class Graphs(Protocol):
    """The captured steps of an executor."""

    def capture(self) -> None:
        """Captures all sizes before serving starts."""
        ...


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
        self._graphs: dict[Shape, Recording[Drawn]] = {}
        self._recorder = Recorder(device)

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
        recording = self._captured(captured)
        tokens_B = recording.result.tokens_IS[0]
        self._words[: len(words)].copy_(words, non_blocking=True)
        drawn_IB = tokens_B.new_empty(shape.num_iterations, shape.num_rows)
        for tokens_out_B in drawn_IB:
            recording.replay()
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

    def _captured(self, shape: Shape) -> Recording[Drawn]:
        captured = self._graphs.get(shape)
        if captured is None:
            words = self._words[: sum(DecodeWords.sizes(shape))]
            captured = self._recorder.record(
                partial(self._pad, words, shape), partial(self._decode, words, shape)
            )
            self._graphs[shape] = captured
        return captured

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
