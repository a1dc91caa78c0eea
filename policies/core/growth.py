"""The growth of a sequence's KV while it decodes."""

from __future__ import annotations

from typing import NamedTuple


class Growth(NamedTuple):
    """Growth of the KV of a decoding sequence, until it has computed `until` tokens.

    takes_blocks: it needs another block every block_size tokens; otherwise it has its room already.
    widens: it attends to one more token every iteration; otherwise it has reached a window.
    until: computed tokens at which the pool is asked again; None: never.
    """

    takes_blocks: bool = True
    widens: bool = True
    until: int | None = None


PAGED = Growth()
"""Growth of a paged KV cache: one block every block_size tokens, without a limit."""

AT_LIMIT = Growth(takes_blocks=False, until=0)
"""Growth of a sequence without room for its next token: the pool must be asked before it is computed."""
