"""Ends an output's text before the first of its stop strings, however the text is split into pieces."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from realengine.serving.tokenizer import Detokenizer, Tokenizer


class StopStrings:
    """Searches one output for stop strings: takes pieces of text, and returns text that may be shown.

    The first stop string to be complete ends the text; of several that complete with the same character, the
    one that begins first. Text that may be the beginning of a stop string is held back until that is decided:

        | shown | held back: may become a stop string |
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Creates the search. Raises ValueError for an empty stop string, or none at all."""
        if not stop or isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
            raise ValueError(f"stop={stop!r}: must be a sequence of strings, none of them empty")
        self._stop = tuple(stop)
        self._held = ""
        self.found: str | None = None
        """The stop string that has ended the text."""

    def add(self, piece: str, *, may_end: bool = True) -> str:
        """Adds a piece; returns the text that is certainly before any stop string, none after the end.

        may_end: whether a stop string that this piece completes ends the text; otherwise it is only text.
        """
        if self.found is not None:
            return ""
        num_held, text = len(self._held), self._held + piece
        starts = ((text.find(one, max(0, num_held - len(one) + 1)), one) for one in self._stop)
        matches = [(start + len(one), start, one) for start, one in starts if start >= 0 and may_end]
        if matches:
            _, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        num_shown = len(text) - max(_num_begun(text, one) for one in self._stop)
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """Returns the held-back text, because no more text follows."""
        rest, self._held = self._held, ""
        return rest


class WatchedText:
    """Text of one output, token by token, as far as it is certainly before any stop string.

    hidden: tokens that are not text, such as EOS.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], hidden: Collection[int]) -> None:
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer)
        self._strings = StopStrings(stop)
        self._hidden = hidden

    def add(self, token: int, *, may_end: bool = True) -> bool:
        """Adds a token; returns whether a stop string ends the output with it.

        may_end: whether a stop string that this token completes ends the output.
        """
        if token not in self._hidden:
            self.text += self._strings.add(self._detokenizer.add(token), may_end=may_end)
        return self._strings.found is not None

    @property
    def found(self) -> str | None:
        """The stop string that has ended the text."""
        return self._strings.found

    def finish(self) -> None:
        """Adds the held-back text of an ended output, unless a stop string has ended it."""
        self.text += self._strings.add(self._detokenizer.finish()) + self._strings.finish()


def _num_begun(text: str, stop: str) -> int:
    """Returns how many characters at the end of text are the beginning of stop."""
    longest = min(len(stop) - 1, len(text))
    return next((num for num in range(longest, 0, -1) if text.endswith(stop[:num])), 0)
