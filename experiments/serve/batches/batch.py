"""A batch: its state, the outcomes of its requests, and its times.

validating --> in_progress --> finalizing --> completed
     |             |  +------> expired, after the completion window
  failed           +---------> cancelling --> cancelled
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import time
from typing import Any, NamedTuple
from uuid import uuid4

RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
MAX_LINES = 50_000
"""Requests of one batch, as in OpenAI's API."""
MAX_ERRORS = 100
"""Errors that are listed."""
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one request, as a line of the output or of the error file."""

    line: bytes
    is_success: bool

    @classmethod
    def of(cls, custom_id: str, status: int, body: dict[str, Any]) -> Outcome:
        """Returns the outcome of a request that was answered."""
        response = {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}
        return cls(_line_of(custom_id, response, None), status == 200)

    @classmethod
    def not_run(cls, custom_id: str, code: str, message: str) -> Outcome:
        """Returns the outcome of a request that was not answered."""
        return cls(_line_of(custom_id, None, {"code": code, "message": message}), False)


def _line_of(custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    row = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(row).encode() + b"\n"


@dataclass(kw_only=True, slots=True)
class Batch:
    """One batch. window_s: wall seconds from its creation in which it must end."""

    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: float
    metadata: dict[str, str] | None = None
    batch_id: str = field(default_factory=lambda: f"batch_{uuid4().hex}")
    status: str = "validating"
    created_at: int = field(default_factory=lambda: int(time()))
    times: dict[str, int] = field(default_factory=dict)
    errors: list[LineError] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0

    @property
    def is_running(self) -> bool:
        """True until the batch is in its last state."""
        return self.status in RUNNING

    def enter(self, status: str) -> None:
        """Changes the state, and notes the time."""
        self.status = status
        self.times[f"{status}_at"] = int(time())

    def count(self, outcome: Outcome) -> None:
        """Counts a request that has ended."""
        self.num_completed += outcome.is_success
        self.num_failed += not outcome.is_success

    def body(self) -> dict[str, Any]:
        """Returns the batch object of the API."""
        errors = {"object": "list", "data": [each._asdict() for each in self.errors]}
        times = {name: self.times.get(name) for name in TIMES}
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            **times,
            "expires_at": self.created_at + int(self.window_s),
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


class Line(NamedTuple):
    """A request. body: as JSON."""

    custom_id: str
    body: bytes


class LineError(NamedTuple):
    """A mistake in an input file. line: its number, from 1 on; None: the mistake is of the whole file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


def read_lines(content: bytes, endpoint: str) -> tuple[list[Line], list[LineError]]:
    """Returns the requests of a file, and its mistakes: with any of them, no request is to run."""
    lines: list[Line] = []
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, text in enumerate(content.splitlines(), 1):
        if not text.strip():
            continue
        found = _read_line(text, number, endpoint)
        if isinstance(found, Line) and found.custom_id in seen:
            message = f"The custom_id {found.custom_id[:80]!r} occurs twice; each must be unique."
            found = LineError("duplicate_custom_id", message, "custom_id", number)
        if isinstance(found, LineError):
            errors.append(found)
        else:
            seen.add(found.custom_id)
            lines.append(found)
        if len(errors) >= MAX_ERRORS:
            break
        if len(lines) > MAX_LINES:
            return [], [LineError("too_many_requests", f"A batch has at most {MAX_LINES} requests.")]
    if not lines and not errors:
        errors.append(LineError("empty_file", "The file has no request."))
    return lines, errors


def _read_line(text: bytes, number: int, endpoint: str) -> Line | LineError:
    try:
        row: Any = json.loads(text)
    except (ValueError, RecursionError):
        return LineError("invalid_json_line", "This line is not valid JSON.", None, number)
    if not isinstance(row, dict):
        return LineError("invalid_json_line", "This line is not a JSON object.", None, number)
    custom_id, body = row.get("custom_id"), row.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        message = f"custom_id must be a text of 1 to {MAX_ID_CHARS} characters."
        return LineError("invalid_custom_id", message, "custom_id", number)
    if row.get("method") != "POST":
        return LineError("invalid_method", "method must be POST.", "method", number)
    if row.get("url") != endpoint:
        return LineError("mismatched_url", f"url must be {endpoint}, as the batch says.", "url", number)
    if not isinstance(body, dict):
        return LineError("invalid_body", "body must be an object.", "body", number)
    try:
        return Line(custom_id, json.dumps(body).encode())
    except RecursionError:
        return LineError("invalid_body", "body nests values too deeply.", "body", number)
