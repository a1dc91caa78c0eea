"""Ids of recently evicted content (ghost entries), which use no KV memory."""

from __future__ import annotations


class Ghosts:
    """The ids of evicted contents and their numbers of tokens."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by content id, the oldest first
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def recall(self, content_id: int) -> bool:
        """Removes an id, because its content is inserted again; returns whether it was stored."""
        num_tokens = self._tokens.pop(content_id, None)
        if num_tokens is None:
            return False
        self._num_tokens -= num_tokens
        return True

    def remember(self, content_id: int, num_tokens: int, max_num_tokens: float) -> None:
        """Adds an id as the newest and removes the oldest ids beyond max_num_tokens tokens."""
        self._num_tokens += num_tokens - self._tokens.pop(content_id, 0)
        self._tokens[content_id] = num_tokens
        while self._num_tokens > max_num_tokens:
            oldest = next(iter(self._tokens))
            self._num_tokens -= self._tokens.pop(oldest)
