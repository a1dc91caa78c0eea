"""Parents of the branches of a beam or tree search, drawn at random as no model computes scores.

Each new branch continues one of the old ones, all equally likely, independently of each other. A real beam
search is less even: the best hypotheses have more children, so its branches share more.
"""

from __future__ import annotations

from hashlib import blake2b

from policies.core.sequence import Sequence

_BYTES = 4  # per draw


def draw_parents(seed: int, request_id: int, num_tokens: int, width: int) -> tuple[int, ...]:
    """Returns, for each of `width` new branches, the old branch that it continues.

    num_tokens: the number of the output token at which the branches are chosen. The result depends on the
    arguments alone, on every machine.
    """
    drawn = b""
    while len(drawn) < width * _BYTES:
        name = f"{seed}/parents/{request_id}/{num_tokens}/{len(drawn)}"
        drawn += blake2b(name.encode(), digest_size=64).digest()
    words = (drawn[i * _BYTES : (i + 1) * _BYTES] for i in range(width))
    return tuple(int.from_bytes(word, "little") % width for word in words)


def chosen_parents(seed: int, seq: Sequence) -> tuple[int, ...] | None:
    """Returns the parents of a sequence's branches at its next token; None: the branches are unchanged."""
    branching = seq.request.branching
    if branching is None or branching.every is None:
        return None
    num_before = seq.num_output_tokens
    if not num_before or num_before % branching.every:  # the first token is sampled from the prompt alone
        return None
    return draw_parents(seed, seq.request_id, num_before + 1, seq.width)
