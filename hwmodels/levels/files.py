"""Levels `table` and `recorded`: prices from files. Prices from formulas: `hwmodels.levels`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hwmodels.iterations import Jitter
from hwmodels.levels import Calibrated, Replica
from hwmodels.levels.physical import check_physical
from hwmodels.levels.recorded import Recorded
from hwmodels.levels.table import MeasuredTable
from hwmodels.levels.tables import Setup, Table, check_covers, columns_of, lacking, read_frame, read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLevel:
    """Level `table`: measured operators, interpolated; others come from the calibrated roofline."""

    path: str
    """A file, or a folder of LLMServingSim's layer tables."""
    gpu: str | None = None
    """Name of the GPU in the table; None: the one named like the simulated hardware."""
    model: str | None = None
    """Name of the model in the table; None: the one named like the simulated model."""
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: there is none."""

    def __post_init__(self) -> None:
        _check_exists(self.path)

    def iteration_model(self, replica: Replica) -> MeasuredTable:
        """Returns the iteration model.

        Raises ValueError for layouts and layers that no table covers, and for physically impossible rows.
        """
        _check_layout(replica)
        table, base = self._read(replica), replica.roofline(replica.calibration)
        try:
            check_covers(table.profile, replica.model)
            check_physical(
                table.rows,
                model=replica.model,
                device=replica.device,
                tensor_parallel_size=replica.layout.tensor_parallel_size,
            )
        except ValueError as error:
            raise ValueError(f"{_key(self.path)}: {error}") from None
        return MeasuredTable(
            profile=table.profile,
            base=base,
            num_devices=replica.layout.num_devices,
            host=replica.host,
            cuda_graphs=replica.cuda_graphs,
            lacking=lacking(table.profile, base.operators, replica.model),
        )

    def basis(self, replica: Replica) -> str:
        text = f"Iteration times: measured operators from {self.path} ({self._read(replica).source})"
        if replica.model.weights is not None:
            text += f", taken as those of weights in {replica.model.weights}"
        model = self.iteration_model(replica)
        missing = dict.fromkeys((*model.missing, *model.lacking))
        if not missing:
            return f"{text}."
        return f"{text}; {', '.join(missing)} from the roofline. {Calibrated().basis(replica)}"

    def _read(self, replica: Replica) -> Table:
        setup = Setup(
            gpu=self.gpu,
            model=self.model,
            device_name=replica.device.name,
            model_name=replica.model.name,
            tensor_parallel_size=replica.layout.tensor_parallel_size,
            model_spec=replica.model,
            routing=replica.kernels.routing,
        )
        return read_table(Path(self.path), setup)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLevel:
    """Level `recorded`: durations of a recorded run, replayed by the shape of the iteration."""

    path: str
    """iterations.parquet of a run, or a table with the same columns."""
    allow_missing: bool = False
    """Whether iterations that were not recorded are priced by the calibrated roofline; false: an error."""
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: there is none."""

    def __post_init__(self) -> None:
        _check_exists(self.path)

    def iteration_model(self, replica: Replica) -> Recorded:
        """Returns the iteration model.

        Raises ValueError for missing columns and for physically impossible durations.
        """
        try:
            return Recorded.from_iterations(
                columns_of(read_frame(Path(self.path))),
                base=Calibrated().iteration_model(replica),
                allow_missing=self.allow_missing,
                cached_bytes=replica.layout.num_devices * replica.device.l2_bytes,
            )
        except ValueError as error:
            raise ValueError(f"{_key(self.path)}: {error}") from None

    def basis(self, replica: Replica) -> str:
        text = f"Iteration times: {len(read_frame(Path(self.path))):,} iterations recorded in {self.path}"
        if not self.allow_missing:
            return f"{text}."
        return f"{text}; the roofline for all others. {Calibrated().basis(replica)}"


def _check_exists(path: str) -> None:
    if not Path(path).exists():
        raise ValueError(f"path={path}: no such file or folder")


def _key(path: Path | str) -> str:
    """Returns the setting with which the user named the file, for errors raised after it was built."""
    return f"latency.path={path}"


def _check_layout(replica: Replica) -> None:
    """Raises ValueError for layouts beyond tensor parallelism, which a table does not cover, and for LoRA."""
    for name in (
        "pipeline_parallel_size",
        "context_parallel_size",
        "attention_data_parallel_size",
        "expert_parallel_size",
    ):
        if getattr(replica.layout, name) > 1:
            raise ValueError(
                f"{name}={getattr(replica.layout, name)}: must be 1, as a measured table has tensor "
                "parallelism only; or choose latency=calibrated"
            )
    if replica.lora is not None:
        raise ValueError("lora: must be null, as tables have no LoRA adapters; or choose latency=calibrated")
