"""The growth of a sequence's KV while it decodes."""

from __future__ import annotations

from typing import NamedTuple


class Growth(NamedTuple):
    """Growth of the KV of a decoding sequence, until it has computed `until` tokens.

    takes_blocks: whether it needs another block every block_size tokens; if not, it has all its blocks.
    widens: whether it attends to one more token every iteration; if not, it has reached a window.
    until: computed tokens at which the pool is asked again; None: never.
    """

    takes_blocks: bool = True
    widens: bool = True
    until: int | None = None


PAGED = Growth()
"""Growth of a paged KV cache: one block every block_size tokens, without a limit."""

AT_LIMIT = Growth(takes_blocks=False, until=0)
"""Growth of a sequence without room for its next token: the pool must be asked before it is computed."""
