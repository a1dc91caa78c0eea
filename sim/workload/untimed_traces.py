"""Reads files without arrival times: Weka's sessions, ShareGPT, AIPerf's sessions, OpenAI's batches.

Their content begins according to `arrivals`, in the order of the file. The input files of OpenAI's Batch API,
which `vllm run-batch` also accepts, have one request per line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import count, repeat
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sim.workload.arrival_times import ArrivalClock
from sim.workload.arrivals import ArrivalProcess, ClosedLoop, arrival_chunks_s
from sim.workload.base import Source
from sim.workload.distributions import MAX_ARRIVAL_S, Lognormal, require_positive, stream
from sim.workload.sessions import ConversationSource, in_a_loop
from sim.workload.trace_columns import shown, unused_columns
from sim.workload.trace_files import require_file
from sim.workload.trace_reading import TextLengths
from sim.workload.trace_rows import Block, SortedRows, TraceRow, blocks_of_rows
from sim.workload.trace_source import TraceSource, Window, checked_once
from sim.workload.trace_tables import COUNT, IDS, OBJECTS, TEXT, JsonElements, Record, Rule, json_lines

MAX_DRAWN = 1 << 40
"""Maximum number of sessions for which times can be drawn: more than any file has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UntimedTrace:
    """Settings of all such files."""

    begins: ClassVar[str] = "session"
    """The noun for the unit that begins at an arrival, in messages."""
    sorts: ClassVar[bool] = False
    """Whether requests of the file are not in order of time."""

    path: Path
    arrivals: ArrivalProcess | ClosedLoop
    patience_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path).expanduser())
        require_positive(self, "patience_s")
        require_file(self.path)

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the requests at the times or in the closed loop of `arrivals`."""
        blocks = partial(self.blocks, seed)
        requests = checked_once(
            self.path,
            (self, seed, max_model_len),
            lambda: TraceSource(
                self.path,
                SortedRows(blocks()) if self.sorts else blocks,
                window=Window(0.0, None, self.max_rows()),
                max_model_len=max_model_len,
                patience_s=self.patience_s,
                time_digits=None,
            ),
        )
        return in_a_loop(requests, self.arrivals, seed=seed, duration_s=None)

    def blocks(self, seed: int) -> Iterator[Block]:
        """Yields the requests in the order of the file."""
        return blocks_of_rows(self.rows(seed))

    def rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the requests one by one; content ids are preceded by the number of tokens per id."""
        return iter(())

    def max_rows(self) -> int | None:
        """Returns how many of the first requests are replayed; None: all."""
        return None

    def begins_s(self, seed: int, count: Callable[[], int]) -> Iterator[float]:
        """Yields the times at which the units of the file begin; 0 s for a closed loop, which decides later.

        count: returns their number, for arrivals that are drawn at once. Raises ValueError when they end.
        """
        if isinstance(self.arrivals, ClosedLoop):
            yield from repeat(0.0)
            return
        most = MAX_DRAWN if hasattr(self.arrivals, "chunks_s") else count()
        rng, number = stream(seed, "arrivals"), 0
        for chunk_s in arrival_chunks_s(self.arrivals, rng, num_requests=most, duration_s=None):
            number += len(chunk_s)
            yield from chunk_s.tolist()
        raise ValueError(f"arrivals: must have a time for each {self.begins}, and ends after {number}")


MAX_SESSION_S = 1e8


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MAX_SESSION_S


