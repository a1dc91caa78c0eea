"""Reads traces with hashes of the prompt content in JSON lines: Mooncake's and Qwen-Bailian's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pyarrow as pa

from policies.core.request import Segment
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS, require_positive
from sim.workload.json_lines import COUNT, IDS, NUMBER, Line, Rule, keys_of, objects_of
from sim.workload.json_pieces import columns_of, first_object, tuples_of
from sim.workload.table import block_segments
from sim.workload.text_lengths import TextLengths
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import UnusualTextError, pieces_of
from sim.workload.traces import Trace
from sim.workload.unix_times import ArrivalClock

KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
DELAY, TEXT_INPUT = "delay", "text_input"
NO_HASHES = "Requests without hash_ids share no contents, so no prefix cache finds their prompts."


BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024, 8, 4, 2, 1)
"""Sizes of blocks that are in use, the usual ones first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeJsonl(Trace):
    """Mooncake (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    hash_ids identify the prompt's content, one per tokens_per_hash tokens; the last may stand for fewer. A
    request without them shares no content, so no prefix cache finds its prompt; a note says so. A request may
    have its prompt as `text_input` in place of its length. tokenizer: the file that counts its tokens.
    """

    time_exponent: ClassVar[int] = 3
    time_rule: ClassVar[str] = f"a finite number of ms >= 0, at most {MAX_ARRIVAL_S * 1e3:g} after the first"
    tokens_per_hash: int = 512
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def blocks(self) -> Iterator[Block]:
        clock, num_lines = self.number_clock(), 0
        try:
            for piece in pieces_of(self.path):
                block = self._block(piece, num_lines + 1, clock)
                num_lines += len(block)
                yield block
        except UnusualTextError:
            yield from blocks_of_rows(self._rows(clock, num_lines))

    def _block(self, piece: bytes, line: int, clock: ArrivalClock) -> Block:
        """Returns the rows of a piece. Raises UnusualTextError unless all values are right."""
        if line == 1 and not clock.begins(str(first_object(piece).get(KEYS[0]))):
            raise UnusualTextError
        times, prompts, outputs, ids = columns_of(piece, _schema(clock)).values()
        arrival_s = clock.of_numbers(times.to_numpy())
        prompts, outputs = prompts.to_numpy(), outputs.to_numpy()
        hash_ids, num_ids = tuples_of(ids)
        is_right = (prompts >= 1) & (prompts <= MAX_TOKENS) & (outputs >= 1) & (outputs <= MAX_TOKENS)
        is_right &= num_ids <= -(-prompts // self.tokens_per_hash)
        if arrival_s is None or not is_right.all():
            raise UnusualTextError
        remark = clock.take_remark()
        return Block(
            line=np.arange(line, line + len(arrival_s)),
            arrival_s=arrival_s,
            prompt_tokens=prompts,
            output_tokens=outputs,
            content_ids=hash_ids,
            remarks=(remark,) if remark else (),
        )

    def _rows(self, clock: ArrivalClock, num_lines: int) -> Iterator[TraceRow]:
        """Yields the rows after the first num_lines lines."""
        time, prompt, output, ids = KEYS
        rules = {time: Rule(NUMBER.is_sound, self.time_rule), prompt: COUNT, output: COUNT, ids: IDS}
        lengths: TextLengths | None = None
        has_shared = True
        for line in objects_of(self.path, KEYS[:3], num_lines):
            row, remarks = line.row, []
            if DELAY in row:
                raise line.bad(
                    DELAY,
                    "no delays after the previous turn; workload=mooncake_sessions reads them",
                    row[DELAY],
                )
            if prompt not in row and isinstance(row.get(TEXT_INPUT), str):
                if lengths is None:
                    lengths = TextLengths(self.tokenizer)
                    remarks.append(lengths.remark)
                row[prompt] = lengths(row[TEXT_INPUT])
            if row.setdefault(ids, None) is None:
                row[ids] = []
                if has_shared:
                    remarks.append(NO_HASHES)
                has_shared = False
            line.check(rules)
            found = self._row(line, clock)
            yield found._replace(remark=" ".join(filter(None, (found.remark, *remarks))))

    def column_names(self) -> Iterable[str]:
        return keys_of(self.path)

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)

    def _row(self, line: Line, clock: ArrivalClock) -> TraceRow:
        row = line.row
        max_ids = -(-row["input_length"] // self.tokens_per_hash)
        if len(row["hash_ids"]) > max_ids:
            rule = f"at most {max_ids} ids for {row['input_length']} tokens, {self.tokens_per_hash} each"
            found = (
                f"{len(row['hash_ids'])} ids; {other_block_size(row['input_length'], len(row['hash_ids']))}"
            )
            raise line.bad("hash_ids", rule, found)
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


def other_block_size(num_tokens: int, num_ids: int) -> str:
    """Returns what to do if there are more ids than blocks of the setting."""
    fitting = [size for size in BLOCK_SIZES if -(-num_tokens // size) == num_ids]
    value = str(fitting[0]) if fitting else "the tokens that one id stands for"
    return f"set workload.tokens_per_hash={value}" + (", which fits this row" if fitting else "")


def _schema(clock: ArrivalClock) -> pa.Schema:
    """Returns the types of `KEYS`; a double cannot represent all whole Unix times."""
    types = (pa.int64() if clock.is_unix else pa.float64(), pa.int64(), pa.int64(), pa.list_(pa.int64()))
    return pa.schema(list(zip(KEYS, types, strict=True)))
