"""Reads recorded sessions of coding agents: Weka's format (also SemiAnalysis's sets), and TraceLab.

The calls of a session are replayed at their recorded times after its start.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from policies.core.request import Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop, arrival_chunks_s
from sim.workload.base import Source
from sim.workload.checked_traces import checked_once
from sim.workload.checks import MAX_ARRIVAL_S, require_positive
from sim.workload.external_sort import SortedRows
from sim.workload.json_lines import COUNT, IDS, TEXT, TOKENS, Line, Rule, keys_of, objects_of
from sim.workload.session_pool import in_a_loop
from sim.workload.streams import stream
from sim.workload.table import block_segments
from sim.workload.trace_blocks import Block, TraceRow, blocks_of_rows
from sim.workload.trace_files import require_file
from sim.workload.trace_source import TraceSource, Window
from sim.workload.traces import Trace

MAX_SESSION_S = 1e8
MAX_SESSIONS = 1 << 40
"""Sessions for which times can be drawn: more than any file has."""


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SESSION_S


TIME = Rule(_is_time, f"a number of seconds from 0 to {MAX_SESSION_S:g}")
LIST = Rule(
    lambda value: isinstance(value, list) and all(isinstance(v, dict) for v in value), "a list of objects"
)
SESSION_RULES = {
    "id": TEXT,
    "block_size": COUNT,
    "hash_id_scope": Rule(lambda value: value in ("local", "global"), "local or global"),
    "requests": LIST,
}
TYPE_RULES = {"type": Rule(lambda value: value in ("n", "s", "subagent"), "n, s, or subagent"), "t": TIME}
CALL_RULES = {"in": COUNT, "out": COUNT, "hash_ids": IDS}


class _Call(NamedTuple):
    """One call of a session, at seconds after its start."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WekaJsonl:
    """One session per line: `id`, `block_size`, `hash_id_scope`, `requests`; sessions begin by `arrivals`.

    A request has `t` (seconds after the start), `type` (n, s, or subagent, which has `requests` of its own),
    `in`, `out` and `hash_ids` of whole blocks. Times in a subagent before its own `t` count from it. With
    hash_id_scope local, equal ids of two sessions are different contents.
    """

    path: Path
    arrivals: ArrivalProcess | ClosedLoop
    max_sessions: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_positive(self, "max_sessions", "patience_s")
        require_file(self.path)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the calls of all sessions, in order of time; session_id is the number of the session.

        A closed loop begins a session when another has ended; its calls keep their times after its begin.
        """
        calls = checked_once(
            self.path,
            (self, seed, max_model_len),
            lambda: TraceSource(
                self.path,
                SortedRows(blocks_of_rows(self._rows(seed))),
                window=Window(0.0, None, None),
                segments=_segments,
                max_model_len=max_model_len,
                patience_s=self.patience_s,
                time_digits=None,
            ),
        )
        return in_a_loop(calls, self.arrivals, seed=seed, duration_s=None)

    def _rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the calls in the order of the file; before the content ids is their block size."""
        is_loop = isinstance(
            self.arrivals, ClosedLoop
        )  # then one after the other, until the loop begins them
        begin_s, ended_s = iter(()) if is_loop else self._begin_s(seed), 0.0
        numbers, places, of_all = count(), count(1), dict[int, int]()
        for session, (block_size, is_local, calls) in enumerate(self._sessions()):
            at_s = ended_s if is_loop else next(begin_s, None)
            if at_s is None:
                raise ValueError(f"arrivals: must have a time for each session, and ends after {session}")
            ended_s = at_s + max(call.at_s for call in calls) + 1.0
            contents = dict[int, int]() if is_local else of_all
            for call in calls:
                ids = (
                    contents[key] if key in contents else contents.setdefault(key, next(numbers))
                    for key in call.hash_ids
                )
                yield TraceRow(
                    next(places),
                    at_s + call.at_s,
                    call.prompt_tokens,
                    call.output_tokens,
                    (block_size, *ids),
                    session_id=session,
                )

    def _begin_s(self, seed: int) -> Iterator[float]:
        """Yields the times at which sessions begin, which need not be counted before if they are drawn."""
        assert not isinstance(self.arrivals, ClosedLoop)
        num_sessions = MAX_SESSIONS
        if not hasattr(self.arrivals, "chunks_s"):
            num_sessions = sum(1 for _ in self._sessions())
        rng = stream(seed, "arrivals")
        chunks_s = arrival_chunks_s(self.arrivals, rng, num_requests=num_sessions, duration_s=None)
        return chain.from_iterable(chunk_s.tolist() for chunk_s in chunks_s)

    def _sessions(self) -> Iterator[tuple[int, bool, list[_Call]]]:
        """Yields block size, whether the scope is local, and the calls of each session with calls."""
        num_sessions = 0
        for line in objects_of(self.path, SESSION_RULES):
            line.check(SESSION_RULES)
            calls = list(_calls(line, line.row["requests"], 0.0))
            if calls:
                yield line.row["block_size"], line.row["hash_id_scope"] == "local", calls
                num_sessions += 1
            if num_sessions == self.max_sessions:
                return
        if not num_sessions:
            raise ValueError(f"{self.path}:1:1: expected at least one session with requests, found none")


