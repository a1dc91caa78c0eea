"""Decode steps captured as CUDA graphs.

A step is two graphs: one computes the hidden states of a number of rows, the other one draws tokens from
them. If a row has penalties or wants logprobs, the second part runs eagerly instead: it is a dozen launches,
made while the device still runs the first part, and it may use memory that did not exist at the capture.

A step runs in the smallest graphs that fit, and padding fills the other rows. Input words, hidden states and
tokens stay at fixed addresses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from realengine.model.lora import num_decode_segments
from realengine.progress import QUIET, Progress
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
    check: Callable[[], None] | None = None
    """Called when the tokens have arrived; raises DeviceLostError if they are undefined."""
    prompt: Logprobs | None = None
    """Log-probabilities of the tokens of prompts that the step was asked for."""


class Graphs(Protocol):
    """The captured steps of an executor."""

    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all sizes before serving starts."""
        ...


class DecodeGraphs:
    """Captures and replays decode steps.

    sizes: numbers of rows to capture. forward: computes the hidden states of an iteration. finish: draws its
    tokens from them, and writes the next input into its words. states_BH: memory for the hidden states of the
    largest size.
    """

    def __init__(
        self,
        forward: Callable[[torch.Tensor, Shape], torch.Tensor],
        finish: Callable[[torch.Tensor, torch.Tensor, Shape], Drawn],
        states_BH: torch.Tensor,
        sizes: Sequence[int],
        padding: Padding,
        max_context_len: int,
        max_loras: int,
    ) -> None:
        self.sizes = sorted(sizes)
        self._forward = forward
        self._finish = finish
        self._states_BH = states_BH
        self._padding = padding
        self._max_context_len = max_context_len
        self._max_loras = max_loras
        largest = sum(DecodeWords.sizes(self._shape(self.sizes[-1], Draw.sample, bool(max_loras))))
        self._words = torch.zeros(largest, dtype=torch.int32, device=states_BH.device)
        self._forwards: dict[Shape, Recording[torch.Tensor]] = {}
        self._finishes: dict[Shape, Recording[Drawn]] = {}
        self._recorder = Recorder(states_BH.device)

    def size_for(self, num_rows: int) -> int | None:
        """Returns the number of rows of the graphs for a step of num_rows rows; None if too large."""
        place = bisect_left(self.sizes, num_rows)
        return self.sizes[place] if place < len(self.sizes) else None

    def fit(self, shape: Shape) -> bool:
        """Returns whether there are graphs for a step."""
        return shape.is_decode and shape.num_rows in self.sizes

    @torch.inference_mode()
    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all sizes, greedy and sampled, with and without adapters, before serving starts."""
        for num_rows in progress.over(self.sizes[::-1], "Capturing decode steps"):
            for has_adapters in sorted({False, self._max_loras > 0}):
                self._captured(self._shape(num_rows, Draw.greedy, has_adapters))
            for draw in (Draw.greedy, Draw.sample):
                self._captured_finish(self._shape(num_rows, draw, False))

    def run(self, shape: Shape, words: torch.Tensor) -> Drawn:
        """Replays the iterations of a step. words: on the host, pinned."""
        forward = self._captured(self._shape(shape.num_rows, Draw.greedy, shape.num_segments > 0))
        self._words[: len(words)].copy_(words, non_blocking=True)
        if shape.draw is Draw.penalised or shape.num_logprobs >= 0:
            return self._run_eager_finish(forward, shape, len(words))
        finish = self._captured_finish(self._shape(shape.num_rows, shape.draw, False))
        tokens_B = finish.result.tokens_IS[0]
        drawn_IB = tokens_B.new_empty(shape.num_iterations, shape.num_rows)
        for tokens_out_B in drawn_IB:
            forward.replay()
            finish.replay()
            tokens_out_B.copy_(tokens_B)
        return Drawn(drawn_IB)

    def _run_eager_finish(self, forward: Recording[torch.Tensor], shape: Shape, num_words: int) -> Drawn:
        """Replays the hidden states of the iterations, and draws their tokens without a graph."""
        drawn = []
        for _ in range(shape.num_iterations):
            forward.replay()
            drawn.append(self._finish(forward.result, self._words[:num_words], shape))
        return Drawn(torch.cat([one.tokens_IS for one in drawn]), drawn[-1].logprobs)

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

    def _captured(self, shape: Shape) -> Recording[torch.Tensor]:
        """Returns the graph of the hidden states of a shape."""
        captured = self._forwards.get(shape)
        if captured is None:
            words, states_BH = self._words_of(shape), self._states_BH[: shape.num_rows]
            run = partial(self._states_of, words, shape, states_BH)
            captured = self._forwards[shape] = self._recorder.record(partial(self._pad, words, shape), run)
        return captured

    def _captured_finish(self, shape: Shape) -> Recording[Drawn]:
        """Returns the graph that draws the tokens of a shape."""
        captured = self._finishes.get(shape)
        if captured is None:
            words, states_BH = self._words_of(shape), self._states_BH[: shape.num_rows]
            run = partial(self._finish, states_BH, words, shape)
            captured = self._finishes[shape] = self._recorder.record(partial(self._pad, words, shape), run)
        return captured

    def _words_of(self, shape: Shape) -> torch.Tensor:
        return self._words[: sum(DecodeWords.sizes(shape))]

    def _states_of(self, words: torch.Tensor, shape: Shape, states_BH: torch.Tensor) -> torch.Tensor:
        return states_BH.copy_(self._forward(words, shape))

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
