"""Settings of `windtunnel roofline`, and the computation of its figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hwmodels.iterations.iteration import Explained, IterationShape
from hwmodels.iterations.memory import MemoryPlan
from hwmodels.iterations.operating_point import (
    LargestBatch,
    OperatingPoint,
    decode_shape,
    largest_batch,
    operating_point,
    prefill_shape,
)
from hwmodels.model.precision import precision_notes
from sim.setup.deployment import Deployment


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineSettings(Deployment):
    """Settings of `windtunnel roofline`."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 512)
    """Batch sizes: sequences per iteration."""
    context: int = 1024
    """Context tokens that each decoding sequence attends to."""
    prompt: int = 2048
    """Prompt tokens per prefill."""
    phase: Literal["decode", "prefill"] = "decode"
    """Phase of the iteration whose operators are listed."""
    batch_size: int | None = None
    """Batch size of that iteration; None: the middle one of batch_sizes (prefill: the first)."""
    out: str | None = "roofline.html"
    """File of the chart; None: no chart."""

    def __post_init__(self) -> None:
        if not self.batch_sizes:
            raise ValueError(
                "batch_sizes=[]: must contain at least one size, for example batch_sizes=[1,8,32]"
            )
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes={min(self.batch_sizes)}: must be >= 1 sequence")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: must be >= 1 sequence")
        limit = self.model.max_position_embeddings
        for name in ("context", "prompt"):
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be 1 to {limit} tokens, "
                    f"the context of {self.model.name}"
                )
        Deployment.__post_init__(self)  # super() fails in dataclasses with slots


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """Figures of a roofline, to be printed and drawn."""

    settings: RooflineSettings
    memory: MemoryPlan
    largest: LargestBatch
    points: list[OperatingPoint]
    explained: OperatingPoint
    """The iteration whose operators are listed."""
    operators: list[Explained]
    compute_dtype: str
    """Data type of most matrices; MFU is relative to its peak."""
    notes: list[str]


def survey(settings: RooflineSettings) -> Survey:
    """Computes the survey. Raises ValueError if the model does not fit or an iteration cannot be priced."""
    memory = settings.plan_memory()
    model = settings.latency.iteration_model(settings.replica)
    sizes = settings.batch_sizes
    # Prompts that exceed the token budget are split over several iterations.
    at_once = max(settings.max_num_batched_tokens // settings.prompt, 1)
    shapes = [decode_shape(size, settings.context) for size in sizes]
    within = sorted({size for size in sizes if size < at_once} | {at_once})
    shapes += [prefill_shape(size, settings.prompt) for size in within]
    chosen = _chosen_shape(settings)
    notes = [
        settings.latency.basis(settings.replica),
        *settings.layout_notes,
        *settings.model.notes,
        *precision_notes(settings.model, settings.hardware),
    ]
    beyond = [size for size in sizes if size > at_once]
    if beyond:
        notes.append(
            f"Prefill of {', '.join(map(str, beyond))} prompts is left out: it exceeds the engine's "
            f"{settings.max_num_batched_tokens:,} tokens per iteration."
        )
    return Survey(
        settings=settings,
        memory=memory,
        largest=largest_batch(memory, settings.context, settings.engine.max_num_seqs),
        points=[operating_point(model, shape) for shape in shapes],
        explained=operating_point(model, chosen),
        operators=model.explain(chosen),
        compute_dtype=settings.replica.roofline(settings.calibration).compute_dtype,
        notes=notes,
    )


def _chosen_shape(settings: RooflineSettings) -> IterationShape:
    sizes = settings.batch_sizes
    if settings.phase == "decode":
        return decode_shape(settings.batch_size or sizes[len(sizes) // 2], settings.context)
    return prefill_shape(settings.batch_size or sizes[0], settings.prompt)
