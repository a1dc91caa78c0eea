"""How the KV of a sequence grows while it decodes."""

from __future__ import annotations

from typing import NamedTuple


class Growth(NamedTuple):
    """How the KV of a decoding sequence grows, from now until it has computed `until` tokens.

    takes_blocks: it needs a block more every block_size tokens; else it has its room already.
    widens: it attends to one token more every iteration; else it has reached a window.
    At `until` computed tokens the pool is asked again; None: never.
    """

    takes_blocks: bool = True
    widens: bool = True
    until: int | None = None


PAGED = Growth()
"""A block every block_size tokens, for ever."""

AT_LIMIT = Growth(takes_blocks=False, until=0)
"""No room for the next token: the pool has to be asked again before it is computed."""
