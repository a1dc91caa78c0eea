"""Levels `table` and `recorded`: prices from files. Prices from formulas are in `hwmodels.levels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hwmodels.exact import Num, whole
from hwmodels.host import CudaGraphs, HostOverhead, HostShare
from hwmodels.iterations import COMPONENTS, IterationModel, IterationShape, Jitter, counted
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import ByCount, Operator
from hwmodels.levels import Calibrated, InProportions, Replica
from hwmodels.levels.physical import check_physical
from hwmodels.levels.profile import AROUND, Floats, Profile
from hwmodels.levels.recorded import Recorded
from hwmodels.levels.tables import Setup, Table, check_covers, columns_of, lacking, read_frame, read_table

BY_COUNT = ("gemm", "elementwise", "communication", "lm_head")
"""Components that depend on one number: the number of tokens, or of sampled rows for lm_head."""


class MeasuredTable(InProportions):
    """An `IterationModel` of one replica from the profile of one of its devices.

        gpu        sum over operators of calls * latency(tokens or rows) + attention (`AttentionTable`)
        iteration with launches and the host's work as in all levels: see `HostOverhead`

    Times are linear between measured sizes, and proportional to the size beyond the largest. Components that
    a table lacks (the all-reduces of tensor parallelism, often attention) come from another model, and
    missing experts from their formulas (`hwmodels.levels.tables`). Operators are measured in isolation:
    effects of their neighbours on clocks and caches are not included. FLOPs, bytes and peaks come from
    `base`, which also prices the components that the profile lacks (`missing`). Communication is missing if
    there are several devices and no communication rows.
    """

    def __init__(
        self,
        *,
        profile: Profile,
        base: IterationModel,
        num_devices: int = 1,
        host: HostOverhead | None = None,
        cuda_graphs: CudaGraphs | None = None,
        lacking: Sequence[Operator] = (),
    ) -> None:
        """Builds the model.

        lacking: operators by number of tokens missing in the profile, such as experts.
        """
        needed = {"gemm", "attention", "elementwise", "lm_head"} | (
            {"communication"} if num_devices > 1 else set()
        )
        self.missing = tuple(sorted(needed - profile.components))
        super().__init__(base)
        self._lacking = () if "gemm" in self.missing else tuple(lacking)
        self.lacking = tuple(dict.fromkeys(op.name for op in self._lacking))
        self._by_component = {name: profile.grid((name,)) for name in BY_COUNT}
        self._around = {name: profile.grid((name,), AROUND) for name in BY_COUNT}
        self._tokens_s = ByCount(self._tokens_seconds)
        self._rows_s = ByCount(self._rows_seconds)
        self._attention = profile.attention
        num_kernels = profile.num_kernels + sum(op.calls * op.kernels for op in self._lacking)
        self._host = HostShare(host or HostOverhead(), cuda_graphs or CudaGraphs(), num_kernels)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        counts = (shape.decode_seqs, *shape[2:7])
        if shape.drafts is not None or any(isinstance(field, np.ndarray) for field in counts):
            flat = _flat(shape)
        else:  # numbers, or the contexts of a leap
            flat = Flat(IterationShape(*counted("table", shape)), None, None)
        tokens, prefill_tokens, num_seqs, sampled = flat.counts
        replays = self._host.replays(tokens, prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays)
        gpu_s = self._tokens_s.of(computed) + self._rows_s.of(whole(sampled)) + self._attention_seconds(flat)
        wall_s = self._host.wall_seconds(gpu_s, replays, num_seqs)
        return wall_s if flat.answer_shape is None else wall_s.reshape(flat.answer_shape)[()]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; the base prices components that the table lacks."""
        flat = _flat(shape)
        tokens, prefill_tokens, num_seqs, sampled = flat.counts
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, np.zeros(len(tokens)))
        replays = self._host.replays(tokens, prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays).astype(np.float64)
        for name in BY_COUNT:
            parts[name] = self._component_seconds(name, sampled if name == "lm_head" else computed)
        parts["attention"] = self._attention_seconds(flat)
        gpu_s = sum(parts.values())
        parts["launch"], parts["host"] = self._host.parts(gpu_s, replays, num_seqs)
        return {name: part.reshape(flat.answer_shape)[()] for name, part in parts.items()}

    def model_breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component without the operators around the model (`AROUND`)."""
        flat, parts = _flat(shape), self.breakdown(shape)
        tokens, _, _, sampled = flat.counts
        for name, grid in self._around.items():
            if grid is not None:
                counts = np.asarray(sampled if name == "lm_head" else tokens, dtype=np.float64)
                around_s = np.where(counts > 0, grid.at(np.maximum(counts, 1.0)), 0.0)
                parts[name] = parts[name] - around_s.reshape(flat.answer_shape)[()]
        return parts

    def _tokens_seconds(self, num_tokens: Floats) -> Floats:
        return sum(
            (self._component_seconds(name, num_tokens) for name in BY_COUNT if name != "lm_head"),
            np.zeros_like(num_tokens),
        )

    def _rows_seconds(self, num_rows: Floats) -> Floats:
        return self._component_seconds("lm_head", num_rows)

    def _component_seconds(self, name: str, counts: Floats) -> Floats:
        """Returns measured seconds, or the base's seconds; 0 s for 0 tokens or rows."""
        grid, some = self._by_component[name], np.maximum(counts, 1.0)
        if grid is not None:
            seconds: Any = grid.at(some)
        elif name in self.missing:
            # A prompt of `some` tokens, all sampled: these components depend on no other size.
            prompt = IterationShape(0, 0, 1, some, some * (some + 1) / 2, some, some)
            seconds = self._other.breakdown(prompt)[name]
        else:
            seconds = 0.0
        if self._lacking:
            batch = RankBatch(some, some, some, 0, 0, 0, 0, 0, 0)
            own = [op.calls * op.seconds(batch) for op in self._lacking if op.component == name]
            seconds = sum(own, seconds)
        return np.where(counts > 0, seconds, 0.0)

    def _attention_seconds(self, flat: Flat) -> Any:
        """Returns the attention seconds; passes with draft tokens are computed separately."""
        price = self._attention_of_base if self._attention is None else self._attention.seconds
        seconds = price(flat.plain)
        return seconds if flat.passes is None else seconds + price(flat.passes)

    def _attention_of_base(self, shape: IterationShape) -> Any:
        flat = _flat(shape)  # one-element arrays make numbers and arrays take the same path through the base
        seconds: Any = self._other.breakdown(flat.plain)["attention"]
        return seconds.reshape(flat.answer_shape)[()]


