"""What is written and shown of a simulated run; `windtunnel validate` has the same settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """What is written and shown besides summary.json, config.yaml and the tables on the terminal."""

    report: bool = True
    tables: bool = True
    progress: bool = True
    timeline: bool = False
    """Write timeline.json."""
    timeline_requests: int | None = 10_000
    """Requests in it, the first to arrive; None: all."""
    vllm_bench: bool = False
    """Write vllm_bench.json, in the layout of `vllm bench serve --save-detailed`."""

    def __post_init__(self) -> None:
        if self.timeline_requests is not None and self.timeline_requests < 1:
            raise ValueError(f"timeline_requests={self.timeline_requests}: must be >= 1; null for all")
