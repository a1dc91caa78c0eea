"""Output settings of a simulated run; those of `windtunnel validate` are nearly the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fieldlimits import Checked, PositiveInt
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario

STREAMED_ABOVE = 1_000_000
"""Number of requests above which a run streams its tables by itself."""
WHOLE_BYTES = 4.4e3
"""Memory of a request in a run that keeps whole tables, bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(Checked):
    """Output besides tables, summary.json, config.yaml and the tables on the terminal."""

    report: bool = True
    progress: bool = True
    timeline: bool = False
    """Write timeline.json."""
    timeline_requests: Annotated[PositiveInt | None, "null for all"] = 10_000
    """Number of requests in timeline.json, the first to arrive; None: all."""
    vllm_bench: bool = False
    """Write vllm_bench.json, in the format of `vllm bench serve --save-detailed`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings(Output):
    """Output of a run that is simulated for a comparison."""

    tables: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateOutput(Output):
    """Output of `windtunnel simulate`."""

    tables: bool | Literal["auto", "stream", "stream_all"] = "auto"
    """When tables are written; auto: at the end, or while the run goes on if it is long: see `streams`."""

    @property
    def writes_iterations(self) -> bool:
        """True if a run that streams also writes its iterations and gaps."""
        return self.tables == "stream_all"

    def streams(self, scenario: Scenario, num_requests: int | None) -> bool:
        """Returns whether a run writes its tables while it goes on, in memory that does not grow with it.

        Raises ConfigError if it is to, and other settings need whole tables.
        """
        if self.tables in ("stream", "stream_all"):
            if reason := self._needs_whole_tables(scenario):
                raise ConfigError(f"{reason}; or set output.tables=true")
            return True
        return self._is_long(num_requests) and not self._needs_whole_tables(scenario)

    def note(self, scenario: Scenario, num_requests: int | None) -> str | None:
        """Returns that a long run streams its tables by itself, or why it does not; None: it is not long."""
        if not self._is_long(num_requests):
            return None
        if reason := self._needs_whole_tables(scenario):
            return (
                f"All records stay in memory, about {(num_requests or 0) * WHOLE_BYTES / 1e9:,.0f} GB for "
                f"{num_requests:,} requests, because the run cannot stream its tables: {reason}."
            )
        return (
            f"More than {STREAMED_ABOVE:,} requests: their rows are written while the run goes on, without "
            f"iterations and events (output.tables=true writes all, in {WHOLE_BYTES / 1e3:g} kB of memory "
            "per request)."
        )

    def _is_long(self, num_requests: int | None) -> bool:
        return self.tables == "auto" and (num_requests or 0) > STREAMED_ABOVE

    def _needs_whole_tables(self, scenario: Scenario) -> str | None:
        """Returns which setting needs the tables of the whole run; None: there is none."""
        for name in ("vllm_bench", "timeline"):
            if getattr(self, name):
                return (
                    f"output.{name}=true: is made from the tables of the whole run; set output.{name}=false"
                )
        from sim.setup.streaming import check_streamed  # noqa: PLC0415 (most runs are short)

        try:
            check_streamed(scenario)
        except ValueError as error:
            return str(error)
        return None