class Flat(NamedTuple):
    """The shapes of N iterations as arrays [N]; passes: those with draft tokens, each as a prompt chunk."""

    plain: IterationShape
    passes: IterationShape | None
    answer_shape: tuple[int, ...] | None
    """Shape of the result; None: the shape of the plain fields, which are numbers except for contexts."""

    @property
    def counts(self) -> tuple[Any, Any, Any, Any]:
        """Tokens (integers), tokens other than single decodes, sequences, and sampled rows."""
        plain, passes = self.plain, self.passes
        prefill_tokens, num_seqs = plain.prefill_tokens, plain.decode_seqs + plain.prefill_seqs
        if passes is not None:
            prefill_tokens, num_seqs = prefill_tokens + passes.prefill_tokens, num_seqs + passes.prefill_seqs
        return whole(plain.decode_seqs + prefill_tokens), prefill_tokens, num_seqs, plain.sampled_seqs


def _flat(shape: IterationShape) -> Flat:
    """Returns the fields as arrays of one length. Raises UnknownIterationError for adapters."""
    drafts = shape.drafts
    counts: tuple[Any, ...] = counted("table", shape._replace(drafts=None))
    if drafts is None:
        plain, answer_shape = _arrays(counts)
        return Flat(IterationShape(*plain), None, answer_shape)
    (seqs, context, *others, tokens, pairs), answer_shape = _arrays((*counts, drafts.tokens, drafts.pairs))
    none, has_drafts = np.zeros_like(seqs), tokens > 0
    own, own_context = np.where(has_drafts, seqs, 0), np.where(has_drafts, context, 0)
    passes = IterationShape(none, none, own, tokens + own, pairs + own_context, own_context + tokens, none)
    return Flat(IterationShape(seqs - own, context - own_context, *others), passes, answer_shape)


def _arrays(fields: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns fields as flat arrays of one length, and the shape of the result."""
    arrays = np.broadcast_arrays(*(np.asarray(field, dtype=np.float64) for field in fields))
    return [array.ravel() for array in arrays], arrays[0].shape


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLevel:
    """Level `table`: measured operators, interpolated; others come from the calibrated roofline."""

    path: str
    """A file, or a folder of LLMServingSim's layer tables."""
    gpu: str | None = None
    """Name of the GPU in the table; None: the name of the simulated hardware."""
    model: str | None = None
    """Name of the model in the table; None: the name of the simulated model."""
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: no scatter."""

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
    """Whether the calibrated roofline prices unrecorded iterations; False: they are an error."""
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: no scatter."""

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
    """Returns the setting that names the file, for errors raised after construction."""
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
