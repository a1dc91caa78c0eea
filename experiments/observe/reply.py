"""Reads the response to one request: every chunk with its time, from a stream of server-sent events.

Times are seconds on the run's clock. A chunk may hold several tokens (speculative decoding, multi-step
scheduling), no visible text (part of a character, a special token) or no token (the role, the usage). The
number of its tokens comes from the server's usage where it is reported, and is estimated at the end
otherwise.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from policies.core.request import Request
from sim.records.requests import Status

NAN = float("nan")
_UNKNOWN = -1
MAX_ERROR_CHARS = 300


class Chunks(NamedTuple):
    """Chunks with at least one token. counted: by "usage", as "chunks" of one token, or "spread" evenly."""

    time_s: list[float]
    num_tokens: list[int]
    counted: str


@dataclass(kw_only=True, slots=True)
class Reply:
    """One sent request; filled in while the response streams.

    num_asked: requested output tokens, None: the server's choice. due_s: scheduled time; sent_s: time at
    which it was handed to the network; headers_s: time of the response's headers. prompt_tokens,
    cached_tokens: as counted by the server, None and 0 if it does not. lost: the connection failed.
    """

    request: Request
    num_asked: int | None
    due_s: float
    sent_s: float = NAN
    headers_s: float = NAN
    ended_s: float = NAN
    status: Status = Status.unfinished
    http_status: int = 0
    error: str = ""
    lost: bool = False
    finish_reason: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    is_stream: bool = True
    _pieces: list[str] = field(default_factory=list)
    _time_s: array[float] = field(default_factory=lambda: array("d"))
    _counts: array[int] = field(default_factory=lambda: array("q"))  # output tokens so far, at each chunk
    _visible: bytearray = field(default_factory=bytearray)
    _num_tokens: int | None = None  # in the last usage
    _has_ended: bool = False
    _rest: bytes = b""
    _chunks: Chunks | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Parses bytes that arrived at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self._has_ended = True
                elif payload:
                    self._event(payload, now)

    def close(self, now: float) -> None:
        """Ends the stream and sets the request's status, unless it is known."""
        self.ended_s = now
        if self.status is not Status.unfinished or self.error:
            return
        if not (self._has_ended or self.finish_reason):
            self.fail("the stream ended before the output", now)
        elif not self.chunks().time_s:
            self.fail("the output has no token", now)
        else:
            self.status = Status.finished

    def fail(self, error: str, now: float, *, lost: bool = False) -> None:
        """Ends the request with an error: rejected if a 4xx came before any token, else aborted."""
        refused = 400 <= self.http_status < 500 and not self._time_s
        self.status = Status.rejected if refused else Status.aborted
        self.error = " ".join(error.split())[:MAX_ERROR_CHARS]
        self.lost = lost
        self.ended_s = now

    @property
    def has_failed(self) -> bool:
        """True if the server or the connection failed; a rejection (4xx) is not a failure."""
        return bool(self.error) and self.status is Status.aborted

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks().num_tokens)

    def chunks(self) -> Chunks:
        """Returns the chunks that hold tokens; the first call after the end fixes their numbers of tokens."""
        if self._chunks is not None:
            return self._chunks
        found = self._settle()
        if self.status is not Status.unfinished or self._has_ended:
            self._chunks = found
        return found

    def _settle(self) -> Chunks:
        times_s, counts = self._time_s.tolist(), self._counts.tolist()
        total = self._num_tokens
        if _UNKNOWN not in counts:
            num_tokens = [max(now - before, 0) for before, now in pairwise([0, *counts])]
            if total is not None and num_tokens and total > counts[-1]:
                num_tokens[-1] += total - counts[-1]
            return _with_tokens(times_s, num_tokens, "usage")
        visible = list(self._visible)
        if total is None or total == sum(visible):
            return _with_tokens(times_s, visible, "chunks")
        if total == len(times_s):
            return Chunks(times_s, [1] * total, "chunks")
        likely = [t for t, seen in zip(times_s, visible, strict=True) if seen] or times_s
        edges = [round(total * i / len(likely)) for i in range(len(likely) + 1)]
        spread = [end - start for start, end in pairwise(edges)]
        return _with_tokens(likely, spread, "spread")

    def _event(self, payload: bytes, now: float) -> None:
        try:
            event = json.loads(payload)
        except ValueError:
            self._refuse(f"the stream contains invalid JSON: {payload[:80]!r}", now)
            return
        if not isinstance(event, dict) or event.get("error"):
            self._refuse(message_of(event), now, code_of(event))
            return
        usage = event.get("usage")
        if usage:
            self._num_tokens = usage.get("completion_tokens", self._num_tokens)
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            details = usage.get("prompt_tokens_details")
            if details:
                self.cached_tokens = details.get("cached_tokens") or 0
        choices = event.get("choices")
        if choices:
            self._choice(choices[0], usage, now)

    def _choice(self, choice: dict[str, Any], usage: dict[str, Any] | None, now: float) -> None:
        delta = choice.get("delta")
        text = _text_of(choice) if delta is None else _text_of(delta)
        ids = choice.get("token_ids")
        if ids:
            self.token_ids += ids
        count = usage.get("completion_tokens", _UNKNOWN) if usage else _UNKNOWN
        if count == _UNKNOWN and ids:
            count = len(self.token_ids)
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
        only_role = delta is not None and "role" in delta and not text
        if count == _UNKNOWN and only_role:
            return
        if text:
            self._pieces.append(text)
        self._time_s.append(now)
        self._counts.append(count)
        self._visible.append(bool(text))

    def _refuse(self, error: str, now: float, code: int = 0) -> None:
        if code:
            self.http_status = code
        self.fail(error, now)


def message_of(answer: Any) -> str:
    """Returns the text of an error in any of the forms that servers use."""
    if not isinstance(answer, dict):
        return str(answer)
    error = answer.get("error") or answer.get("detail") or answer.get("message") or answer
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    return error if isinstance(error, str) else json.dumps(error)


def code_of(answer: Any) -> int:
    """Returns the HTTP status that an error in the stream stands for; 0 if it has none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0


def _text_of(delta: dict[str, Any]) -> str:
    """Returns all text of a chunk, including reasoning and tool calls, whose tokens count as well."""
    fields = ("text", "content", "reasoning_content", "reasoning")
    text = next((delta[name] for name in fields if delta.get(name)), None)
    if not text and delta.get("tool_calls"):
        return json.dumps(delta["tool_calls"])
    return text or ""


def _with_tokens(times_s: list[float], num_tokens: list[int], counted: str) -> Chunks:
    held = [(t, n) for t, n in zip(times_s, num_tokens, strict=True) if n]
    return Chunks([t for t, _ in held], [n for _, n in held], counted)