TIME = Rule(_is_time, f"a number of seconds from 0 to {MAX_SESSION_S:g}")
SESSION_RULES = {
    "id": TEXT,
    "block_size": COUNT,
    "hash_id_scope": Rule(lambda value: value in ("local", "global"), "local or global"),
    "requests": OBJECTS,
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
class WekaJsonl(UntimedTrace):
    """One session per line: `id`, `block_size`, `hash_id_scope`, `requests`; sessions begin by `arrivals`.

    A request has `t` (seconds after the start), `type` (n, s, or subagent, which has its own `requests`),
    `in`, `out` and `hash_ids` of whole blocks. Times in a subagent before its own `t` count from it. With
    hash_id_scope local, equal ids of two sessions are different contents.
    """

    sorts = True

    max_sessions: int | None = None

    def __post_init__(self) -> None:
        UntimedTrace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "max_sessions")

    def rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the calls in the order of the file; session_id is the number of the session.

        A closed loop begins a session when another has ended; its calls keep their times relative to its
        start. Here the sessions come one after the other.
        """
        begins_s = self.begins_s(seed, lambda: sum(1 for _ in self._sessions()))
        is_loop, ended_s = isinstance(self.arrivals, ClosedLoop), 0.0
        numbers, places, of_all = count(), count(1), dict[int, int]()
        for session, (block_size, is_local, calls) in enumerate(self._sessions()):
            at_s = ended_s if is_loop else next(begins_s)
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

    def _sessions(self) -> Iterator[tuple[int, bool, list[_Call]]]:
        """Yields block size, whether the scope is local, and the calls of each session with calls."""
        num_sessions = 0
        for line in json_lines(self.path, SESSION_RULES):
            line.check(SESSION_RULES)
            calls = list(_calls(line, line.values["requests"], 0.0))
            if calls:
                yield line.values["block_size"], line.values["hash_id_scope"] == "local", calls
                num_sessions += 1
            if num_sessions == self.max_sessions:
                return
        if not num_sessions:
            raise ValueError(f"{self.path}:1:1: expected at least one session with requests, found none")


def _calls(line: Record, requests: list[dict[str, Any]], from_s: float) -> Iterator[_Call]:
    """Yields the calls in a list of requests. from_s: start of the subagent; 0 for the session."""
    for row in requests:
        line.check(TYPE_RULES, row)
        at_s = row["t"] + (from_s if row["t"] < from_s else 0.0)
        if row["type"] == "subagent":
            if from_s:
                raise line.bad("type", "n or s in a subagent", "a subagent in a subagent")
            line.check({"requests": OBJECTS}, row)
            yield from _calls(line, row["requests"], at_s)
            continue
        line.check(CALL_RULES, row)
        max_ids = -(-row["in"] // line.values["block_size"])
        if len(row["hash_ids"]) > max_ids:
            rule = f"at most {max_ids} ids for {row['in']} tokens, {line.values['block_size']} each"
            raise line.bad("hash_ids", rule, f"{len(row['hash_ids'])} ids")
        yield _Call(at_s, row["in"], row["out"], row["hash_ids"])


MESSAGES = ("conversations", "conversation", "messages")
SENDER, WORDS = ("from", "role"), ("value", "content")
ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")
NO_ANSWER = "no answer, or an empty one"
CHATS = JsonElements("a conversation with a list of messages (conversations: from, value)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareGptJson(UntimedTrace):
    """ShareGPT: objects with `conversations`, a list of messages (`from`, `value`); one request for each.

    As with `vllm bench serve --dataset-name sharegpt`, the prompt is everything before the first answer, and
    the output has the answer's length; later turns are not replayed. Unlike in vLLM, short and long requests
    are kept, in the order of the file. Conversations without an answer are counted and skipped. tokenizer: a
    tokenizer.json that counts the tokens; None: 4 characters per token.
    """

    begins = "request"

    max_requests: int | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        UntimedTrace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "max_requests")

    def max_rows(self) -> int | None:
        """Returns how many of the first requests are replayed; None: all."""
        return self.max_requests

    def rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the first exchange of each conversation."""
        lengths = TextLengths(self.tokenizer)
        begins_s = self.begins_s(seed, lambda: sum(1 for _ in CHATS.records(self.path)))
        remark, at_s = lengths.remark, 0.0
        for record in CHATS.records(self.path):
            texts = first_exchange(record)
            if texts is None:
                yield TraceRow(record.number, at_s, 0, 0, remark=remark, skip_reason=NO_ANSWER)
            else:
                at_s = next(begins_s)
                yield TraceRow(record.number, at_s, lengths(texts[0]), lengths(texts[1]), remark=remark)
            remark = ""


def first_exchange(record: Record) -> tuple[str, str] | None:
    """Returns the text before the first answer of a conversation, and the answer; None if one is empty.

    Raises ValueError that names the element and its key.
    """
    found = record.values
    key = next((name for name in MESSAGES if name in found), None)
    if key is None:
        raise ValueError(
            f"{record.path}: element {record.number}: no key {MESSAGES[0]}; expected {CHATS.wanted}, "
            f"found {shown(', '.join(found), 200)}"
        )
    messages = found[key]
    if not isinstance(messages, list):
        raise record.bad(key, "a list of messages", messages)
    before: list[str] = []
    for place, message in enumerate(messages):
        sender, text = (_field(message, names) for names in (SENDER, WORDS))
        if not isinstance(sender, str) or not isinstance(text, str):
            raise record.bad(f"{key}[{place}]", "a message with the texts from and value", message)
        if sender.lower() in ANSWERS and any(before):
            return ("\n".join(before), text) if text else None
        before.append(text)
    return None


