"""The Python interface: `from sim import simulate` takes the settings of `windtunnel simulate`."""

from __future__ import annotations

import html
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from sim.cluster.attached import UserProcess
from sim.metrics.dialects import DIALECTS, in_dialects
from sim.metrics.plots import Plots
from sim.metrics.result import RunResult
from sim.metrics.token_times import known_token_times
from sim.records.event_table import events_table
from sim.records.run import RunRecords
from sim.report import evidence, wording
from sim.report.attainment import slo_attainment
from sim.report.breakdown import iteration_times, time_by_kind
from sim.report.dialect_tables import dialect_frame
from sim.report.files import write_result
from sim.report.fleet import replicas_over_time
from sim.report.latency import latency_cdfs, ttft_by_prompt_length
from sim.report.page import headline_html
from sim.report.timeline import timeline
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import config_dirs, find_groups
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.override import Override
from sim.settings.renamed import with_new_names
from sim.settings.scenario import build_run, run_or_part
from sim.setup.pool import PoolSettings

if TYPE_CHECKING:
    import plotly.graph_objects as go

TIMELINE_REQUESTS = 10_000
"""Number of requests in timeline.json; the default of `output.timeline_requests`."""
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
_BARE = re.compile(r"[A-Za-z_][\w./-]*")
"""Matches the texts that Hydra's command line reads as they are, without quotes."""

_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def simulate(
    *overrides: str,
    model: Any = None,
    hardware: Any = None,
    workload: Any = None,
    policy: Any = None,
    config_dir: str | Path | None = None,
    attach: Sequence[UserProcess] = (),
    stream_to: str | Path | None = None,
    iterations: bool = False,
    **settings: Any,
) -> Result:
    """Simulates a workload with a policy on a hardware model; defaults are those of `windtunnel simulate`.

    overrides: settings as on the command line, `"workload.num_requests=500"`.
    model, hardware, workload, and any other group as a keyword: the name of a choice (`windtunnel list`), a
    mapping of settings below it, or an object that replaces it, such as a policy of your own. None selects
    the choice `none` of a group that has one (`slo=None`); for model, hardware and workload it means the
    default. Two underscores stand for the dot of a setting: `workload__num_requests=500`,
    `engine__max_num_seqs=64`.
    policy: the name of an engine (`vllm`), which selects the policies of that engine; a mapping of policy
    groups to choices or objects (`{"batching": "static", "caching": "radix"}`); or a batching policy.
    config_dir: a folder with further choices, as `--config-dir`.
    attach: processes of your own: generator functions of env, fleet and gateway, which SimPy runs beside the
    simulation; env is a `simpy.Environment`. A process reads the state of the fleet (`fleet.replicas`,
    `fleet.serving`, and of a replica `state`, `num_outstanding`, `num_running`, `num_waiting`, `kv_usage`)
    and of the gateway (`num_in_progress`, `in_progress`, `num_ended`), changes a limit
    (`replica.max_num_batched_tokens`), starts, drains, crashes, repairs and slows down replicas, sends
    requests (`gateway.send`; to one replica, to warm its cache), and waits for the end of a request (`yield
    gateway.ended(request)`). See `sim.cluster.attached`.
    stream_to: a folder to which a long run writes its tables while it goes on, in memory that does not grow
    with it, and its summary at the end; the result reads the tables from there. iterations: also write its
    iterations and gaps.

    Raises ConfigError for every mistake in the settings, before the simulation starts, for a disk without
    room for `stream_to`, and for an attached process that raises or yields no event; and OSError if tables
    could not be written, of which those up to then remain. Must not be called from several threads at once,
    because Hydra composes one config at a time per process.
    """
    named = {"model": model, "hardware": hardware, "workload": workload}
    given = _arguments(overrides, named | settings, policy, config_dir)
    if stream_to is not None:
        if attach:
            raise ConfigError(
                "attach, stream_to: a run with processes of your own keeps its tables in memory; leave out "
                "one of them"
            )
        return _streamed(Path(stream_to), *given, iterations=iterations)
    if iterations:
        raise ConfigError("iterations=True: is about the tables of stream_to; leave it out, or set stream_to")
    return simulate_config(*given, attach)


