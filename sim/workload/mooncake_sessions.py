"""Reads Mooncake traces with sessions and delays, as AIPerf's mooncake_trace has them: closed-loop turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Source
from sim.workload.checks import MAX_ARRIVAL_S, require_positive
from sim.workload.conversation import ConversationSource
from sim.workload.json_lines import COUNT, Line, Rule, objects_of
from sim.workload.session_pool import in_a_loop
from sim.workload.streams import stream
from sim.workload.text_lengths import TextLengths
from sim.workload.trace_files import require_file, shown
from sim.workload.unix_times import ArrivalClock
from sim.workload.unused_columns import unused_columns

KEYS = ("session_id", "input_length", "output_length")
WHOLE_CONTEXT = "message_array_with_responses"
MAX_MS = 1e12
MAX_TURNS = 10_000_000
"""Turns that are kept in memory."""


def _is_ms(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_MS


LENGTHS = {"input_length": COUNT, "output_length": COUNT}
MS = Rule(_is_ms, f"a number of ms from 0 to {MAX_MS:g}")


@dataclass(slots=True)
class _Session:
    """The turns of a session, in the order of the file; times in s."""

    first_s: float | None
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class MooncakeSessions:
    """JSON lines with `session_id`, `input_length` or `text_input`, `output_length`, `delay`, `timestamp`.

    A session begins at the `timestamp` (ms) of its first turn, and sessions without one by `arrivals`; each
    later turn is sent `delay` ms after the end of the one before (or, without a delay, as long after it as
    the timestamps are apart). As in AIPerf, `input_length` is what a turn adds: its prompt is all earlier
    prompts and outputs of the session and these tokens. With context_mode message_array_with_responses it is
    the whole prompt. tokenizer: counts the tokens of texts; None: 4 characters per token.
    """

    path: Path
    arrivals: ArrivalProcess | ClosedLoop
    max_sessions: int | None = None
    tokenizer: Path | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_positive(self, "max_sessions", "patience_s")
        require_file(self.path)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the turns; session_id is the number of the session in the file."""
        remarks: list[str] = []
        sessions = self._sessions(remarks)
        if isinstance(self.arrivals, ClosedLoop):
            first_s = np.zeros(len(sessions))
            if sessions[0].first_s is not None:
                remarks.append("Sessions begin by the closed loop, not at the timestamps of the trace.")
        elif sessions[0].first_s is None:
            rng = stream(seed, "arrivals")
            first_s = self.arrivals.times_s(rng, num_requests=len(sessions), duration_s=None)
            if len(first_s) < len(sessions):
                raise ValueError(
                    f"arrivals: must have a time for each session, and ends after {len(first_s)}"
                )
        else:
            sessions.sort(key=lambda one: one.first_s or 0.0)
            first_s = np.array([one.first_s for one in sessions], np.float64)
            if zero_s := float(first_s[0]):
                remarks.append(
                    f"The first session of the trace begins at {zero_s:,.10g} s, which is 0 s of the run."
                )
                first_s = np.round(first_s - zero_s, 7)
        source = ConversationSource(
            first_s=first_s,
            num_turns=np.array([len(one.inputs) for one in sessions]),
            message_tokens=np.array([tokens for one in sessions for tokens in one.inputs]),
            answer_tokens=np.array([tokens for one in sessions for tokens in one.outputs]),
            think_s=np.array([delay_s for one in sessions for delay_s in one.delays_s]),
            system_prompts=[],
            system_prompt_of=np.zeros(len(sessions), np.int64),
            max_model_len=max_model_len,
            patience_s=self.patience_s,
        )
        source.notes.remarks += remarks
        return in_a_loop(source, self.arrivals, seed=seed, duration_s=None)

    def _sessions(self, remarks: list[str]) -> list[_Session]:
        """Returns the sessions in the order of the file; adds to the remarks. Raises ValueError."""
        sessions: dict[str, _Session] = {}
        last_s: dict[str, float] = {}
        clock = ArrivalClock(3)
        lengths: TextLengths | None = None
        keys: dict[str, None] = {}
        for line in objects_of(self.path, KEYS):
            row = line.row
            keys |= dict.fromkeys(row)
            if "input_length" not in row and isinstance(row.get("text_input"), str):
                lengths = lengths or TextLengths(self.tokenizer)
                row["input_length"] = lengths(row["text_input"])
            line.check(LENGTHS)
            name = str(row.get("session_id", f"line {line.number}"))
            if name not in sessions and len(sessions) == self.max_sessions:
                continue
            at_s = _time_s(line, clock)
            if remark := clock.take_remark():
                remarks.append(remark)
            if name not in sessions:
                sessions[name] = _Session(at_s)
            delay_s = _delay_s(line, at_s, last_s.get(name), is_first=not sessions[name].inputs)
            _add(line, sessions[name], delay_s)
            last_s |= {} if at_s is None else {name: at_s}
            if line.number > MAX_TURNS:
                raise ValueError(
                    f"{self.path}:{line.number}:1: must have at most {MAX_TURNS:,} turns; divide the file"
                )
        if lengths is not None:
            remarks.append(lengths.remark)
        if "hash_ids" in keys:
            remarks.append("hash_ids are not used: turns share the contents of their session only.")
        if remark := unused_columns(keys, ("session_id", "delay")):
            remarks.append(remark)
        return self._checked(list(sessions.values()))

    def _checked(self, sessions: list[_Session]) -> list[_Session]:
        """Raises ValueError unless there are sessions, and all or none of them begin at a known time."""
        if not sessions:
            raise ValueError(f"{self.path}:1:1: expected at least one session, found none")
        num_timed = sum(one.first_s is not None for one in sessions)
        if num_timed not in (0, len(sessions)):
            raise ValueError(
                f"{self.path}: timestamp: must be in the first turn of all sessions or of none, is in "
                f"{num_timed:,} of {len(sessions):,}"
            )
        return sessions