def _field(message: Any, names: tuple[str, ...]) -> Any:
    if not isinstance(message, dict):
        return None
    return next((message[name] for name in names if name in message), None)


TURN_KEYS = ("session_id", "input_length", "output_length")
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
class MooncakeSessions(UntimedTrace):
    """JSON lines with `session_id`, `input_length` or `text_input`, `output_length`, `delay`, `timestamp`.

    A session begins at the `timestamp` (ms) of its first turn, or by `arrivals` without one; each later turn
    is sent `delay` ms after the end of the previous one (or, without a delay, after the difference of their
    timestamps). As in AIPerf, `input_length` is the addition of a turn: its prompt consists of all earlier
    prompts and outputs of the session and these tokens. With context_mode message_array_with_responses it is
    the complete prompt. tokenizer: counts the tokens of texts; None: 4 characters per token.
    """

    max_sessions: int | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        UntimedTrace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "max_sessions")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        """Creates the turns; session_id is the number of the session in the file."""
        remarks: list[str] = []
        sessions = self._sessions(remarks)
        if isinstance(self.arrivals, ClosedLoop):
            first_s = np.zeros(len(sessions))
            if sessions[0].first_s is not None:
                remarks.append("Sessions begin by the closed loop, not at the timestamps of the trace.")
        elif sessions[0].first_s is None:
            begins_s = self.begins_s(seed, lambda: len(sessions))
            first_s = np.array([next(begins_s) for _ in sessions])
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
        for line in json_lines(self.path, TURN_KEYS):
            row = line.values
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


def _time_s(line: Record, clock: ArrivalClock) -> float | None:
    if line.values.get("timestamp") is None:
        return None
    rule = f"a finite number of ms >= 0, at most {MAX_ARRIVAL_S * 1e3:g} after the first"
    try:
        return clock(line.values["timestamp"])
    except ValueError:
        raise line.bad("timestamp", rule, line.values["timestamp"]) from None


def _delay_s(line: Record, at_s: float | None, last_s: float | None, *, is_first: bool) -> float:
    """Returns the time between the end of the previous turn and this one."""
    if line.values.get("delay") is not None:
        line.check({"delay": MS})
        return float(line.values["delay"]) / 1e3
    if is_first or at_s is None or last_s is None:
        return 0.0
    if at_s < last_s:
        raise line.bad(
            "timestamp",
            f"a time at or after that of the turn before ({last_s * 1e3:g} ms)",
            line.values["timestamp"],
        )
    return at_s - last_s


def _add(line: Record, session: _Session, delay_s: float) -> None:
    """Adds a turn to its session; its input is its addition to the context."""
    added, mode = line.values["input_length"], line.values.get("context_mode")
    if mode == WHOLE_CONTEXT:
        before = sum(session.inputs) + sum(session.outputs)
        if added <= before:
            rule = f"more than the {before:,} tokens before it, as its context_mode is {WHOLE_CONTEXT}"
            raise line.bad("input_length", rule, added)
        added -= before
    elif mode not in (None, "deltas", "deltas_without_responses", "deltas_with_responses"):
        raise line.bad("context_mode", f"{WHOLE_CONTEXT}, or none", shown(mode))
    session.inputs.append(added)
    session.outputs.append(line.values["output_length"])
    session.delays_s.append(delay_s)


LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Fields of a body with the limit of its output, in order of precedence."""
BLOCK = 16
"""Tokens of a prompt that have one content id: a KV block."""
PROMPTS = ("messages", "prompt", "input")
IMAGES = "Images and other parts of prompts that are no text are not counted."


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAiBatch(UntimedTrace):
    """Lines with `custom_id`, `url` and the `body` of a request: messages, prompt or input, and a limit.

    The prompt is the text of the messages with the definitions of tools; equal beginnings of prompts are
    equal contents, by blocks of 16 tokens. Chat templates add tokens that are not counted. The output has the
    length of the request's limit, or is drawn from a lognormal distribution with output_mean and output_cv,
    and cut at the limit. tokenizer: a tokenizer.json that counts the tokens; None: 4 characters per token.
    """

    begins = "request"

    max_requests: int | None = None
    tokenizer: Path | None = None
    output_mean: float | None = None
    output_cv: float = 1.0

    def __post_init__(self) -> None:
        UntimedTrace.__post_init__(self)  # super() does not work in a dataclass with slots
        require_positive(self, "max_requests", "output_mean", "output_cv")

    def max_rows(self) -> int | None:
        """Returns how many of the first requests are replayed; None: all."""
        return self.max_requests

    def rows(self, seed: int) -> Iterator[TraceRow]:
        """Yields the requests in the order of the file. Raises ValueError that names line and field."""
        lengths, rng = TextLengths(self.tokenizer), stream(seed, "batch outputs")
        begins_s = self.begins_s(seed, lambda: sum(1 for _ in self._records()))
        drawn = None if self.output_mean is None else Lognormal(mean=self.output_mean, cv=self.output_cv)
        remark = lengths.remark
        if drawn is None:
            remark += " Outputs are as long as their limits; workload.output_mean=TOKENS draws their lengths."
        has_other_parts = False
        for record in self._records():
            body = _body(record)
            text, has_others = _text(record, body)
            if has_others and not has_other_parts:
                has_other_parts, remark = True, f"{remark} {IMAGES}".strip()
            limit = _limit(record, body)
            if drawn is not None:
                length = max(1, round(float(drawn.from_normal(rng.standard_normal(1))[0])))
                length = length if limit is None else min(length, limit)
            elif limit is None:
                rule = "a limit of the output, max_tokens, or workload.output_mean=TOKENS"
                raise record.bad("body", rule, ", ".join(body))
            else:
                length = limit
            tokens = text if isinstance(text, list) else lengths.tokens(text)
            ids = (BLOCK, *_ids_of(tokens))
            yield TraceRow(record.number, next(begins_s), len(tokens), length, ids, remark=remark)
            remark = ""

    def _records(self) -> Iterator[Record]:
        return json_lines(self.path, ("custom_id", "body"))


def _body(record: Record) -> Mapping[str, Any]:
    """Returns the body of a request that generates one output. Raises ValueError."""
    body, url = record.values.get("body"), str(record.values.get("url", ""))
    if not isinstance(body, Mapping):
        raise record.bad("body", "an object with the body of a request", body)
    if url.endswith(("/embeddings", "/score", "/rerank", "/moderations")):
        raise record.bad("url", "a request that generates text", url)
    if body.get("n", 1) != 1:
        raise record.bad("body", "n=1, one output for each request", f"n={body['n']}")
    return body


def _limit(record: Record, body: Mapping[str, Any]) -> int | None:
    found = next(((name, body[name]) for name in LIMITS if body.get(name) is not None), None)
    if found is None:
        return None
    name, value = found
    if not COUNT.is_sound(value):
        raise record.bad(f"body.{name}", COUNT.text, value)
    limit: int = int(value)
    return limit


def _text(record: Record, body: Mapping[str, Any]) -> tuple[str | list[int], bool]:
    """Returns the prompt as a text, or as token ids, and whether it has parts that are neither.

    Raises ValueError.
    """
    name = next((each for each in PROMPTS if each in body), None)
    if name is None:
        raise record.bad("body", "messages, prompt or input", ", ".join(body))
    found = body[name]
    if name != "messages" and isinstance(found, list) and found and all(type(one) is int for one in found):
        return found, False
    tools = json.dumps(body["tools"], sort_keys=True) if body.get("tools") else ""
    if isinstance(found, str):
        return tools + found, False
    texts, has_others = [tools], False
    for place, message in enumerate(found if isinstance(found, list) else [None]):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                texts.append(text)
            elif isinstance(part, Mapping) or (part is None and isinstance(message, Mapping)):
                has_others = has_others or part is not None
            else:
                rule = "messages with a content, a text, or token ids"
                raise record.bad(f"body.{name}[{place}]", rule, shown(message))
    if not any(texts):
        raise record.bad(f"body.{name}", "a text", shown(found))
    return "\n".join(texts), has_others


def _ids_of(tokens: Sequence[object]) -> tuple[int, ...]:
    """Returns the content ids of blocks of tokens: equal for equal beginnings."""
    digest, ids = b"", []
    for start in range(0, len(tokens), BLOCK):
        digest = blake2b(digest + repr(tokens[start : start + BLOCK]).encode(), digest_size=8).digest()
        ids.append(int.from_bytes(digest, "little") >> 1)
    return tuple(ids)
