"""Steps in which all sequences decode, captured as CUDA graphs.

A step is two graphs: one computes the hidden states of its rows, the other one draws tokens from them and, in
an engine that speculates, verifies draft tokens and drafts those of the next step. If a row has penalties or
wants logprobs, the second part runs eagerly instead: it is a dozen launches, made while the device still runs
the first part, and it may use memory that did not exist at the capture.

A step runs in the smallest graphs that fit, and padding fills the other rows: behind the drafts of a sequence
that has fewer, and sequences behind the others. Input words, hidden states and tokens stay at fixed
addresses. Steps of more rows than MAX_ROWS run eagerly: they are bound by compute.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from realengine.model.decoder import States
from realengine.progress import QUIET, Progress
from realengine.runner.batch import Batch
from realengine.runner.work import Draw, Shape, StepSize

MAX_ROWS = 512
FEW_ROWS = 64
"""Steps of up to so many rows are bound by memory, so that padding costs nothing."""
MOST_PADDING = 2.0
"""Larger steps run in graphs of up to so many times their rows."""


class Logprobs(NamedTuple):
    """Log-probabilities of S drawn tokens, and of the K most likely ones."""

    drawn_S: torch.Tensor
    top_SK: torch.Tensor
    tokens_SK: torch.Tensor


class Drawn(NamedTuple):
    """Result of a step on the device: tokens int64 [iterations, S]."""

    tokens_IS: torch.Tensor
    logprobs: Logprobs | None = None
    """Log-probabilities of the last iteration's tokens; of a step with drafts, of all rows of tokens_IS."""
    accepted_IS: torch.Tensor | None = None
    """Accepted draft tokens, int64 [steps, S]: of a step's rows of tokens_IS, so many and one more count."""
    check: Callable[[], None] | None = None
    """Called when the tokens have arrived; raises DeviceLostError if they are undefined."""
    prompt: Logprobs | None = None
    """Log-probabilities of the tokens of prompts that the step was asked for."""


class Computed(NamedTuple):
    """The first part of a step."""

    hidden_RH: torch.Tensor
    """Final hidden states of the rows that draw, and after them of those that are scored."""
    batch: Batch | None = None
    """The rows; None: the second part does not read them."""
    states: States | None = None
    """The hidden states of all rows; None: no drafter reads them."""


class Verified(NamedTuple):
    """The tokens of a step that verifies drafts: accepted ones and one more, of the S sequences that draw."""

    accepted_S: torch.Tensor
    """Accepted draft tokens, int64."""
    tokens_SD: torch.Tensor
    """Tokens, int64 [S, D + 1]; those after the first accepted_S + 1 are meaningless."""
    rows_SD: torch.Tensor
    """The drawn row of each token, int64 [S, D + 1]; for decodes, the row of the step."""


class Finished(NamedTuple):
    """The second part of a step."""

    drawn: Drawn | None
    """None: nothing was drawn."""
    found: Verified | None = None
    """What the drafts for the next step continue; None: there are none, or they are made."""


class Steps(Protocol):
    """The parts of a step, neither of which may wait for the device or copy from the host in a capture."""

    def forward(self, words: torch.Tensor, shape: Shape) -> Computed:
        """Computes the hidden states of the rows."""
        ...

    def finish(self, computed: Computed, words: torch.Tensor, shape: Shape) -> Finished:
        """Draws the tokens, and writes the input of the next iteration into the words or slots."""
        ...

    def padded(self, size: StepSize, draw: Draw, *, has_adapters: bool) -> tuple[Shape, NDArray[np.int32]]:
        """Returns the shape for any contexts and adapters, and the words of a step of padding only."""
        ...


