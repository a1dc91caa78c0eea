"""The measured rows of whole engines, with the scenario, the engine profile and the group of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from experiments.score import lora, modes, public, runs, silicon
from experiments.score.engine_versions import engine_of
from experiments.score.physical import impossible_rows
from experiments.score.table import chosen_rows, read_table
from experiments.score.trust.constants import values_of
from experiments.study.presets import NotSimulatedError, preset
from hwmodels.levels import Calibrated, LatencyLevel
from hwmodels.trust import HELD_BACK, LORA, Level
from sim.settings.errors import ConfigError
from sim.setup.notes import TAIL, tail_of
from sim.setup.scenario import Scenario
from sim.workload.distributions import Fixed


class Source(NamedTuple):
    """One table of measurements."""

    file: str
    """Its path in the folder of measurements, or an absolute one."""
    columns: tuple[str, ...]
    positive: tuple[str, ...]
    metrics: tuple[str, ...]
    """Simulated figures, as `figures_of` names them."""
    traffic_of: Callable[[Mapping[str, Any]], str]
    """Returns the kind of traffic of a row."""
    scenario_of: Callable[[dict[str, Any], LatencyLevel], Scenario]
    figures_of: Callable[[dict[str, Any], Scenario], dict[str, float]]
    """Simulates the scenario of a row."""
    profile_of: Callable[[Mapping[str, Any]], str]
    """Returns the name of the engine profile that simulates a row."""
    measured: Callable[[Mapping[str, Any]], dict[str, float]]
    """Returns figure -> measured value."""
    predicted: Callable[[Mapping[str, Any], Mapping[str, float]], dict[str, float]]
    """Returns figure -> predicted value, from the row and its simulated figures."""
    fitted: tuple[str, ...]
    """Figures that the constants are fitted to; empty: the rows are predicted with the shipped constants."""
    left_out: tuple[str, ...]
    """Attributes of `Case` that a group shares: its rows are left out together."""
    checked: Callable[[pd.DataFrame, Path], pd.DataFrame] = lambda table, path: table
    """Checks and completes the table."""
    family_of: Callable[[Mapping[str, Any], Scenario], str | None] = lambda row, scenario: (
        scenario.engine.family
    )
    """Returns the family of a row's engine; None: the row is not compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A measured row that can be simulated."""

    table: str
    row: dict[str, Any]
    profile: str
    family: str
    model: str
    gpu: str
    device: str
    """Name of the GPU in our outputs."""
    architecture: str
    values: dict[str, float]
    """The constants of its engine profile and its GPU."""
    overlapped: bool
    traffic: str = "closed"
    level: Level = Level.measured
    """Level at which it is simulated with its own calibration."""

    @property
    def origin(self) -> str:
        """The table, or the source of a published row."""
        return str(self.row["source"]) if self.table in ("public", "lora") else self.table

    @property
    def is_for_testing(self) -> bool:
        """True for a row that only checks the bands and never determines one."""
        return self.row.get("part") == "test"

    @property
    def kind(self) -> tuple[str, ...]:
        """The group of the row's errors: a model on a GPU with one engine profile, from one source."""
        return self.origin, self.profile, self.model, self.gpu

    @property
    def key(self) -> str:
        return f"{self.table}/{self.row['id']}"

    @property
    def group(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in SOURCES[self.table].left_out)

    def is_in(self, group: tuple[str, ...]) -> bool:
        """Returns whether the row must be left out with a group: a model, or a model on a GPU."""
        return (self.model, self.gpu)[: len(group)] == group