def _arguments(
    overrides: Sequence[str], settings: Mapping[str, Any], policy: Any, config_dir: str | Path | None
) -> tuple[ConfigSource, list[str], dict[str, Any]]:
    """Returns the config, the overrides and the objects of a call of `simulate`. Raises ConfigError.

    settings: its keywords; None of model, hardware and workload means the default.
    """
    given = {
        name.replace("__", "."): value
        for name, value in settings.items()
        if value is not None or name not in ("model", "hardware", "workload")
    }
    if policy is not None:
        given = _of_policy(policy) | given
    dirs = config_dirs(None if config_dir is None else Path(config_dir))
    texts, objects = with_new_names(overrides, dirs), {}
    groups = {group: [choice.name for choice in found] for group, found in find_groups(dirs).items()}
    _check_engine(policy, groups)
    for key, value in zip(with_new_names(given, dirs), given.values(), strict=True):
        if value is None and "none" in groups.get(key, ()):
            texts.append(f"{key}=none")
        elif not _is_plain(value):
            objects[key] = value
        elif isinstance(value, Mapping) and key in groups:
            texts += [_override(f"{key}.{name}", item) for name, item in value.items()]
        else:
            texts.append(_override(key, value))
    for text in (*texts, *objects):
        if Override.parse(text).root == "output":
            raise ConfigError(
                f"{text}: simulate() does not write files; call result.write(folder), for example "
                "result.write(folder, timeline=True, vllm_bench=True)"
            )
    return ConfigSource(config_name="simulate", dirs=dirs), texts, objects


def simulate_config(
    source: ConfigSource,
    overrides: list[str],
    objects: Mapping[str, Any],
    attach: Sequence[UserProcess] = (),
) -> Result:
    """Simulates one config. objects: root key -> the object that replaces its node. Raises ConfigError.

    attach: see `simulate`.
    """
    cfg, config, command = _composed_run(source, overrides, objects)
    run = run_or_part(*build_run(cfg, objects), attach=attach)
    return Result(run=run, config=config, command=None if attach else command)


def _streamed(
    folder: Path, source: ConfigSource, overrides: list[str], objects: Mapping[str, Any], *, iterations: bool
) -> Result:
    """Simulates one config with tables in a folder: see `simulate`."""
    from sim.setup.streaming import check_streamed, stream_to  # noqa: PLC0415 (most runs do not stream)

    cfg, config, command = _composed_run(source, overrides, objects)
    scenario, traffic = build_run(cfg, objects)
    try:
        check_streamed(scenario)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    run = stream_to(folder, scenario, traffic, config, iterations=iterations)
    if run.error is not None:
        raise run.error
    write_result(folder, run, config, tables=False, report=False)
    return Result(run=run, config=config, command=command, folder=folder)


