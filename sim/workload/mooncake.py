"""Reads traces with hashes of the prompt content in JSON lines: Mooncake's and Qwen-Bailian's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, require_positive
from sim.workload.json_lines import COUNT, IDS, NUMBER, Line, Rule, objects_of
from sim.workload.table import block_segments
from sim.workload.trace_blocks import TraceRow
from sim.workload.traces import Trace
from sim.workload.unix_times import ArrivalClock

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeJsonl(Trace):
    """Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    hash_ids identify the prompt's content, one per tokens_per_hash tokens; the last may stand for fewer. They
    are required, because without them no prefix cache would have hits.
    """

    time_exponent: ClassVar[int] = 3
    time_rule: ClassVar[str] = f"a finite number of ms >= 0, at most {MAX_ARRIVAL_S * 1e3:g} after the first"
    tokens_per_hash: int = 512

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def rows(self) -> Iterator[TraceRow]:
        clock = self.number_clock()
        rules = dict(zip(KEYS, (Rule(NUMBER.is_sound, self.time_rule), COUNT, COUNT, IDS), strict=True))
        for line in objects_of(self.path, KEYS):
            line.check(rules)
            yield self._row(line, clock)

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)

    def _row(self, line: Line, clock: ArrivalClock) -> TraceRow:
        row = line.row
        max_ids = -(-row["input_length"] // self.tokens_per_hash)
        if len(row["hash_ids"]) > max_ids:
            rule = f"at most {max_ids} ids for {row['input_length']} tokens, {self.tokens_per_hash} each"
            raise line.bad("hash_ids", rule, f"{len(row['hash_ids'])} ids")
        try:
            arrival_s = clock(str(row["timestamp"]))
        except ValueError:
            raise line.bad("timestamp", self.time_rule, row["timestamp"]) from None
        hash_ids = tuple(row["hash_ids"])
        return TraceRow(
            line.number, arrival_s, row["input_length"], row["output_length"], hash_ids, clock.take_remark()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BailianJsonl(MooncakeJsonl):
    """Qwen-Bailian (Wang et al., USENIX ATC 2025): Mooncake's keys with seconds, 16 tokens per hash.

    The further keys `chat_id`, `parent_chat_id`, `type` and `turn` are not needed: a later turn shares the
    hashes of the earlier ones.
    """

    time_exponent: ClassVar[int] = 0
    time_rule: ClassVar[str] = f"a finite number of seconds >= 0, at most {MAX_ARRIVAL_S:g} after the first"
    tokens_per_hash: int = 16