def _segments(content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
    """Returns the content of a prompt. content_ids: the tokens of a block, then the ids of the blocks."""
    return block_segments(content_ids[1:], num_tokens, content_ids[0])


def _calls(line: Line, requests: list[dict[str, Any]], from_s: float) -> Iterator[_Call]:
    """Yields the calls in a list of requests. from_s: start of the subagent; 0 for the session."""
    for row in requests:
        line.check(TYPE_RULES, row)
        at_s = row["t"] + (from_s if row["t"] < from_s else 0.0)
        if row["type"] == "subagent":
            if from_s:
                raise line.bad("type", "n or s in a subagent", "a subagent in a subagent")
            line.check({"requests": LIST}, row)
            yield from _calls(line, row["requests"], at_s)
            continue
        line.check(CALL_RULES, row)
        max_ids = -(-row["in"] // line.row["block_size"])
        if len(row["hash_ids"]) > max_ids:
            rule = f"at most {max_ids} ids for {row['in']} tokens, {line.row['block_size']} each"
            raise line.bad("hash_ids", rule, f"{len(row['hash_ids'])} ids")
        yield _Call(at_s, row["in"], row["out"], row["hash_ids"])


ROUND_RULES = {
    "session_id": TEXT,
    "input_tokens_total": COUNT,
    "prefix_tokens": TOKENS,
    "output_tokens": TOKENS,
    "timing_events": LIST,
}
REASONING = "reasoning_output_tokens"
INPUTS, OUTPUTS = ("user_message", "tool_result"), ("text", "reasoning", "tool_call")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLabJsonl(Trace):
    """TraceLab: one LLM round per line, in any order; the earliest is at 0 s.

    `timing_events` (a list of `event_type` and `timestamp`) say when a round was sent: with the last of its
    inputs (user_message, tool_result), or its first output if it has none. The prompt of
    `input_tokens_total` tokens begins with `prefix_tokens` tokens of the session's previous one, which the
    engine found in its cache; the file has no hashes, so contents are named by blocks of tokens_per_hash.
    `reasoning_output_tokens`, if any, are part of the output.
    """

    has_any_order: ClassVar[bool] = True
    tokens_per_hash: int = 64

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def column_names(self) -> Iterable[str]:
        return keys_of(self.path)

    def used_columns(self) -> Iterable[str]:
        return ROUND_RULES

    def rows(self) -> Iterator[TraceRow]:
        """Yields the rounds in the order of the file, at Unix times.

        In place of contents, which follow from the order of time, they have their prefix tokens, and in place
        of a tenant their session, as JSON: its name may have characters that no text can have.
        """
        for line in objects_of(self.path, ROUND_RULES):
            line.check(ROUND_RULES)
            row = line.row
            if row.get(REASONING) is not None:
                line.check({REASONING: TOKENS})
            yield TraceRow(
                line.number,
                _sent_s(line),
                row["input_tokens_total"],
                row["output_tokens"] + (row.get(REASONING) or 0),
                (row["prefix_tokens"],),
                tenant=json.dumps(row["session_id"]),
            )

    def finished(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[Block]:
        return blocks_of_rows(self._finished_rows(blocks))

    def _finished_rows(self, blocks: Callable[[], Iterator[Block]]) -> Iterator[TraceRow]:
        """Yields the rounds at seconds after the earliest, with the content ids of their prompts."""
        num_left = Counter(session for *_, session in _columns_of(blocks()))  # rounds of each session
        previous: dict[str, tuple[int, ...]] = {}  # session -> content ids of its latest prompt
        first_s: float | None = None
        num_ids = 0
        for number, sent_s, total, output, (prefix,), session in _columns_of(blocks()):
            first_s = sent_s if first_s is None else first_s
            if sent_s - first_s > MAX_ARRIVAL_S:
                raise ValueError(
                    f"{self.path}:{number}:1: timing_events: expected times at most {MAX_ARRIVAL_S:g} s "
                    f"after the earliest round, found {sent_s - first_s:g} s"
                )
            num_blocks = total // self.tokens_per_hash
            ids = previous.pop(session, ())[: min(prefix // self.tokens_per_hash, num_blocks)]
            num_new = num_blocks - len(ids)
            ids += tuple(range(num_ids, num_ids + num_new))
            num_ids += num_new
            num_left[session] -= 1
            if num_left[session]:
                previous[session] = ids
            reason = "" if output else "no output tokens"
            yield TraceRow(number, sent_s - first_s, total, output, ids, skip_reason=reason)

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)


def _columns_of(blocks: Iterator[Block]) -> Iterator[tuple[int, float, int, int, tuple[int, ...], str]]:
    """Yields the rows of `TraceLabJsonl.rows` as tuples of their values."""
    for block in blocks:
        columns = (block.line, block.arrival_s, block.prompt_tokens, block.output_tokens)
        assert block.content_ids is not None
        assert block.tenant is not None
        yield from zip(
            *(column.tolist() for column in (*columns, block.content_ids, block.tenant)), strict=True
        )


def _sent_s(line: Line) -> float:
    """Returns the time at which a round was sent, in Unix seconds."""
    rule = "events with an event_type, and a timestamp such as 2026-01-31T12:00:00.5Z"
    events = line.row["timing_events"]
    inputs_s, outputs_s = [], []
    for event in events:
        try:
            time = datetime.fromisoformat(str(event["timestamp"]))
        except (KeyError, ValueError):
            raise line.bad("timing_events", rule, event) from None
        time_s = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        if event.get("event_type") in INPUTS:
            inputs_s.append(time_s)
        elif event.get("event_type") in OUTPUTS:
            outputs_s.append(time_s)
    if not inputs_s and not outputs_s:
        raise line.bad("timing_events", rule, events)
    return max(inputs_s) if inputs_s else min(outputs_s)