def _closed(row: Mapping[str, Any], figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a closed loop; E2E and throughput follow from TTFT and TPOT."""
    tpot_ms, ttft_ms = figures["tpot_ms"], figures["ttft_ms"]
    found = {"TPOT": tpot_ms} if pd.notna(row["tpot_ms"]) else {}
    if not row.get("ttft_ok", True) or pd.isna(row["ttft_ms"]):
        return found
    tokens = _mean_tokens(silicon.lengths_of(dict(row)).output_tokens)
    e2e_ms = ttft_ms + tpot_ms * (tokens - 1)
    return {
        **found,
        "TTFT": ttft_ms,
        "E2E": e2e_ms,
        "throughput": 1e3 * row["concurrency"] * tokens / e2e_ms,
    }


def _mean_tokens(lengths: Any) -> float:
    """Returns the mean of a length that is fixed or uniform, as in all rows of these tables."""
    return float(lengths.value) if isinstance(lengths, Fixed) else (lengths.low + lengths.high) / 2


def _open(row: Mapping[str, Any], figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of an open loop; a measured TTFT p99 has the names of both kinds of runs."""
    names = {
        "TTFT": "ttft_mean_ms",
        "ITL": "itl_mean_ms",
        "E2E": "e2e_mean_ms",
        TAIL: "ttft_p99_ms",
        HELD_BACK: "ttft_p99_ms",
        "E2E p99": "e2e_p99_ms",
    }
    return {figure: figures[name] for figure, name in names.items() if pd.notna(row[name])}


def _open_predicted(row: Mapping[str, Any], figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a simulated open loop, with its TTFT p99 under the name of its kind of runs."""
    other_tails = {TAIL, HELD_BACK} - {tail_of(figures[runs.HELD_BACK_SHARE])}
    return {name: value for name, value in _open(row, figures).items() if name not in other_tails}


PUBLIC = {
    "closed": {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "E2E": "e2e_ms", "throughput": "tokens_per_s"},
    "open": {"TTFT": "ttft_ms", "ITL": "tpot_ms", "E2E": "e2e_ms"},
}
PUBLIC["burst"] = PUBLIC["closed"] | {TAIL: "ttft_p99_ms"}
"""Kind of traffic -> figure -> compared quantity of a public row. An open loop's mean TPOT is its ITL."""


def _public_traffic(row: Mapping[str, Any]) -> str:
    return {"closed_loop": "closed", "all_at_once": "burst"}.get(row["arrivals"], "open")


def _public(row: Mapping[str, Any], figures: Mapping[str, float]) -> dict[str, float]:
    """Returns the figures of a public row, in the statistics that the row states."""
    columns = {
        figure: public.stated(dict(row), public.STATED.get(name, (name,)))
        for figure, name in PUBLIC[_public_traffic(row)].items()
    }
    return {figure: figures[name] for figure, name in columns.items() if pd.notna(row.get(name))}


def _kept(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the figure of a pair of runs with and without LoRA adapters, measured or simulated."""
    return {LORA: float(values[lora.METRIC])}


SOURCES = {
    "silicon": Source(
        file="silicon/silicon_e2e.csv.gz",
        columns=(*silicon.COLUMNS, "ttft_ms", "tpot_ms"),
        positive=silicon.POSITIVE,
        metrics=modes.METRICS,
        traffic_of=lambda row: "closed",
        scenario_of=modes.scenario_of,
        figures_of=lambda row, scenario: modes.figures_of(scenario),
        profile_of=lambda row: engine_of(dict(row)),
        measured=lambda row: _closed(row, row),
        predicted=_closed,
        fitted=("TTFT", "TPOT"),
        left_out=("model", "gpu"),
    ),
    "experiments": Source(
        file="vllm_experiments/experiments.csv",
        columns=(*runs.COLUMNS, *runs.METRICS),
        positive=runs.POSITIVE,
        metrics=(*runs.METRICS, runs.HELD_BACK_SHARE),
        traffic_of=lambda row: "open",
        scenario_of=runs.scenario_of,
        figures_of=lambda row, scenario: runs.figures_of(scenario),
        profile_of=lambda row: engine_of({"backend": "vllm", "backend_version": row.get("vllm")}),
        measured=lambda row: _open(row, row),
        predicted=_open_predicted,
        fitted=("TTFT", "ITL"),
        left_out=("model",),
    ),
    "public": Source(
        file=str(Path(public.__file__).with_name("data") / "public_rows.csv"),
        columns=public.COLUMNS,
        positive=public.POSITIVE,
        metrics=public.MEASURED,
        traffic_of=_public_traffic,
        scenario_of=public.scenario_of,
        figures_of=lambda row, scenario: public.figures_of(scenario),
        profile_of=lambda row: public.profile_of(dict(row)),
        measured=lambda row: _public(row, row),
        predicted=_public,
        fitted=(),
        left_out=("model", "gpu"),
        checked=public.checked,
    ),
    "lora": Source(
        file=str(Path(lora.__file__).with_name("data") / "lora_rows.csv"),
        columns=lora.COLUMNS,
        positive=lora.POSITIVE,
        metrics=lora.METRICS,
        traffic_of=lambda row: "lora",
        scenario_of=lora.scenario_of,
        figures_of=lora.kept,
        profile_of=lambda row: str(row["engine"]),
        measured=_kept,
        predicted=lambda row, figures: _kept(figures),
        fitted=(),
        left_out=("model", "gpu"),
        checked=lora.unused,
        family_of=lambda row, scenario: str(row["backend"]),  # a share hardly depends on the host's profile
    ),
}
"""Tables, as `kind=` names them: of the folder, and the published rows that the project ships with."""


def read_cases(folder: Path, where: str | None = None) -> list[Case]:
    """Reads the rows of all tables that can be simulated; those with a column `core` only where it is true.

    where: a further condition on the rows, in the syntax of pandas.DataFrame.query; of a table without the
    columns that it names no row is taken. Raises ConfigError for a wrong table.
    """
    found: list[Case] = []
    unknown: list[pd.errors.UndefinedVariableError] = []
    for name, source in SOURCES.items():
        path = folder / source.file
        table = read_table(path, source.columns, source.positive)
        table = source.checked(table[table["core"]] if "core" in table else table, path)
        if where is not None:
            try:
                table = chosen_rows(table, where)
            except pd.errors.UndefinedVariableError as error:
                unknown.append(error)
                continue
        impossible = _impossible(path, table, source)
        rows: Any = table.to_dict("records")
        found += (case for row in rows if row["id"] not in impossible for case in _cases(name, row))
    if len(unknown) == len(SOURCES):
        raise ConfigError(f"where={where}: {unknown[0]} in any table") from unknown[0]
    return found


def _impossible(path: Path, table: pd.DataFrame, source: Source) -> dict[Any, str]:
    metrics = [column for column in table if str(column).endswith("_ms")]
    return impossible_rows(path, table, map(str, metrics), lambda row: source.scenario_of(row, Calibrated()))


def _cases(table: str, row: dict[str, Any]) -> Iterator[Case]:
    """Yields the row's case; nothing if it cannot be simulated, or has no engine that can be compared."""
    source = SOURCES[table]
    try:
        scenario = source.scenario_of(row, Calibrated())
    except (NotSimulatedError, ValueError):
        return
    measured_on, family = scenario.calibration.measured_on, source.family_of(row, scenario)
    if family is None or measured_on is None:
        return
    yield Case(
        table=table,
        row=row,
        profile=preset("engine", source.profile_of(row)),
        family=family,
        model=scenario.model.name,
        gpu=preset("hardware", row["gpu"]),
        device=scenario.hardware.name,
        architecture="moe" if scenario.model.has_experts else "dense",
        values=values_of(scenario),
        overlapped=scenario.engine.host.overlapped,
        traffic=source.traffic_of(row),
        level=Level.measured if measured_on == scenario.hardware.name else Level.relative,
    )
