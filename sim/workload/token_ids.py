"""Reads traces with the token ids of prompts and outputs: JSON lines of our own.

    {"arrival_s": 0.5, "prompt_token_ids": [5, 17, 17], "output_token_ids": [42, 9]}

A replay with them has the prefix-cache hits of the recorded prompts, and with `acceptance=text` the draft
tokens that n-gram and suffix matching would find.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S
from sim.workload.json_lines import keys_of
from sim.workload.table import block_segments
from sim.workload.trace_blocks import TraceRow
from sim.workload.trace_files import lines_of, shown
from sim.workload.traces import Trace

BLOCK = 16
"""Tokens of a prompt that have one content id: a KV block."""
MAX_ID = (1 << 31) - 1
MAX_KEPT_TOKENS = 200_000_000
"""Limit of the tokens of a file that is kept in memory: 800 MB."""

KEYS = ("arrival_s", "prompt_token_ids", "output_token_ids")


class TokenIds(NamedTuple):
    """One request of the file."""

    line: int
    arrival_s: float
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]

    def content_ids(self) -> tuple[int, ...]:
        """Returns one content id per block of the prompt: equal blocks have equal ids."""
        blocks = (self.prompt[start : start + BLOCK] for start in range(0, len(self.prompt), BLOCK))
        digests = (blake2b(block.tobytes(), digest_size=8).digest() for block in blocks)
        return tuple(int.from_bytes(digest, "little") >> 1 for digest in digests)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenIdsJsonl(Trace):
    """One JSON object per line: `arrival_s`, `prompt_token_ids`, `output_token_ids`."""

    def column_names(self) -> Iterable[str]:
        return keys_of(self.path)

    def rows(self) -> Iterator[TraceRow]:
        clock = self.number_clock()
        for row in read_token_ids(self.path):
            try:
                arrival_s = clock(str(row.arrival_s))
            except ValueError:
                raise _bad_value(self.path, row.line, "arrival_s", TIME_RULE, row.arrival_s) from None
            yield TraceRow(
                row.line, arrival_s, len(row.prompt), len(row.output), row.content_ids(), clock.take_remark()
            )

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, BLOCK)


def kept_token_ids(path: Path) -> list[TokenIds]:
    """Returns all requests of a file. Raises ValueError with file and line, also for too many tokens."""
    kept, total = [], 0
    for row in read_token_ids(path):
        total += len(row.prompt) + len(row.output)
        if total > MAX_KEPT_TOKENS:
            raise ValueError(f"{path}:{row.line}:1: must have at most {MAX_KEPT_TOKENS:,} tokens")
        kept.append(row)
    return kept


def read_token_ids(path: Path) -> Iterator[TokenIds]:
    """Yields the requests of a file. Raises ValueError with file and line."""
    is_empty = True
    for line, text in enumerate(lines_of(path), 1):
        if text.isspace():
            continue
        is_empty = False
        yield _checked(path, line, text)
    if is_empty:
        raise ValueError(f"{path}:1:1: expected JSON lines with {', '.join(KEYS)}, found none")


def _checked(path: Path, line: int, text: str) -> TokenIds:
    try:
        row = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}:{line}:1: nests values too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{path}:{line}:1: expected one JSON object per line: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{path}:{line}:1: expected a JSON object, found {shown(text.strip())}")
    for key in KEYS:
        if key not in row:
            raise ValueError(
                f"{path}:{line}:1: no key {key}; expected {', '.join(KEYS)}, "
                f"found {shown(', '.join(row), 200)}"
            )
    if type(row["arrival_s"]) not in (int, float):
        raise _bad_value(path, line, "arrival_s", TIME_RULE, row["arrival_s"])
    prompt, output = (_ids(path, line, key, row[key]) for key in KEYS[1:])
    return TokenIds(line, row["arrival_s"], prompt, output)


def _ids(path: Path, line: int, key: str, found: Any) -> NDArray[np.int32]:
    if not isinstance(found, list) or not found or set(map(type, found)) != {int}:
        raise _bad_value(path, line, key, IDS_RULE, found)
    if min(found) < 0 or max(found) > MAX_ID:
        raise _bad_value(path, line, key, IDS_RULE, [min(found), max(found)])
    return np.frombuffer(array("i", found), np.int32)


def _bad_value(path: Path, line: int, key: str, rule: str, found: object) -> ValueError:
    return ValueError(f"{path}:{line}:1: {key}: expected {rule}, found {shown(found)}")


TIME_RULE = f"a finite number of seconds >= 0, at most {MAX_ARRIVAL_S:g} after the first"
IDS_RULE = f"a list of at least one token id, whole numbers from 0 to {MAX_ID:,}"
