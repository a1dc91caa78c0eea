"""Latency levels: sources of the iteration times of a replica, as chosen by `latency=`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.device import Device
from hwmodels.exact import Num
from hwmodels.host import CudaGraphs, HostOverhead, Offload
from hwmodels.iterations import Explained, IterationModel, IterationShape, Jitter, ends_of_decodes
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Lora
from hwmodels.operators import Calibration


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Everything that an iteration model of a replica depends on."""

    model: ModelSpec
    device: Device
    layout: ParallelLayout
    calibration: Calibration
    host: HostOverhead
    cuda_graphs: CudaGraphs
    kernels: Kernels
    lora: Lora | None = None
    offload: Offload | None = None
    """Weights in host memory; None: no weights."""

    def roofline(self, calibration: Calibration) -> Roofline:
        return Roofline(
            model=self.model,
            device=self.device,
            layout=self.layout,
            calibration=calibration,
            host=self.host,
            cuda_graphs=self.cuda_graphs,
            kernels=self.kernels,
            lora=self.lora,
            offload=self.offload,
        )


class LatencyLevel(Protocol):
    """Builds the iteration model of a replica, and describes its basis.

    spec the data sheet, and one set of efficiencies for all devices calibrated efficiencies of this device,
    or of the closest measured device
    table        a measured profile, interpolated
    recorded     the durations of a run, replayed
    """

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model. Raises ValueError if the level cannot price the replica."""

    def basis(self, replica: Replica) -> str:
        """Returns the sentence of the reports that states the basis of the iteration times."""


@runtime_checkable
class Jittered(Protocol):
    """A level with a setting for the random scatter of iteration times."""

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times; None: no scatter."""


@runtime_checkable
class DividesAttention(Protocol):
    """A level whose groups of attention devices do not follow from the layout alone."""

    def num_attention_groups(self, layout: ParallelLayout) -> int:
        """Returns the number of groups of devices that compute attention for their own sequences."""


@runtime_checkable
class AveragesDrafts(Protocol):
    """A level that prices drafts itself, as an average over passes."""

    @property
    def accepted_tokens(self) -> float:
        """Mean number of tokens that a sequence gets from a pass."""


@runtime_checkable
class MeasuredOperators(Protocol):
    """An iteration model of measured operators that separates the model's operators from those around it."""

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component."""

    def model_breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component without the operators around the model."""


def jitter_of(level: LatencyLevel) -> Jitter | None:
    """Returns the random scatter of the iteration times of a level; None: no scatter."""
    return level.jitter if isinstance(level, Jittered) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Level `spec`: the data sheet and default efficiencies."""

    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: no scatter."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        return replica.roofline(Calibration())

    def basis(self, replica: Replica) -> str:
        return "Iteration times: data sheet and one set of efficiencies for all devices; not fitted."


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """Level `calibrated`: efficiencies fitted to measured operators of this device or of the closest one."""

    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: no scatter."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        return replica.roofline(replica.calibration)

    def basis(self, replica: Replica) -> str:
        return self._of_device(replica) + _not_measured(replica)

    def _of_device(self, replica: Replica) -> str:
        measured_on, name = replica.calibration.measured_on, replica.device.name
        if measured_on is None:
            return (
                f"Iteration times: {name} was never measured, nor was a relative; "
                "data sheet and efficiencies typical of other devices."
            )
        if measured_on != name:
            return (
                f"Iteration times: {name} was not measured; efficiencies of {measured_on}, "
                f"scaled by the data sheet of {name}."
            )
        return f"Iteration times: fitted to operators measured on {name}."


def _not_measured(replica: Replica) -> str:
    """Returns a sentence about unmeasured parts of the price; empty if there are none."""
    parts = []
    if replica.offload is not None:
        parts.append("weights in host memory")
    if replica.kernels.attention_kernels is not None:
        parts.append(f"attention_kernels={replica.kernels.attention_kernels}")
    return f" Never measured: {' and '.join(parts)}." if parts else ""


class InProportions(ABC):
    """An iteration model with its own seconds, divided over components and operators like another model.

    Peaks, FLOPs and bytes come from the other model, which describes the same replica.
    """

    def __init__(self, other: IterationModel) -> None:
        self._other = other
        self.peak_flops_per_s = other.peak_flops_per_s
        self.peak_bytes_per_s = other.peak_bytes_per_s

    @abstractmethod
    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        return ends_of_decodes(self.seconds, start_s, num_seqs, num_context_tokens, num_iterations)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component, in the proportions of the other model."""
        parts = self._other.breakdown(shape)
        factor = self.seconds(shape) / sum(parts.values())
        return {name: seconds * factor for name, seconds in parts.items()}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, in the proportions of the other model."""
        seconds = {name: float(np.sum(part)) for name, part in self.breakdown(shape).items()}
        # The other model counts time outside of operators as host, including launches.
        seconds["host"] += seconds.pop("launch")
        return share_out(self._other.explain(shape), seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs of the other model; see `IterationModel`."""
        return self._other.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes moved in the other model; see `IterationModel`."""
        return self._other.bytes_moved(shape)


def share_out(lines: Sequence[Explained], measured_s: Mapping[str, float]) -> list[Explained]:
    """Splits each component's measured seconds over its lines in proportion; returns the longest first.

    Bounds, FLOPs and bytes are unchanged. If all lines took 0 s, they get equal shares.
    """
    own_s: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for line in lines:
        own_s[line.component] += line.seconds
        count[line.component] += 1
    total_s = sum(measured_s[name] for name in count)
    changed = []
    for line in lines:
        name = line.component
        part = line.seconds / own_s[name] if own_s[name] else 1 / count[name]
        seconds = part * measured_s[name]
        changed.append(line._replace(seconds=seconds, share=seconds / total_s))
    return sorted(changed, key=lambda line: -line.seconds)
