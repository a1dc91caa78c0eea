"""Settings of `windtunnel capacity`: candidates, demand and its growth, margins, and the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal, NamedTuple

from experiments.study.override_lines import check_line, line_of
from experiments.study.seeds import check_seeds
from experiments.study.settings import StudySettings, check_least
from fieldlimits import Ge, NonNegativeInt, PositiveInt, check

MAX_CANDIDATES = 5_000
AS_SET = "as set"


class Entry(NamedTuple):
    """Value of an axis: its label, its overrides, and the key under which it was given."""

    label: str
    overrides: tuple[str, ...]
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySettings(StudySettings):
    """Node `capacity` of configs/capacity.yaml; the workload, the SLO and other settings are outside it.

    Candidates are all combinations of the first six lists; an empty list keeps the current setting. Entries
    of engines, quantisations and more may be overrides separated by spaces, with a name before a colon.
    """

    hardware: tuple[str, ...] = ()
    """Choices of configs/hardware."""
    tensor_parallel_sizes: tuple[PositiveInt, ...] = ()
    pipeline_parallel_sizes: tuple[PositiveInt, ...] = ()
    engines: tuple[str, ...] = ()
    """Choices of configs/engine, or overrides."""
    quantisations: tuple[str | None, ...] = ()
    """Weight formats (None: the checkpoint's), or overrides."""
    more: tuple[tuple[str, ...], ...] = ()
    """Further axes: lists of overrides."""

    headroom: float = 0.0
    """Additional traffic that must also meet the SLO, as a share of the traffic."""
    spare: NonNegativeInt = 0
    """Replicas that may be down while the others meet the SLO."""
    availability: float | None = None
    """Share of the time in which enough replicas must be running; adds as many spares as needed."""
    mtbf_hours: float = 2_000.0
    """Mean time between failures of a GPU, in hours; a replica fails with any of its GPUs."""
    mttr_hours: float = 1.0
    """Mean time to repair, in hours."""
    growth_per_month: float = 0.0
    """Growth of the traffic per month, as a share; compounded."""
    months: tuple[int, ...] = (0,)
    """Months from now to plan for."""
    window_s: float | None = 3600.0
    """Length of the busiest window of the workload, which is planned for, in s; None: the whole workload."""

    seeds: tuple[int, ...] = (0, 1, 2)
    max_requests: Annotated[int, Ge(100)] = 200_000
    """Number of requests up to which traffic is made longer, to find how much more of it a fleet meets."""
    max_replicas: PositiveInt = 64
    top: PositiveInt = 5
    """Number of candidates in the ranked table."""
    search: Literal["exhaustive", "optuna"] = "exhaustive"
    trials: PositiveInt = 60
    """Number of candidates that Optuna simulates; trials of an earlier search in the study do not count."""
    study: str | None = None
    """File that stores Optuna's trials, from which the next search resumes."""

    def __post_init__(self) -> None:
        check(self)
        self._check_lists()
        self._check_margins()
        check_seeds(self.seeds, "three")
        check_least(self, {"jobs": 1})
        if self.study is not None and self.search != "optuna":
            raise ValueError(f"study={self.study}: needs search=optuna; an exhaustive search has no study")
        self._check_axes()

    def _check_lists(self) -> None:
        for name in (
            "hardware",
            "tensor_parallel_sizes",
            "pipeline_parallel_sizes",
            "engines",
            "quantisations",
        ):
            values: Sequence[object] = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={_shown(values)}: must all be different")
        for i, axis in enumerate(self.more):
            if not axis or len(set(axis)) < len(axis):
                raise ValueError(f"more[{i}]={_shown(axis)}: must be one or more overrides, all different")

    def _check_axes(self) -> None:
        for axis_entries in self.axes.values():
            if len({entry.label for entry in axis_entries}) < len(axis_entries):
                node = axis_entries[0].where.rpartition("[")[0]
                labels = _shown([entry.label or None for entry in axis_entries])
                raise ValueError(f"{node}={labels}: must have different names")
            for entry in axis_entries:
                check_line(entry.where, entry.overrides)
        num_candidates = self.num_candidates
        if num_candidates > MAX_CANDIDATES:
            raise ValueError(
                f"hardware: all lists make {num_candidates:,} combinations; must be <= {MAX_CANDIDATES:,}; "
                "shorten a list"
            )

    def _check_margins(self) -> None:
        if not 0 <= self.headroom < inf:
            raise ValueError(
                f"headroom={self.headroom:g}: must be a finite share >= 0, such as 0.2 for 20 % more traffic"
            )
        if self.spare >= self.max_replicas:
            raise ValueError(f"spare={self.spare}: must be < max_replicas={self.max_replicas}")
        if self.availability is not None and not 0 < self.availability < 1:
            raise ValueError(
                f"availability={self.availability:g}: must be between 0 and 1, such as 0.999 for 99.9 %, "
                "or null"
            )
        for name in ("mtbf_hours", "mttr_hours"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name):g}: must be finite and > 0 h")
        if not -1 < self.growth_per_month < inf:
            raise ValueError(
                f"growth_per_month={self.growth_per_month:g}: must be a finite share > -1, "
                "such as 0.08 for 8 %"
            )
        if not self.months or min(self.months) < 0 or list(self.months) != sorted(set(self.months)):
            raise ValueError(f"months={list(self.months)}: must be one or more numbers, >= 0 and ascending")
        if len(self.months) > 1 and self.growth_per_month == 0:
            raise ValueError(
                f"months={list(self.months)}: are all the same without growth; set growth_per_month, "
                "such as 0.08"
            )
        if self.window_s is not None and not 1 <= self.window_s < inf:
            raise ValueError(f"window_s={self.window_s:g}: must be >= 1 s; null for the whole workload")

    @property
    def axes(self) -> Mapping[str, tuple[Entry, ...]]:
        """Axis -> its entries; axes that are not varied are left out."""
        found = {
            "hardware": _entries("hardware", "hardware", self.hardware),
            "TP": _entries("tensor_parallel_sizes", "tensor_parallel_size", self.tensor_parallel_sizes, "TP"),
            "PP": _entries(
                "pipeline_parallel_sizes", "pipeline_parallel_size", self.pipeline_parallel_sizes, "PP"
            ),
            "engine": _entries("engines", "engine", self.engines),
            "weights": _entries("quantisations", "model.weights", self.quantisations),
            **{f"more {i}": _entries(f"more[{i}]", "", axis) for i, axis in enumerate(self.more)},
        }
        return {name: entries for name, entries in found.items() if entries}

    @property
    def num_candidates(self) -> int:
        number = 1
        for entries in self.axes.values():
            number *= len(entries)
        return number

    @property
    def loads(self) -> Mapping[int, float]:
        """Month -> multiple of the workload's traffic."""
        return {month: (1 + self.growth_per_month) ** month for month in self.months}


def _entries(node: str, key: str, values: Sequence[object], prefix: str = "") -> tuple[Entry, ...]:
    return tuple(_entry(f"{node}[{i}]", key, value, prefix) for i, value in enumerate(values))


def _entry(where: str, key: str, value: object, prefix: str) -> Entry:
    """Parses an entry, such as `fp8` (model.weights=fp8) or `small: engine=vllm engine.max_num_seqs=64`."""
    if value is None:
        return Entry("", (f"{key}=null",), where)  # the checkpoint's own format has no label
    text = str(value).strip()
    line = line_of(text)
    if line.name != text or "=" in text or not key:
        return Entry(*line, where)
    return Entry(f"{prefix}{text}", (f"{key}={text}",), where)


def _shown(values: Sequence[object]) -> str:
    return f"[{', '.join('null' if value is None else str(value) for value in values)}]"
