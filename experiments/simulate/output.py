"""Output settings of a simulated run; `windtunnel validate` has the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """Output besides summary.json, config.yaml and the tables on the terminal."""

    report: bool = True
    tables: bool = True
    progress: bool = True
    timeline: bool = False
    """Write timeline.json."""
    timeline_requests: int | None = 10_000
    """Number of requests in timeline.json, the first to arrive; None: all."""
    vllm_bench: bool = False
    """Write vllm_bench.json, in the format of `vllm bench serve --save-detailed`."""

    def __post_init__(self) -> None:
        if self.timeline_requests is not None and self.timeline_requests < 1:
            raise ValueError(f"timeline_requests={self.timeline_requests}: must be >= 1, or null for all")
