"""What came back for one request: every chunk with its time, read from a stream of server-sent events.

Times are seconds on the run's clock. A chunk may hold several tokens (speculation, several steps a launch),
no visible text (half a character, a special token) or none at all (the role, the usage): how many it holds is
taken from the server's own count, where it gives one, and else worked out when the answer has ended.
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
    """Chunks with a token or more. counted: by "usage", as "chunks" of one token, or "spread" evenly."""

    time_s: list[float]
    num_tokens: list[int]
    counted: str


@dataclass(kw_only=True, slots=True)
class Reply:
    """One request, sent; filled in while its answer streams.

    num_asked: tokens of the answer, None: the server may choose. due_s: when it was to be sent, sent_s: when
    it was handed to the network. headers_s: of the response.
    prompt_tokens, cached_tokens: as the server counted them, None where it does not. lost: no connection.
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
    _counts: array[int] = field(default_factory=lambda: array("q"))  # tokens so far, at each chunk
    _visible: bytearray = field(default_factory=bytearray)
    _num_tokens: int | None = None  # by the last usage
    _has_ended: bool = False
    _rest: bytes = b""
    _chunks: Chunks | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes that came at `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    self._has_ended = True
                elif payload:
                    self._event(payload, now)

    def close(self, now: float) -> None:
        """The stream is over: say how the request ended, unless that is known."""
        self.ended_s = now
        if self.status is not Status.unfinished or self.error:
            return
        if not (self._has_ended or self.finish_reason):
            self.fail("the stream ended before the answer", now)
        elif not self.chunks().time_s:
            self.fail("the answer has no token", now)
        else:
            self.status = Status.finished

    def fail(self, error: str, now: float, *, lost: bool = False) -> None:
        """It ended in an error: rejected if the server refused it before any token, else aborted."""
        refused = 400 <= self.http_status < 500 and not self._time_s
        self.status = Status.rejected if refused else Status.aborted
        self.error = " ".join(error.split())[:MAX_ERROR_CHARS]
        self.lost = lost
        self.ended_s = now

    @property
    def has_failed(self) -> bool:
        """Whether the server, or the way to it, failed; a refusal (4xx) is an answer."""
        return bool(self.error) and self.status is Status.aborted

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def num_tokens(self) -> int:
        return sum(self.chunks().num_tokens)

    def chunks(self) -> Chunks:
        """The chunks that hold tokens; what they hold is settled with the first call after the end."""
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
            self._refuse(f"no JSON in the stream: {payload[:80]!r}", now)
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
        said = choice.get("delta")
        text = _text_of(choice) if said is None else _text_of(said)
        ids = choice.get("token_ids")
        if ids:
            self.token_ids += ids
        count = usage.get("completion_tokens", _UNKNOWN) if usage else _UNKNOWN
        if count == _UNKNOWN and ids:
            count = len(self.token_ids)
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
        only_role = said is not None and "role" in said and not text
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
    """What an error says, in any of the ways in which servers say it."""
    if not isinstance(answer, dict):
        return str(answer)
    error = answer.get("error") or answer.get("detail") or answer.get("message") or answer
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    return error if isinstance(error, str) else json.dumps(error)


def code_of(answer: Any) -> int:
    """The HTTP status that an error in the stream stands for; 0 if it says none."""
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 0


def _text_of(said: dict[str, Any]) -> str:
    """All that a chunk says, hidden reasoning and tool calls too: they are tokens as any others."""
    text = said.get("text") or said.get("content") or said.get("reasoning_content") or said.get("reasoning")
    if not text and said.get("tool_calls"):
        return json.dumps(said["tool_calls"])
    return text or ""


def _with_tokens(times_s: list[float], num_tokens: list[int], counted: str) -> Chunks:
    held = [(t, n) for t, n in zip(times_s, num_tokens, strict=True) if n]
    return Chunks([t for t, _ in held], [n for _, n in held], counted)