def _composed_run(
    source: ConfigSource, overrides: list[str], objects: Mapping[str, Any]
) -> tuple[DictConfig, dict[str, Any], str | None]:
    """Returns a config composed, and as `Result.config` and `Result.command`. Raises ConfigError."""
    cfg = composed(replace(source, device=objects.get("hardware")), overrides, replaced=objects)
    for key, value in objects.items():
        if key not in cfg:
            raise ConfigError(f"{key}={type(value).__name__}: an object can only replace a key at the root")
        if cfg.pools and key in PoolSettings.__dataclass_fields__:
            raise ConfigError(
                f"{key}={type(value).__name__}: each pool has its own {key}; write a config file for the "
                "object and name it in `pools`, or leave out `pools`"
            )
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    for key, value in objects.items():
        config[key] = {"name": f"{type(value).__module__}.{type(value).__qualname__}"}
    own_dirs = [word for path in source.dirs[1:] for word in ("--config-dir", str(path))]
    command = None if objects else shlex.join(["windtunnel", "simulate", *overrides, *own_dirs])
    return cfg, config, command


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run as tables and plots; a notebook shows its headline figures."""

    run: RunResult
    """The records of the run, for everything that this class does not offer."""
    config: dict[str, Any]
    """The resolved configuration; an object is represented by the name of its class."""
    command: str | None
    """The same run on the command line; None where objects or processes were given."""
    folder: Path | None = None
    """Where the tables of a run are that has streamed them."""

    @property
    def summary(self) -> dict[str, Any]:
        """All figures, as in summary.json; seconds, shares, USD."""
        return self.run.summary

    @property
    def requests(self) -> pd.DataFrame:
        """One row per request: its times, TTFT, TPOT, E2E and whether it met the SLO."""
        return self.run.requests if self.folder is None else self._read("requests")

    @property
    def iterations(self) -> pd.DataFrame:
        """One row per iteration of a replica: its start, its duration and the contents of its batch."""
        return self.run.records.iterations if self.folder is None else self._read("iterations")

    @property
    def replicas(self) -> pd.DataFrame:
        """One row per replica."""
        return self.run.replicas

    @property
    def events(self) -> pd.DataFrame:
        """One row per event: see `sim.records.event_table.events_table`."""
        return events_table(self.run.records) if self.folder is None else self._read("events")

    @property
    def series(self) -> pd.DataFrame:
        """One row per interval of time, of a run that has streamed: see `sim.metrics.load_series`."""
        return self._read("series")

    @property
    def latencies(self) -> pd.DataFrame:
        """One row per latency (TTFT, TPOT, ITL, E2E, queue), one column per statistic (`p50_s`)."""
        rows = {name.upper() if name != "queue" else name: self.summary[name] for name in LATENCIES}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def dialects(self) -> pd.DataFrame:
        """The run by the definitions of other tools: one row per figure and tool; `name` is the tool's term.

        Latencies have the columns mean_s, p50_s, p90_s and p99_s, other figures the column value; NaN where
        the tool does not report the figure. `result.dialects["value"].unstack()` shows the tools side by
        side. Gaps between tokens are missing if requests have several samples.
        """
        records = self._whole("dialects")
        times = known_token_times(records.requests, records.iterations, records.own_gaps, records.bursts)
        dialects = in_dialects(DIALECTS, records.requests, times, self.run.window, self.run.slo)
        return dialect_frame({**self.summary, "dialects": dialects})

    def plot_latencies(self) -> go.Figure:
        """Plots the CDFs of TTFT, TPOT, ITL and E2E with the limits of the SLO."""
        return latency_cdfs(self._plots, self.run.slo).figure()

    def plot_ttft(self) -> go.Figure:
        """Plots TTFT against the length of the prompt."""
        return ttft_by_prompt_length(self._plots, self.run.slo).figure()

    def plot_slo(self) -> go.Figure:
        """Plots the share of requests within the SLO: overall, by arrival time and by prompt length.

        Raises ValueError without an SLO or without measured requests.
        """
        if self.run.slo is None:
            raise ValueError("slo=none: SLO attainment needs an SLO; choose one, for example slo='chat'")
        if not self._plots.figures.octaves:
            raise ValueError("no request arrived in the measured time: there is nothing to draw")
        return slo_attainment(self._plots, self.summary["goodput"], self.run.window, self.run.slo).figure()

    def plot_timeline(self) -> go.Figure:
        """Plots requests, KV blocks, batches and token rates over time.

        Raises ValueError for a run with a duration of 0 s.
        """
        chart = timeline(self._plots, self.run.records, self.run.window)
        if chart is None:
            raise ValueError("the run has a duration of 0 s: there is nothing to draw")
        return chart.figure()

    def plot_time_by_kind(self) -> go.Figure:
        """Plots the time of the replicas by kind of iteration and by component of the hardware model."""
        return time_by_kind(self._plots, self.run.records, self.run.window).figure()

    def plot_iterations(self) -> go.Figure:
        """Plots the duration of iterations against the number of tokens in their batch."""
        return iteration_times(self._plots).figure()

    def plot_replicas(self) -> go.Figure:
        """Plots the numbers of replicas that serve, start and are down, over time.

        Raises ValueError if all replicas served all the time.
        """
        chart = replicas_over_time(self.run.records)
        if chart is None:
            raise ValueError("all replicas served all the time: there is nothing to draw")
        return chart.figure()

    def write(self, folder: str | Path, *, vllm_bench: bool = False, timeline: bool = False) -> None:
        """Writes what `windtunnel simulate` writes: summary.json, config.yaml, the tables and report.html.

        vllm_bench: also write vllm_bench.json, in the layout of `vllm bench serve`; raises ValueError if
        requests have several samples. timeline: also write timeline.json with the first 10,000 requests.
        """
        self._whole("write")
        notes = write_result(
            Path(folder),
            self.run,
            self.config,
            tables=True,
            report=True,
            timeline=timeline,
            timeline_requests=TIMELINE_REQUESTS,
            vllm_bench=vllm_bench,
        )
        for note in notes:
            warnings.warn(note, stacklevel=2)

    def __repr__(self) -> str:
        return f"<Result: {wording.verdict(self.summary)}>"

    def __str__(self) -> str:
        return "\n".join([wording.verdict(self.summary), *evidence.caveats(self.summary)])

    def _repr_html_(self) -> str:
        """Returns the headline figures as HTML, for a notebook."""
        caveats = "".join(f"<p>{html.escape(text)}</p>" for text in evidence.caveats(self.summary))
        verdict = html.escape(wording.verdict(self.summary))
        return f"<p><b>{verdict}</b></p>{caveats}{headline_html(self.summary)}"

    def _whole(self, name: str) -> RunRecords:
        """Returns the records with all rows. Raises ValueError if these are in the folder."""
        if self.folder is not None:
            raise ValueError(
                f"result.{name}: needs whole tables, and this run has streamed its tables to {self.folder}; "
                "leave out stream_to"
            )
        return self.run.records

    def _read(self, name: str) -> pd.DataFrame:
        """Returns a table that the run has streamed. Raises ValueError if there is none."""
        if self.folder is None:
            raise ValueError(f"result.{name}: only a run with stream_to has it")
        path = self.folder / f"{name}.parquet"
        if not path.exists():
            advice = "set iterations=True" if name == "iterations" else "leave out stream_to"
            raise ValueError(f"result.{name}: the run has streamed its tables without it; {advice}")
        return pd.read_parquet(path)

    @cached_property
    def _plots(self) -> Plots:
        return self.run.plots()


def _of_policy(policy: Any) -> dict[str, Any]:
    if isinstance(policy, str):
        return {"engine": policy}
    if isinstance(policy, Mapping):
        return {str(group): value for group, value in policy.items()}
    return {"batching": policy}


def _check_engine(policy: Any, groups: Mapping[str, list[str]]) -> None:
    """Raises ConfigError if `policy` is the name of a batching policy, where an engine's name is expected."""
    if isinstance(policy, str) and policy not in groups["engine"] and policy in groups["batching"]:
        raise ConfigError(
            f"policy={policy}: must be the name of an engine; for the batching policy write "
            f"policy={{'batching': '{policy}'}}"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Real | str | Path)


def _override(key: str, value: Any) -> str:
    return f"{key}={''.join(_text(value))}"


def _text(value: Any) -> Iterator[str]:
    """Yields the pieces of the text that Hydra's command line reads as `value`."""
    if value is None or isinstance(value, bool):
        yield {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, Integral):
        yield str(int(value))
    elif isinstance(value, Real):
        yield repr(float(value))
    elif isinstance(value, Mapping):
        yield "{" + ",".join(f"{name}:{''.join(_text(item))}" for name, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        yield "[" + ",".join("".join(_text(item)) for item in value) + "]"
    elif _BARE.fullmatch(str(value)) and str(value).lower() not in ("null", "true", "false", "nan", "inf"):
        yield str(value)
    else:
        # Hydra unescapes a backslash only before a quote, so only those are doubled.
        yield (
            "'"
            + _BEFORE_QUOTE.sub(lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
            + "'"
        )