def _time_s(line: Line, clock: ArrivalClock) -> float | None:
    if line.row.get("timestamp") is None:
        return None
    rule = f"a finite number of ms >= 0, at most {MAX_ARRIVAL_S * 1e3:g} after the first"
    try:
        if type(line.row["timestamp"]) not in (int, float):
            raise ValueError
        return clock(str(line.row["timestamp"]))
    except ValueError:
        raise line.bad("timestamp", rule, line.row["timestamp"]) from None


def _delay_s(line: Line, at_s: float | None, last_s: float | None, *, is_first: bool) -> float:
    """Returns the time between the end of the turn before and this one."""
    if line.row.get("delay") is not None:
        line.check({"delay": MS})
        return float(line.row["delay"]) / 1e3
    if is_first or at_s is None or last_s is None:
        return 0.0
    if at_s < last_s:
        raise line.bad(
            "timestamp",
            f"a time at or after that of the turn before ({last_s * 1e3:g} ms)",
            line.row["timestamp"],
        )
    return at_s - last_s


def _add(line: Line, session: _Session, delay_s: float) -> None:
    """Adds a turn to its session; its input is what it adds to the context."""
    added, mode = line.row["input_length"], line.row.get("context_mode")
    if mode == WHOLE_CONTEXT:
        before = sum(session.inputs) + sum(session.outputs)
        if added <= before:
            rule = f"more than the {before:,} tokens before it, as its context_mode is {WHOLE_CONTEXT}"
            raise line.bad("input_length", rule, added)
        added -= before
    elif mode not in (None, "deltas", "deltas_without_responses", "deltas_with_responses"):
        raise line.bad("context_mode", f"{WHOLE_CONTEXT}, or none", shown(mode))
    session.inputs.append(added)
    session.outputs.append(line.row["output_length"])
    session.delays_s.append(delay_s)
