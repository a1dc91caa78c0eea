"""Passes that verify draft tokens, captured as CUDA graphs.

A graph runs the target, the verification and, if its number of levels is known, the drafts of the next pass,
for a number of sequences with 1 + K rows each. A pass without prompt chunks runs in the smallest graph that
fits: rows of padding stand behind the drafts of a sequence that has fewer than K, and sequences of padding
behind the others (`NO_TOKEN`). They see KV that is not theirs, and write none.

Captured are the K that the draft-length policy may decide (`KnownLengths`); of other policies 0, half of the
most and the most, without the drafts. Passes of more rows than MAX_ROWS, so also those of a K above it, run
eagerly: they are bound by compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from policies.speculation import DraftLength, KnownLengths
from policies.speculation.engine.drafts import Shapes
from realengine.progress import QUIET, Progress
from realengine.runner.recorder import Recorder, Recording
from realengine.runner.work import Draw, Padding
from realengine.speculation.completed import CompletedPass
from realengine.speculation.drafter import Drafter
from realengine.speculation.uniform import uniform_shape, uniform_words
from realengine.speculation.work import NO_TOKEN, PassSize, VerifyShape

MAX_ROWS = 512
FEW_ROWS = 64
"""Passes of up to so many rows are bound by memory, so that padding costs nothing."""
MOST_PADDING = 2.0
"""Larger passes run in a graph of up to so many times their rows."""


def captured_levels(shapes: Shapes, policy: DraftLength, *, drafts_on_device: bool) -> tuple[int, ...]:
    """Returns the levels of drafts that passes are captured for, ascending."""
    most = shapes.max_depth
    if not isinstance(policy, KnownLengths):
        return tuple(sorted({0, most // 2, most}))
    levels = set(policy.lengths(most))
    return tuple(sorted(levels if drafts_on_device else levels | {0}))  # a lookup may find nothing


def drafts_in_graph(policy: DraftLength, drafter: Drafter | None) -> bool:
    """Returns whether graphs hold the drafts of the next pass, too."""
    return drafter is not None and drafter.is_static and isinstance(policy, KnownLengths)


class PassGraphs:
    """Captures and replays passes of one executor.

    run: computes a pass on the device; its last argument tells whether to draft, too. sizes: numbers of
    sequences. levels: of the drafts that are verified. drafts: whether the graphs hold the drafts of the next
    pass, as many as are verified.
    """

    def __init__(
        self,
        run: Callable[[torch.Tensor, VerifyShape, bool], CompletedPass],
        shapes: Shapes,
        *,
        sizes: Sequence[int],
        levels: Iterable[int],
        drafts: bool,
        padding: Padding,
        max_context_len: int,
        max_loras: int,
        max_segment_tokens: int,
        device: torch.device,
    ) -> None:
        self._run = run
        self._shapes = shapes
        self._drafts = drafts
        self._padding = padding
        self._max_context_len = max_context_len
        self._max_loras = max_loras
        self._max_segment_tokens = max_segment_tokens
        self._sizes = {
            level: fitting
            for level in levels
            if shapes.rows[level] < max_context_len
            and (fitting := [num for num in sorted(sizes) if num * (1 + shapes.rows[level]) <= MAX_ROWS])
        }
        self._recordings: dict[VerifyShape, Recording[CompletedPass]] = {}
        self._recorder = Recorder(device)
        num_words = [shape.num_words for shape in self._all_shapes()]
        self._words = torch.zeros(max(num_words, default=0), dtype=torch.int32, device=device)

    def fit(self, num_seqs: int, num_rows: int, most_drafts: int, next_levels: int) -> PassSize | None:
        """Returns the size of the graph for a pass of decoding sequences; None: it has to run eagerly.

        num_rows: of all sequences. most_drafts: rows of the longest drafts. next_levels: to draft.
        """
        for level, sizes in self._sizes.items():
            num_drafts = int(self._shapes.rows[level])
            place = bisect_left(sizes, num_seqs)
            if num_drafts < most_drafts or place == len(sizes) or (self._drafts and level != next_levels):
                continue
            size = self._size(sizes[place], level)
            return size if size.num_rows <= max(FEW_ROWS, MOST_PADDING * num_rows) else None
        return None

    def num_segments(self, size: PassSize) -> int:
        """Returns the number of segments that hold any adapters of the sequences of a pass."""
        return size.num_seqs + size.num_rows // self._max_segment_tokens

    @torch.inference_mode()
    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all sizes, greedy and sampled, with and without adapters, before serving starts."""
        for shape in progress.over(self._all_shapes(), "Capturing passes with drafts"):
            self._recorded(shape)

    def replay(self, size: PassSize, shape: VerifyShape, words: torch.Tensor) -> Iterator[CompletedPass]:
        """Replays the iterations of a pass; each result holds until the next one. words: on the host."""
        recording = self._recorded(self._captured_shape(size, shape.draw, shape.num_segments > 0))
        self._words[: len(words)].copy_(words, non_blocking=True)
        for _ in range(shape.num_iterations):
            recording.replay()
            yield recording.result

    def words_of(self, shape: VerifyShape) -> torch.Tensor:
        """Returns the words on the device, which `replay` has copied."""
        return self._words[: shape.num_words]

    def _size(self, num_seqs: int, level: int) -> PassSize:
        return PassSize(num_seqs, int(self._shapes.rows[level]), level, level if self._drafts else None)

    def _all_shapes(self) -> list[VerifyShape]:
        """Returns the shapes of all graphs, the largest first."""
        sizes = [self._size(num, level) for level, nums in self._sizes.items() for num in nums]
        return [
            self._captured_shape(size, draw, has_adapters)
            for size in sorted(sizes, key=lambda size: size.num_rows, reverse=True)
            for draw in (Draw.greedy, Draw.sample)
            for has_adapters in sorted({False, self._max_loras > 0})
        ]

    def _captured_shape(self, size: PassSize, draw: Draw, has_adapters: bool) -> VerifyShape:
        """Returns the captured shape: for any context lengths and adapters."""
        return uniform_shape(
            size,
            self._max_context_len,
            draw,
            has_tree=not self._shapes.is_chain,
            num_segments=self.num_segments(size) if has_adapters else 0,
        )

    def _recorded(self, shape: VerifyShape) -> Recording[CompletedPass]:
        recording = self._recordings.get(shape)
        if recording is None:
            words = self.words_of(shape)
            harmless = torch.from_numpy(uniform_words(shape, self._padding, NO_TOKEN)).to(words.device)

            def prepare() -> None:
                words.copy_(harmless)

            recording = self._recorder.record(prepare, partial(self._run, words, shape, self._drafts))
            self._recordings[shape] = recording
        return recording
