"""Reads Mooncake's request traces (Qin et al., FAST 2025): JSON lines with hashes of the prompt content."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS, require_positive
from sim.workload.table import rows_of
from sim.workload.trace_files import lines_of
from sim.workload.traces import Trace, TraceRow
from sim.workload.unix_times import ArrivalClock


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeJsonl(Trace):
    """One JSON object per line: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    hash_ids identify the prompt's content, one per tokens_per_hash tokens; the last may stand for fewer. They
    are required, because without them no prefix cache would have hits.
    """

    time_exponent: ClassVar[int] = 3
    tokens_per_hash: int = 512

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def rows(self) -> Iterator[TraceRow]:
        line, clock = 0, self.number_clock()
        for line, text in enumerate(lines_of(self.path), 1):
            if text.isspace():
                continue
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.path}:{line}:{error.colno}: expected one JSON object per line: {error.msg}"
                ) from None
            except RecursionError:
                raise ValueError(f"{self.path}:{line}:1: nests values too deeply to be read") from None
            except ValueError as error:  # an integer of thousands of digits
                raise ValueError(
                    f"{self.path}:{line}:1: expected one JSON object per line: {error}"
                ) from None
            yield self._checked(line, text, row, clock)
        if not line:
            wanted = ", ".join(RULES)
            raise ValueError(f"{self.path}:1:1: expected JSON lines with {wanted}, found an empty file")

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        full, rest = divmod(num_tokens, self.tokens_per_hash)
        whole = tuple(rows_of(Segment, content_ids[:full], repeat(self.tokens_per_hash)))
        return whole + tuple(Segment(content_id, rest) for content_id in content_ids[full : full + 1] if rest)

    def _checked(self, line: int, text: str, row: Any, clock: ArrivalClock) -> TraceRow:
        if not isinstance(row, dict):
            raise ValueError(f"{self.path}:{line}:1: expected a JSON object, found {text.strip()[:80]}")
        for key, (is_sound, rule) in RULES.items():
            if key not in row:
                raise ValueError(
                    f"{self.path}:{line}:1: no key {key}; expected {', '.join(RULES)}, found {', '.join(row)}"
                )
            if not is_sound(row[key]):
                raise self._bad_value(line, text, key, rule, row[key])
        max_ids = -(-row["input_length"] // self.tokens_per_hash)
        if len(row["hash_ids"]) > max_ids:
            rule = f"at most {max_ids} ids for {row['input_length']} tokens, {self.tokens_per_hash} each"
            raise self._bad_value(line, text, "hash_ids", rule, f"{len(row['hash_ids'])} ids")
        try:
            arrival_s = clock(str(row["timestamp"]))
        except ValueError:
            raise self._bad_value(line, text, "timestamp", TIME_RULE, row["timestamp"]) from None
        hash_ids = tuple(row["hash_ids"])
        return TraceRow(
            line, arrival_s, row["input_length"], row["output_length"], hash_ids, clock.take_remark()
        )

    def _bad_value(self, line: int, text: str, key: str, rule: str, found: object) -> ValueError:
        column = text.index(f'"{key}"') + 1 if f'"{key}"' in text else 1
        return ValueError(f"{self.path}:{line}:{column}: {key}: expected {rule}, found {str(found)[:80]}")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float)  # the clock checks its size


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_TOKENS


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


TIME_RULE = f"a finite number of ms >= 0, at most {MAX_ARRIVAL_S * 1e3:g} after the first"
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # for the keys that a row must have
    "timestamp": (_is_time, TIME_RULE),
    "input_length": (_is_count, f"a whole number of tokens from 1 to {MAX_TOKENS:,}"),
    "output_length": (_is_count, f"a whole number of tokens from 1 to {MAX_TOKENS:,}"),
    "hash_ids": (_is_list_of_ids, "a list of whole numbers"),
}
