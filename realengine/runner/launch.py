"""A step that has been launched: the sequences that draw in it, and the transfer of tokens to the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import islice

import torch

from policies.core.sequence import Sequence
from realengine.runner.graphs import Drawn
from realengine.runner.prompt_scores import ScoredChunk
from realengine.serving.answer import TokenLogprobs

Row = tuple[Sequence, int]
"""A sequence that draws a token in a step, and the index of its branch."""
Result = Drawn | Callable[[], Drawn | None] | None
"""What a step has drawn; or a function that waits for it, if another rank draws; None: nothing is drawn."""


class Launch:
    """A launched step: its drawing sequences, and its tokens once they have arrived."""

    def __init__(self, rows: list[Row], drawn: Result, num_iterations: int) -> None:
        self.rows = rows
        self.num_iterations = num_iterations
        self.finished: list[Sequence] = []
        """Sequences that end with this launch because they have reached their length limit."""
        self.num_drafts: SequenceOf[int] = ()
        """Draft tokens of the first rows, if the launch verifies any; the other rows have none."""
        self.scored: list[ScoredChunk] = []
        """Tokens of prompts whose log-probabilities it brings."""
        self.faults: list[tuple[Sequence, str]] = []
        """Sequences whose outputs can have no token of their form, and the reasons."""
        self._tokens: torch.Tensor | None = None
        self._prompt: tuple[torch.Tensor, ...] = ()
        self._logprobs: tuple[torch.Tensor, ...] = ()
        self._accepted: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._check: Callable[[], None] | None = None
        self._receive = None
        if callable(drawn):
            self._receive = drawn
        elif drawn is not None:
            self._take(drawn)

    def arrive(self) -> None:
        """Waits for what another rank has drawn; does nothing if this one draws."""
        receive, self._receive = self._receive, None
        drawn = None if receive is None else receive()
        if drawn is not None:
            self._take(drawn)

    def _take(self, drawn: Drawn) -> None:
        """Starts the transfer of what was drawn on this rank's device."""
        self._check = drawn.check
        self._tokens = _on_host(drawn.tokens_IS)
        if drawn.logprobs is not None:
            self._logprobs = tuple(_on_host(part) for part in drawn.logprobs)
        if drawn.prompt is not None:
            self._prompt = tuple(_on_host(part) for part in drawn.prompt)
        if drawn.accepted_IS is not None:
            self._accepted = _on_host(drawn.accepted_IS)
        if drawn.tokens_IS.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self) -> list[list[int]]:
        """Waits for the tokens of each row, and returns them, in their order."""
        if self._tokens is None:
            return []
        self._wait()
        columns: list[list[int]] = self._tokens.T.tolist()
        if self._accepted is None:
            return columns[: len(self.rows)]
        width = len(self._tokens) // len(self._accepted)  # of an iteration
        return [
            [token for place, num in enumerate(numbers) for token in column[place * width :][: num + 1]]
            for column, numbers in zip(columns, self.accepted(), strict=False)
        ]

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        if self._check is not None:
            self._check()

    @property
    def has_single_tokens(self) -> bool:
        """True if each row has one token and no log-probabilities."""
        tokens = self._tokens
        return tokens is not None and len(tokens) == 1 and self._accepted is None and not self._logprobs

    def single_tokens(self) -> list[int]:
        """Waits for the token of each row, and returns them, if each row has one."""
        assert self._tokens is not None
        self._wait()
        tokens: list[int] = self._tokens[0, : len(self.rows)].tolist()
        return tokens

    def accepted(self) -> list[list[int]]:
        """Returns the accepted draft tokens of each row, by iteration; valid after `tokens`."""
        assert self._accepted is not None
        numbers: list[list[int]] = self._accepted.T.tolist()
        return numbers[: len(self.rows)]

    def logprobs(self) -> list[list[TokenLogprobs]] | None:
        """Returns the log-probabilities of each row's tokens, if requested; valid after `tokens`."""
        if self._tokens is None or not self._logprobs:
            return None
        stride = self._tokens.shape[1]  # rows of padding may follow ours
        found = _by_row(self._logprobs)
        return [found[place::stride] for place in range(len(self.rows))]

    def prompt_logprobs(self) -> list[tuple[ScoredChunk, list[TokenLogprobs]]]:
        """Returns the log-probabilities of the tokens of prompts that it scored; valid after `tokens`."""
        if not self._prompt:
            return []
        found = iter(_by_row(self._prompt))
        return [(chunk, list(islice(found, chunk.num_tokens))) for chunk in self.scored]


def _by_row(logprobs: tuple[torch.Tensor, ...]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of each row."""
    drawn, top, tokens = (part.tolist() for part in logprobs)
    return [
        TokenLogprobs(own, dict(zip(ids, values, strict=True)))
        for own, values, ids in zip(drawn, top, tokens, strict=True)
    ]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Starts the copy of a GPU tensor to pinned memory; other tensors are returned unchanged."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
