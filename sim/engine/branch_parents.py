"""The parents of the branches of a beam or tree search, drawn at random as no model computes scores.

Each new branch continues one of the old ones, all equally likely, independently of each other. A real beam
search is less even: the best hypotheses have more children, so its branches share more.
"""

from __future__ import annotations

from hashlib import blake2b

from policies.core.sequence import Sequence

_BYTES = 4  # a draw


def draw_parents(seed: int, request_id: int, num_tokens: int, width: int) -> tuple[int, ...]:
    """For each of `width` new branches the old one that it continues, at their num_tokens-th output token.

    A function of its arguments alone, on every machine.
    """
    drawn = b""
    while len(drawn) < width * _BYTES:
        name = f"{seed}/parents/{request_id}/{num_tokens}/{len(drawn)}"
        drawn += blake2b(name.encode(), digest_size=64).digest()
    words = (drawn[i * _BYTES : (i + 1) * _BYTES] for i in range(width))
    return tuple(int.from_bytes(word, "little") % width for word in words)


def chosen(seed: int, seq: Sequence) -> tuple[int, ...] | None:
    """The parents of the branches of a sequence at its next token; None: the branches continue unchanged."""
    branching = seq.request.branching
    if branching is None or branching.every is None:
        return None
    num_before = seq.num_output_tokens
    if not num_before or num_before % branching.every:  # the first token is sampled from the prompt alone
        return None
    return draw_parents(seed, seq.request_id, num_before + 1, seq.width)