class Graphs:
    """Captures and replays the steps of one executor.

    sizes: to capture; those with more than MAX_ROWS rows are left out. has_adapters: whether rows may use
    adapters.
    """

    def __init__(
        self, steps: Steps, sizes: Sequence[StepSize], *, has_adapters: bool, device: torch.device
    ) -> None:
        self._steps = steps
        self._adapters = sorted({False, has_adapters})
        self.sizes = sorted(
            (size for size in sizes if size.num_rows <= MAX_ROWS),
            key=attrgetter("num_drafts", "num_seqs"),
        )
        self._by_drafts = [list(alike) for _, alike in groupby(self.sizes, attrgetter("num_drafts"))]
        self._forwards: dict[tuple[StepSize, bool], Recording[Computed]] = {}
        self._finishes: dict[tuple[StepSize, bool, Draw], Recording[Finished]] = {}
        self._recorder = Recorder(device)
        num_words = [len(self._padded(size, Draw.sample, self._adapters[-1])[1]) for size in self.sizes]
        self._words = torch.zeros(max(num_words, default=0), dtype=torch.int32, device=device)

    def fit(
        self, num_seqs: int, num_rows: int, most_drafts: int = 0, next_levels: int = 0
    ) -> StepSize | None:
        """Returns the size of the graphs for a step of decoding sequences; None: it has to run eagerly.

        num_rows: of all sequences. most_drafts: rows of the longest drafts. next_levels: to draft.
        """
        for sizes in self._by_drafts:
            place = bisect_left(sizes, num_seqs, key=attrgetter("num_seqs"))
            _, num_drafts, _, num_levels = sizes[0]
            if num_drafts < most_drafts or place == len(sizes) or num_levels not in (None, next_levels):
                continue
            size = sizes[place]
            return size if size.num_rows <= max(FEW_ROWS, MOST_PADDING * num_rows) else None
        return None

    @torch.inference_mode()
    def capture(self, progress: Progress = QUIET) -> None:
        """Captures all sizes, greedy and sampled, with and without adapters, before serving starts."""
        largest_first = sorted(self.sizes, key=attrgetter("num_rows"), reverse=True)
        for size in progress.over(largest_first, "Capturing decode steps"):
            for has_adapters in self._adapters:
                for draw in (Draw.greedy, Draw.sample):
                    self.finish(size, draw, has_adapters=has_adapters)

    def load(self, words: torch.Tensor) -> torch.Tensor:
        """Copies the words of a step from the host, and returns them as its graphs read them."""
        loaded = self._words[: len(words)]
        loaded.copy_(words, non_blocking=True)
        return loaded

    def forward(self, size: StepSize, *, has_adapters: bool) -> Recording[Computed]:
        """Returns the graph of the first part of a step."""
        found = self._forwards.get((size, has_adapters))
        if found is None:
            shape, prepare, words = self._harmless(size, Draw.greedy, has_adapters)
            found = self._recorder.record(prepare, partial(self._steps.forward, words, shape))
            self._forwards[size, has_adapters] = found
        return found

    def finish(self, size: StepSize, draw: Draw, *, has_adapters: bool) -> Recording[Finished]:
        """Returns the graph of the second part of a step."""
        found = self._finishes.get((size, has_adapters, draw))
        if found is None:
            forward = self.forward(size, has_adapters=has_adapters)
            shape, prepare, words = self._harmless(size, draw, has_adapters)

            def computed() -> None:
                prepare()
                if forward.result.batch is not None:
                    forward.replay()  # the rows that a graph writes are undefined until its first replay

            found = self._recorder.record(computed, partial(self._steps.finish, forward.result, words, shape))
            self._finishes[size, has_adapters, draw] = found
        return found

    def _padded(self, size: StepSize, draw: Draw, has_adapters: bool) -> tuple[Shape, NDArray[np.int32]]:
        return self._steps.padded(size, draw, has_adapters=has_adapters)

    def _harmless(
        self, size: StepSize, draw: Draw, has_adapters: bool
    ) -> tuple[Shape, Callable[[], None], torch.Tensor]:
        """Returns the captured shape, what fills its words with padding, and the words."""
        shape, padding = self._padded(size, draw, has_adapters)
        words, harmless = self._words[: len(padding)], torch.from_numpy(padding).to(self._words.device)

        def prepare() -> None:
            words.copy_(harmless)

        return shape, prepare, words


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the captured numbers of sequences: 1, 2, 4, every 8th up to 64, then every 16th up to 512."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 513, 16)]
    within = [size for size in sizes if size < max_num_seqs]
    return (*within, min(max_num_seqs, 512))


Result = TypeVar("Result")


class Recording(NamedTuple, Generic[Result]):
    """A recorded call."""

    replay: Callable[[], None]
    """Runs it again on the tensors that it read, and writes those of its result."""
    result: Result
    """What the call returned; its tensors keep their addresses."""


class Recorder:
    """Records calls on one device. Their graphs share a memory pool, so the largest is recorded first.

    Raises ValueError unless the device is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"cudagraph_mode: CUDA graphs need a GPU, and the engine runs on the {device.type}; set it "
                "to None or NONE"
            )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(
            device
        )  # one stream for all, because libraries keep a workspace per stream

    def record(self, prepare: Callable[[], None], run: Callable[[], Result]) -> Recording[Result]:
        """Records `run`, which may neither wait for the device nor copy from the host.

        prepare: makes the input of `run` harmless, because it runs once before the recording.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels before the capture, which cannot
            prepare()
            run()
            prepare()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because NCCL's watchdog thread queries events during the capture.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            result = run()
        return Recording(graph.replay, result)
