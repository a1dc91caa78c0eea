"""Reads recorded sessions of coding agents: Weka's format (also SemiAnalysis's sets), and TraceLab.

The calls of a session are replayed at their recorded times after its start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policies.core.request import Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source, WorkloadNotes
from sim.workload.checks import MAX_ARRIVAL_S, MAX_TOKENS, require_positive
from sim.workload.json_lines import COUNT, IDS, TEXT, Line, Rule, objects_of
from sim.workload.lengths import clip_to_context
from sim.workload.streams import stream
from sim.workload.table import TableSource, block_segments
from sim.workload.trace_blocks import TraceRow
from sim.workload.trace_files import require_file
from sim.workload.traces import Trace

MAX_SESSION_S = 1e8


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
    arrivals: ArrivalProcess
    max_sessions: int | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_positive(self, "max_sessions", "patience_s")
        if isinstance(self.arrivals, ClosedLoop):
            raise ValueError("arrivals: must be an open-loop process such as poisson, not a closed loop")
        require_file(self.path)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the calls of all sessions, in order of time; session_id is the number of the session."""
        sessions = list(self._sessions())
        start_s = self.arrivals.times_s(stream(seed, "arrivals"), num_requests=len(sessions), duration_s=None)
        numbers, contents = count(), dict[tuple[int | None, int], int]()
        rows = []
        for session, (at_s, (block_size, is_local, calls)) in enumerate(
            zip(start_s.tolist(), sessions, strict=True)
        ):
            for call in calls:
                keys = ((session if is_local else None, one) for one in call.hash_ids)
                ids = tuple(
                    contents[key] if key in contents else contents.setdefault(key, next(numbers))
                    for key in keys
                )
                rows.append(
                    (at_s + call.at_s, session, block_size, call.prompt_tokens, call.output_tokens, ids)
                )
        rows.sort(key=lambda row: row[0])
        prompts, outputs, clipped = clip_to_context(
            np.array([row[3] for row in rows], np.int64),
            np.array([row[4] for row in rows], np.int64),
            max_model_len,
        )

        def segments(row: int, num_tokens: int) -> tuple[Segment, ...]:
            return block_segments(rows[row][5], num_tokens, rows[row][2])

        return TableSource(
            arrival_s=np.array([row[0] for row in rows]),
            prompt_tokens=prompts,
            output_tokens=outputs,
            notes=WorkloadNotes(num_clipped=int(np.count_nonzero(clipped))),
            segments=segments,
            patience_s=self.patience_s,
            session_ids=np.array([row[1] for row in rows], np.int64),
        )

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


def _is_tokens(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKENS


TOKENS = Rule(_is_tokens, f"a whole number of tokens from 0 to {MAX_TOKENS:,}")
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

    tokens_per_hash: int = 64

    def __post_init__(self) -> None:
        Trace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "tokens_per_hash")

    def rows(self) -> Iterator[TraceRow]:
        rounds = []
        for line in objects_of(self.path, ROUND_RULES):
            line.check(ROUND_RULES)
            if line.row.get(REASONING) is not None:
                line.check({REASONING: TOKENS})
            rounds.append((_sent_s(line), line.number, line.row))
        rounds.sort(key=lambda one: one[:2])
        previous: dict[str, tuple[int, ...]] = {}
        numbers = count()
        for sent_s, number, row in rounds:
            if sent_s - rounds[0][0] > MAX_ARRIVAL_S:
                raise ValueError(
                    f"{self.path}:{number}:1: timing_events: expected times at most {MAX_ARRIVAL_S:g} s "
                    f"after the earliest round, found {sent_s - rounds[0][0]:g} s"
                )
            earlier = previous.get(row["session_id"], ())
            total = row["input_tokens_total"]
            num_blocks = total // self.tokens_per_hash
            num_kept = min(row["prefix_tokens"] // self.tokens_per_hash, len(earlier), num_blocks)
            ids = earlier[:num_kept] + tuple(next(numbers) for _ in range(num_blocks - num_kept))
            previous[row["session_id"]] = ids
            output = row["output_tokens"] + (row.get(REASONING) or 0)
            reason = "" if output else "no output tokens"
            yield TraceRow(number, sent_s - rounds[0][0], total, output, ids, skip_reason=reason)

    def segments(self, content_ids: tuple[int, ...], num_tokens: int) -> tuple[Segment, ...]:
        return block_segments(content_ids, num_tokens, self.tokens_per_hash)


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
