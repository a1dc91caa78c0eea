"""`windtunnel observe`: load a server with a workload and record what a client sees, as a simulation would.

Exit code 3: the result is written, but requests failed (connections lost, errors of the server), or none
finished.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.terminal import plain_table, print_verdict, terminal_console
from experiments.observe.figures import client_notes, observed_figures, workload_notes
from experiments.observe.outputs import write_observation
from experiments.observe.progress import requests_sent
from experiments.observe.settings import DEFAULT_CONTEXT, ObserveSettings, build_settings
from experiments.observe.tables import records_of
from sim.engine.interrupt import ctrl_c_noted
from sim.report import numbers, wording
from sim.report.files import config_digest
from sim.settings.compose import Composition
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError

if TYPE_CHECKING:
    from experiments.observe.session import Observed

FAILED = 3
"""Exit code."""


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend without the server."""
    settings = build_settings(cfg)
    _require_client()
    try:
        settings.workload.source(seed=settings.seed, max_model_len=settings.max_model_len or DEFAULT_CONTEXT)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


# Why points of the run that is under way could not be observed, or failed in part: told when all are done.
# What is raised inside of Hydra it announces in lines of its own.
_errors: list[ConfigError] = []
_failed: list[str] = []


def main() -> None:
    """Observe what Hydra reads from sys.argv. Raises ConfigError; exits with `FAILED`."""
    _errors.clear()
    _failed.clear()
    _run()
    for error in _errors:
        raise error
    if _failed:
        print(f"windtunnel: requests failed; the result is in {', '.join(_failed)}", file=sys.stderr)
        sys.exit(FAILED)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="observe")
def _run(cfg: DictConfig) -> None:
    try:
        _observe(cfg)
    except ConfigError as error:
        _errors.append(error)


def _observe(cfg: DictConfig) -> None:
    """Load, write, print."""
    settings = build_settings(cfg)
    from experiments.observe.session import observe  # noqa: PLC0415  (the client library is an extra)

    console = terminal_console()
    started = datetime.now(UTC)
    with ctrl_c_noted() as interrupt, requests_sent(console, enabled=settings.progress) as begin:
        observed = asyncio.run(observe(settings, interrupt=interrupt, begin=begin))
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    folder = Path(HydraConfig.get().runtime.output_dir)
    summary = _write(folder, settings, observed, config, started)
    _print(summary, console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if observed.load.stopped == "interrupted":
        raise KeyboardInterrupt  # the partial result is written
    if summary["failed"]["count"] or not summary["requests"]["finished"]:
        _failed.append(str(shown))


def _require_client() -> None:
    try:
        import aiohttp  # noqa: F401, PLC0415  (an extra, and 0.2 s)
    except ImportError as error:
        raise ConfigError(f"observe needs {error.name}: pip install 'windtunnel[observe]'") from error


def _write(
    folder: Path, settings: ObserveSettings, observed: Observed, config: dict[str, Any], started: datetime
) -> dict[str, Any]:
    """Write the run's files; returns the summary."""
    load, dialect = observed.load, observed.probed.dialect
    records = records_of(load.replies, load.end_s, interrupted=load.stopped == "interrupted")
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
    write_observation(folder, records, load, summary, config, slo=settings.slo, report=settings.report)
    return summary


def _print(summary: dict[str, Any], console: Console) -> None:
    print_verdict(summary, summary["notes"], console)
    rows = [row for row in wording.latency_rows(summary) if row[0] != wording.LATENCIES["queue"]]
    for table in ([["ms", *wording.STATISTICS, "count"], *rows], *wording.class_tables(summary)):
        console.print(plain_table(table))
    rates, client = summary["throughput"], summary["client"]
    late = [f"{numbers.milliseconds(client['lag'][f'{q}_s'])} ms ({q})" for q in ("p50", "p99")]
    console.print(
        f"output {numbers.number(rates['output_tokens_per_s'])} tok/s, input "
        f"{numbers.number(rates['input_tokens_per_s'])} tok/s, "
        f"{numbers.number(rates['requests_per_s'])} requests/s in {numbers.seconds(summary['simulated_s'])}; "
        f"requests left {' and '.join(late)} after their time",
        highlight=False,
    )
