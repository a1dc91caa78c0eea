"""A batch: its state, the outcomes of its requests, and its times.

validating --> in_progress --> finalizing --> completed
     |             |  +------> expired, after the completion window
  failed           +---------> cancelling --> cancelled
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from time import time
from typing import Any
from uuid import uuid4

from experiments.serve.batches.lines import LineError

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
