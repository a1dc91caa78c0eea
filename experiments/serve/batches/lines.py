"""The requests in the input file of a batch: JSON lines with custom_id, method, url and body."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

MAX_LINES = 50_000
"""Requests of one batch, as in OpenAI's API."""
MAX_ERRORS = 100
"""Errors that are listed."""
MAX_ID_CHARS = 512


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
