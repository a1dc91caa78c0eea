"""`from sim import simulate`: a run from Python, with the settings of `windtunnel simulate`."""

from __future__ import annotations

import html
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from omegaconf import OmegaConf

from sim.metrics.dialects import DIALECTS, in_dialects
from sim.metrics.result import RunResult
from sim.metrics.token_times import known_token_times
from sim.metrics.utilisation import seconds_inside
from sim.metrics.window import Window
from sim.records.event_table import events_table
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
from sim.settings.scenario import build_run, run
from sim.setup.pool import PoolSettings

if TYPE_CHECKING:
    import plotly.graph_objects as go

TIMELINE_REQUESTS = 10_000
"""As `output.timeline_requests` of `windtunnel simulate`."""
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
_BARE = re.compile(r"[A-Za-z_][\w./-]*")
"""Texts that Hydra takes without quotes as they are."""

_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def simulate(
    *overrides: str,
    model: Any = None,
    hardware: Any = None,
    workload: Any = None,
    policy: Any = None,
    config_dir: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Simulates a workload with a policy on a hardware model; defaults are those of `windtunnel simulate`.

    overrides: settings as on the command line, `"workload.num_requests=500"`.
    model, hardware, workload, and any other group as a keyword: the name of a choice (`windtunnel list`), a
    mapping of settings below it, or an object in its place, such as a policy of your own; None as a keyword
    of another group is its choice `none`, where it has one (`slo=None`). Two underscores
    stand for the dot of a setting: `workload__num_requests=500`, `seed=3`, `engine__max_num_seqs=64`.
    policy: an engine's name (`vllm`), whose policies are taken; a mapping of policy groups to choices or
    objects (`{"batching": "static", "caching": "radix"}`); or a batching policy.
    config_dir: a folder with more choices, as `--config-dir`.

    Raises ConfigError for every mistake in the settings, before anything runs. Not to be called from several
    threads at once, as Hydra composes one config at a time in a process.
    """
    named = {"model": model, "hardware": hardware, "workload": workload}
    given = {name: value for name, value in named.items() if value is not None}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    if policy is not None:
        given = _of_policy(policy) | given
    dirs = config_dirs(None if config_dir is None else Path(config_dir))
    texts, objects = with_new_names(overrides), {}
    groups = {group: [choice.name for choice in found] for group, found in find_groups(dirs).items()}
    _check_engine(policy, groups)
    for key, value in zip(with_new_names(given), given.values(), strict=True):
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
                f"{text}: simulate() writes nothing; result.write(folder) does, "
                "result.write(folder, timeline=True, vllm_bench=True)"
            )
    return simulate_config(ConfigSource(config_name="simulate", dirs=dirs), texts, objects)


def simulate_config(source: ConfigSource, overrides: list[str], objects: Mapping[str, Any]) -> Result:
    """Simulates one config. objects: replacements for the nodes of root keys. Raises ConfigError."""
    cfg = composed(source, overrides)
    for key, value in objects.items():
        if key not in cfg:
            raise ConfigError(f"{key}={type(value).__name__}: an object can stand for a root key only")
        if cfg.pools and key in PoolSettings.__dataclass_fields__:
            raise ConfigError(
                f"{key}={type(value).__name__}: every pool has its own; write a choice for it and name that "
                "in `pools`, or leave out pools"
            )
    result = run(*build_run(cfg, objects))
    config: Any = OmegaConf.to_container(cfg, resolve=True)
    for key, value in objects.items():
        config[key] = {"name": f"{type(value).__module__}.{type(value).__qualname__}"}
    own_dirs = [word for path in source.dirs[1:] for word in ("--config-dir", str(path))]
    command = None if objects else shlex.join(["windtunnel", "simulate", *overrides, *own_dirs])
    return Result(run=result, config=config, command=command)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a run, as tables and figures; in a notebook it shows its headline."""

    run: RunResult
    """Its records, for what is not here."""
    config: dict[str, Any]
    """The resolved configuration; objects are replaced by their class's name."""
    command: str | None
    """The same run on the command line; None where objects were given."""

    @property
    def summary(self) -> dict[str, Any]:
        """All figures, as in summary.json; seconds, shares, USD."""
        return self.run.summary

    @property
    def requests(self) -> pd.DataFrame:
        """One row a request: its times, TTFT, TPOT, E2E, whether the SLO was met."""
        return self.run.requests

    @property
    def iterations(self) -> pd.DataFrame:
        """One row an iteration of a replica: when, how long, what was in the batch."""
        return self.run.records.iterations

    @property
    def replicas(self) -> pd.DataFrame:
        """One row a replica."""
        return self.run.replicas

    @property
    def events(self) -> pd.DataFrame:
        """One row an event: see `sim.records.event_table.events_table`."""
        return events_table(self.run.records)

    @property
    def latencies(self) -> pd.DataFrame:
        """Statistics in columns (`p50_s`), one row a latency: TTFT, TPOT, ITL, E2E, queue."""
        rows = {name.upper() if name != "queue" else name: self.summary[name] for name in LATENCIES}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def dialects(self) -> pd.DataFrame:
        """The run by the definitions of other tools: a row a figure and dialect, `name` as the tool calls it.

        Of latencies mean_s, p50_s, p90_s, p99_s; of all else value; NaN where a tool has none. Side by side:
        `result.dialects["value"].unstack()`. Requests with several answers have no gaps.
        """
        records = self.run.records
        times = known_token_times(records.requests, records.iterations, records.own_gaps)
        dialects = in_dialects(DIALECTS, records.requests, times, self._window, self.run.slo)
        return dialect_frame({**self.summary, "dialects": dialects})

    def plot_latencies(self) -> go.Figure:
        """CDFs of TTFT, TPOT, ITL and E2E with the SLO's limits."""
        return latency_cdfs(self.run.records, self._measured, self._window, self.run.slo).figure()

    def plot_ttft(self) -> go.Figure:
        """TTFT against the prompt's length."""
        return ttft_by_prompt_length(self._measured, self.run.slo).figure()

    def plot_slo(self) -> go.Figure:
        """The share within the SLO: of all, by time of arrival, by prompt length.

        Raises ValueError without an SLO.
        """
        if self.run.slo is None or self._measured.empty:
            raise ValueError("slo: none was given, or nothing was measured; choose one, such as slo='chat'")
        return slo_attainment(self._measured, self._window, self.run.slo).figure()

    def plot_timeline(self) -> go.Figure:
        """Requests, KV blocks, batches and token rates over time. Raises ValueError for a run of no time."""
        chart = timeline(self.run.records, self._window)
        if chart is None:
            raise ValueError("the run took no time: there is nothing to draw")
        return chart.figure()

    def plot_time_by_kind(self) -> go.Figure:
        """The replicas' time by kind of iteration and by what the hardware model says it went to."""
        return time_by_kind(self.run.records, self._window, self._inside_s, self.run.models).figure()

    def plot_iterations(self) -> go.Figure:
        """How long iterations took, against the tokens in their batch."""
        return iteration_times(self.run.records, self._inside_s).figure()

    def plot_replicas(self) -> go.Figure:
        """Replicas that served, started and were down over time.

        Raises ValueError if all served all the time.
        """
        chart = replicas_over_time(self.run.records)
        if chart is None:
            raise ValueError("all replicas served all the time: there is nothing to draw")
        return chart.figure()

    def write(self, folder: str | Path, *, vllm_bench: bool = False, timeline: bool = False) -> None:
        """All that `windtunnel simulate` writes: summary.json, config.yaml, the tables, report.html.

        vllm_bench: also vllm_bench.json, in the layout of `vllm bench serve`; raises ValueError where
        requests have several answers. timeline: also timeline.json, of the first 10,000 requests.
        """
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
        """The headline, for a notebook."""
        caveats = "".join(f"<p>{html.escape(text)}</p>" for text in evidence.caveats(self.summary))
        verdict = html.escape(wording.verdict(self.summary))
        return f"<p><b>{verdict}</b></p>{caveats}{headline_html(self.summary)}"

    @property
    def _window(self) -> Window:
        trimmed = self.summary["trimmed"]
        return Window(trimmed["start_s"], trimmed["end_s"])

    @property
    def _measured(self) -> pd.DataFrame:
        return self.requests[self._window.holds(self.requests["arrival_s"].to_numpy())]

    @property
    def _inside_s(self) -> Any:
        return seconds_inside(self.iterations, self._window)


def _of_policy(policy: Any) -> dict[str, Any]:
    if isinstance(policy, str):
        return {"engine": policy}
    if isinstance(policy, Mapping):
        return {str(group): value for group, value in policy.items()}
    return {"batching": policy}


def _check_engine(policy: Any, groups: Mapping[str, list[str]]) -> None:
    """Raise ConfigError for a batching policy's name where an engine's stands."""
    if isinstance(policy, str) and policy not in groups["engine"] and policy in groups["batching"]:
        raise ConfigError(
            f"policy={policy}: no engine has that name, a batching policy has: "
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
    """A value as Hydra's command line reads it back."""
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
        # Backslashes are doubled only where a quote follows: elsewhere Hydra takes them as they are.
        yield (
            "'"
            + _BEFORE_QUOTE.sub(lambda found: 2 * found[1] + ("\\'" if found[2] else ""), str(value))
            + "'"
        )
