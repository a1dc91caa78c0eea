"""Latency levels: sources of the iteration times of a replica, as chosen by `latency=`.

spec         the data sheet, and one set of efficiencies for all devices
calibrated   efficiencies of this device, or of the closest measured device
table        a measured profile, interpolated
recorded     the durations of a run, replayed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.device import Device
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations.iteration import IterationModel, Jitter
from hwmodels.iterations.layout import Offload, ParallelLayout
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.weights import Lora
from hwmodels.operators.calibration import Calibration


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
    """Weights in host memory; None: there are none."""

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
    """Builds the iteration model of a replica, and describes its basis."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model. Raises ValueError if the level cannot price the replica."""

    def basis(self, replica: Replica) -> str:
        """Returns the sentence of the reports that states the basis of the iteration times."""


@runtime_checkable
class Jittered(Protocol):
    """A level with a setting for the random scatter of iteration times; others have none."""

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times; None: there is none."""


@runtime_checkable
class DividesAttention(Protocol):
    """A level whose groups of attention devices are not those of the layout alone."""

    def num_attention_groups(self, layout: ParallelLayout) -> int:
        """Returns the number of groups of devices that compute attention for sequences of their own."""


def jitter_of(level: LatencyLevel) -> Jitter | None:
    """Returns the random scatter of the iteration times of a level; None: there is none."""
    return level.jitter if isinstance(level, Jittered) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Level `spec`: the data sheet and default efficiencies."""

    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: there is none."""

    def iteration_model(self, replica: Replica) -> IterationModel:
        return replica.roofline(Calibration())

    def basis(self, replica: Replica) -> str:
        return "Iteration times: data sheet and one set of efficiencies for all devices; not fitted."


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """Level `calibrated`: efficiencies fitted to measured operators of this device or of the closest one."""

    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: there is none."""

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
    """Returns a sentence on the parts of the price that were never measured; empty if there are none."""
    parts = []
    if replica.offload is not None:
        parts.append("weights in host memory")
    if replica.kernels.attention_kernels is not None:
        parts.append(f"attention_kernels={replica.kernels.attention_kernels}")
    return f" Never measured: {' and '.join(parts)}." if parts else ""
