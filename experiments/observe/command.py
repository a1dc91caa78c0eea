"""`windtunnel observe`: loads a server with a workload and records what a client sees, as a simulation would.

Exit code 3: the result is written, but requests failed (lost connections, server errors) or none finished.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from experiments.app.job import UnsuccessfulError
from experiments.app.run_folder import print_folder, seen_from_here
from experiments.app.settings.compose import Composition
from experiments.app.terminal import plain_table, print_verdict, terminal_console
from experiments.observe.figures import client_notes, observed_figures, workload_notes
from experiments.observe.outputs import write_observation
from experiments.observe.settings import DEFAULT_CONTEXT, ObserveSettings, build_settings
from experiments.observe.tables import records_of
from sim.engine.clock import ctrl_c_noted
from sim.records.run import RunRecords
from sim.report import numbers, wording
from sim.report.files import config_digest
from sim.settings.errors import ConfigError
from sim.workload.base import Source

if TYPE_CHECKING:
    from experiments.observe.session import Observed

REFRESHES_PER_S = 2  # drawing takes CPU time from the client


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveJob:
    """A load on a server; no request is sent before `run`."""

    cfg: dict[str, Any]
    settings: ObserveSettings

    def run(self, folder: Path) -> None:
        """Runs the load, writes and prints the result.

        Raises UnsuccessfulError if requests failed or none finished.
        """
        from experiments.observe.session import observe  # noqa: PLC0415  (the client library is an extra)

        settings, console = self.settings, terminal_console()
        started = datetime.now(UTC)
        with ctrl_c_noted() as interrupt, requests_sent(console, enabled=settings.progress) as begin:
            observed = asyncio.run(observe(settings, interrupt=interrupt, begin=begin))
        config, load = self.cfg, observed.load
        records = records_of(load.replies, load.end_s, interrupted=load.stopped == "interrupted")
        summary = _summary(settings, observed, records, config, started)
        _print(summary, console)
        write_observation(folder, records, load, summary, config, slo=settings.slo, report=settings.report)
        print_folder(folder, console)
        if observed.load.stopped == "interrupted":
            raise KeyboardInterrupt  # the partial result is written
        if summary["failed"]["count"] or not summary["requests"]["finished"]:
            raise UnsuccessfulError(f"requests failed; the result is in {seen_from_here(folder)}")


def prepare(cfg: dict[str, Any], composition: Composition) -> ObserveJob:
    """Builds the job. Raises ConfigError for every mistake that shows without the server."""
    settings = build_settings(cfg)
    _require_client()
    try:
        settings.workload.source(seed=settings.seed, max_model_len=settings.max_model_len or DEFAULT_CONTEXT)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return ObserveJob(cfg=cfg, settings=settings)


def _require_client() -> None:
    try:
        import aiohttp  # noqa: F401, PLC0415  (an extra, and 0.2 s)
    except ImportError as error:
        raise ConfigError(f"observe needs {error.name}: pip install 'windtunnel[observe]'") from error


def _summary(
    settings: ObserveSettings,
    observed: Observed,
    records: RunRecords,
    config: dict[str, Any],
    started: datetime,
) -> dict[str, Any]:
    """Returns the figures of the run, as they are printed and written to summary.json."""
    load, dialect = observed.load, observed.probed.dialect
    summary = observed_figures(
        records, load, slo=settings.slo, metrics=settings.metrics, late_s=settings.late_ms / 1e3
    )
    notes = observed.source.notes
    summary |= {
        "endpoint": {
            "url": settings.url,
            "model": dialect.model,
            "api": dialect.api,
            "options": sorted(dialect.options),
            "max_model_len": observed.probed.max_model_len,
        },
        "started": started.isoformat(),
        "client_python": platform.python_version(),
        "config_digest": config_digest(config),
        "workload": asdict(notes),
        "notes": [*client_notes(summary), *observed.probed.notes, *workload_notes(notes)],
    }
    return summary


def _print(summary: dict[str, Any], console: Console) -> None:
    print_verdict(summary, summary["notes"], console)
    rows = [row for row in wording.latency_rows(summary) if row[0] != wording.LATENCIES["queue"]]
    for table in ([["ms", *wording.STATISTICS, "count"], *rows], *wording.class_tables(summary)):
        console.print(plain_table(table))
    rates, client = summary["throughput"], summary["client"]
    late = [f"{numbers.milliseconds(client['lag'][f'{q}_s'])} ms ({q})" for q in ("p50", "p99")]
    console.print(
        f"output {numbers.number(rates['output_tokens_per_s'])} tokens/s, input "
        f"{numbers.number(rates['input_tokens_per_s'])} tokens/s, "
        f"{numbers.number(rates['requests_per_s'])} requests/s in {numbers.seconds(summary['simulated_s'])}; "
        f"delay of sending: {', '.join(late)}",
        highlight=False,
    )


@contextmanager
def requests_sent(
    console: Console, *, enabled: bool
) -> Iterator[Callable[[Source], Callable[[float, int, int], None] | None]]:
    """Yields a function that makes a bar for a source; it returns a callback (seconds, sent, ended requests).

    It draws on a terminal only.
    """
    if not (enabled and console.is_terminal):
        yield lambda source: None
        return
    columns = (
        TextColumn("observing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[sent]:,} sent, {task.fields[ended]:,} ended"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=REFRESHES_PER_S) as progress:

        def begin(source: Source) -> Callable[[float, int, int], None]:
            task = progress.add_task("", total=source.num_requests, sent=0, ended=0)

            def report(now: float, num_sent: int, num_ended: int) -> None:
                progress.update(task, completed=num_ended, sent=num_sent, ended=num_ended)

            return report

        yield begin
