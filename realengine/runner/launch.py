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
Result = Drawn | Callable[[], SequenceOf[Drawn | None]] | None
"""What a step has drawn; or a function that waits for what other ranks draw; None: nothing is drawn."""


class Launch:
    """A launched step: its drawing sequences, and its tokens once they have arrived.

    num_rows: rows that each rank of data-parallel attention draws, in their order; None: one rank draws all.
    """

    def __init__(
        self, rows: list[Row], result: Result, num_iterations: int, num_rows: SequenceOf[int] | None = None
    ) -> None:
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
        self._num_rows = [len(rows)] if num_rows is None else num_rows
        self._parts: list[_Part] = []
        self._receive = None
        if callable(result):
            self._receive = result
        else:
            self._take([result])

    def arrive(self) -> None:
        """Waits for what other ranks have drawn; does nothing if only this one draws."""
        receive, self._receive = self._receive, None
        if receive is not None:
            self._take(receive())

    def _take(self, drawn: SequenceOf[Drawn | None]) -> None:
        pairs = zip(drawn, self._num_rows, strict=True)
        self._parts = [_Part(each, num_rows) for each, num_rows in pairs if each is not None]

    def tokens(self) -> list[list[int]]:
        """Waits for the tokens of each row, and returns them, in their order."""
        return [tokens for part in self._parts for tokens in part.tokens()]

    @property
    def has_single_tokens(self) -> bool:
        """True if each row has one token and no log-probabilities."""
        return len(self._parts) == 1 and self._parts[0].has_single_tokens

    def single_tokens(self) -> list[int]:
        """Waits for the token of each row, and returns them, if each row has one."""
        return self._parts[0].single_tokens()

    def accepted(self) -> list[list[int]]:
        """Returns the accepted draft tokens of each row, by iteration; valid after `tokens`."""
        return self._parts[0].accepted()

    def logprobs(self) -> list[list[TokenLogprobs]] | None:
        """Returns the log-probabilities of each row's tokens, if requested; valid after `tokens`."""
        if not any(part.has_logprobs for part in self._parts):
            return None
        return [row for part in self._parts for row in part.logprobs()]

    def prompt_logprobs(self) -> list[tuple[ScoredChunk, list[TokenLogprobs]]]:
        """Returns the log-probabilities of the tokens of prompts that it scored; valid after `tokens`."""
        found = iter([token for part in self._parts for token in part.prompt_logprobs()])
        return [(chunk, list(islice(found, chunk.num_tokens))) for chunk in self.scored]


class _Part:
    """Tokens that one rank has drawn for num_rows rows."""

    def __init__(self, drawn: Drawn, num_rows: int) -> None:
        self._num_rows = num_rows
        self._check = drawn.check
        self._tokens = _on_host(drawn.tokens_IS)
        self._logprobs = () if drawn.logprobs is None else tuple(map(_on_host, drawn.logprobs))
        self._prompt = () if drawn.prompt is None else tuple(map(_on_host, drawn.prompt))
        self._accepted = None if drawn.accepted_IS is None else _on_host(drawn.accepted_IS)
        self._event: torch.cuda.Event | None = None
        if drawn.tokens_IS.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def tokens(self) -> list[list[int]]:
        """Waits for the tokens of each row, and returns them."""
        self._wait()
        columns: list[list[int]] = self._tokens.T.tolist()
        if self._accepted is None:
            return columns[: self._num_rows]
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
        return len(self._tokens) == 1 and self._accepted is None and not self._logprobs

    def single_tokens(self) -> list[int]:
        self._wait()
        tokens: list[int] = self._tokens[0, : self._num_rows].tolist()
        return tokens

    def accepted(self) -> list[list[int]]:
        assert self._accepted is not None
        numbers: list[list[int]] = self._accepted.T.tolist()
        return numbers[: self._num_rows]

    @property
    def has_logprobs(self) -> bool:
        return bool(self._logprobs)

    def logprobs(self) -> list[list[TokenLogprobs]]:
        """Returns the log-probabilities of each row's tokens, none if they were not requested."""
        if not self._logprobs:
            return [[] for _ in range(self._num_rows)]
        stride = self._tokens.shape[1]  # rows of padding may follow ours
        found = _by_row(self._logprobs)
        return [found[place::stride] for place in range(self._num_rows)]

    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return _by_row(self._prompt) if self._prompt else []


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
