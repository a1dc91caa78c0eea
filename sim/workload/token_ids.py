"""Reads traces with the token ids of prompts and outputs: JSON lines of our own.

    {"arrival_s": 0.5, "prompt_token_ids": [5, 17, 17], "output_token_ids": [42, 9]}

A replay with them has the prefix-cache hits of the recorded prompts, and with `acceptance=text` the draft
tokens that n-gram and suffix matching would find.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.workload.distributions import MAX_ARRIVAL_S
from sim.workload.trace_columns import Columns
from sim.workload.trace_tables import JSON_LINES, Record, Rule, json_lines
from sim.workload.traces import SECONDS, HashedTrace

BLOCK = 16
"""Tokens of a prompt that have one content id: a KV block."""
MAX_ID = (1 << 31) - 1
MAX_KEPT_TOKENS = 200_000_000
"""Limit of the tokens of a file kept in memory: 800 MB."""
KEYS = ("arrival_s", "prompt_token_ids", "output_token_ids")


class TokenIds(NamedTuple):
    """One request of the file."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]

    def content_ids(self) -> tuple[int, ...]:
        """Returns one content id per block of the prompt: equal blocks have equal ids."""
        blocks = (self.prompt[start : start + BLOCK] for start in range(0, len(self.prompt), BLOCK))
        digests = (blake2b(block.tobytes(), digest_size=8).digest() for block in blocks)
        return tuple(int.from_bytes(digest, "little") >> 1 for digest in digests)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIdsJsonl(HashedTrace):
    """One JSON object per line: `arrival_s`, `prompt_token_ids`, `output_token_ids`."""

    table = JSON_LINES
    times = SECONDS
    columns = Columns(
        arrival="arrival_s", prompt="prompt_token_ids", output="output_token_ids", hashes="content_ids"
    )

    tokens_per_hash: int = field(default=BLOCK, init=False)

    def records(self, found: Iterator[Record]) -> Iterator[Record]:
        """Yields the requests with the numbers of their tokens and the ids of their contents."""
        for record in found:
            ids = _token_ids(record)
            record.values |= {
                "prompt_token_ids": len(ids.prompt),
                "output_token_ids": len(ids.output),
                "content_ids": list(ids.content_ids()),
            }
            yield record


def kept_token_ids(path: Path) -> list[TokenIds]:
    """Returns all requests of a file. Raises ValueError with file and line, also for too many tokens."""
    kept, total = [], 0
    for record in json_lines(path, RULES):
        ids = _token_ids(record)
        total += len(ids.prompt) + len(ids.output)
        if total > MAX_KEPT_TOKENS:
            raise ValueError(f"{path}:{record.number}:1: must have at most {MAX_KEPT_TOKENS:,} tokens")
        kept.append(ids)
    return kept


def _token_ids(record: Record) -> TokenIds:
    record.check(RULES)
    prompt, output = (np.frombuffer(array("i", record.values[name]), np.int32) for name in KEYS[1:])
    return TokenIds(prompt, output)


def _are_ids(found: Any) -> bool:
    is_list = isinstance(found, list) and set(map(type, found)) == {int}
    return is_list and min(found) >= 0 and max(found) <= MAX_ID


IDS = Rule(_are_ids, f"a list of at least one token id, whole numbers from 0 to {MAX_ID:,}")
TIME = Rule(lambda value: type(value) in (int, float), JSON_LINES.time_rule("seconds", MAX_ARRIVAL_S))
RULES = {"arrival_s": TIME, "prompt_token_ids": IDS, "output_token_ids": IDS}
