"""Settings of `windtunnel roofline`, and the computation of its figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from fieldlimits import MinLen, PositiveInt, Unit, check
from hwmodels.iterations import DraftWork, Explained, IterationModel, IterationShape
from hwmodels.iterations.memory import MemoryPlan
from hwmodels.iterations.ops import (
    LargestBatch,
    OperatingPoint,
    decode_shape,
    largest_batch,
    operating_point,
    prefill_shape,
)
from hwmodels.model import precision_notes
from hwmodels.speculation import pass_of_equal
from policies.speculation import Proposer, num_places
from sim.setup.deployment import Deployment


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineSettings(Deployment):
    """Settings of `windtunnel roofline`."""

    batch_sizes: Annotated[
        tuple[Annotated[PositiveInt, Unit("sequence")], ...], MinLen(1), "for example batch_sizes=[1,8,32]"
    ] = (1, 8, 32, 128, 512)
    """Batch sizes: sequences per iteration."""
    context: int = 1024
    """Context tokens that each decoding sequence attends to."""
    prompt: int = 2048
    """Prompt tokens per prefill."""
    phase: Literal["decode", "prefill"] = "decode"
    """Phase of the iteration whose operators are listed."""
    batch_size: Annotated[PositiveInt | None, Unit("sequence")] = None
    """Batch size of that iteration; None: the middle one of batch_sizes (prefill: the first)."""
    out: str | None = "roofline.html"
    """File of the chart; None: no chart."""

    def __post_init__(self) -> None:
        check(self)
        limit = self.model.max_position_embeddings
        for name in ("context", "prompt"):
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(
                    f"{name}={getattr(self, name)}: must be 1 to {limit} tokens, "
                    f"the context of {self.model.name}"
                )
        Deployment.__post_init__(self)  # super() fails in dataclasses with slots


class DraftedBatch(NamedTuple):
    """A decode batch without draft tokens, and with all those of the proposer."""

    num_seqs: int
    plain_s: float
    """Seconds of an iteration without draft tokens."""
    pass_s: float
    """Seconds of the pass that verifies the draft tokens."""
    drafting_s: float
    """Seconds that making the next draft tokens adds."""
    most_tokens: int
    """Tokens that a pass gives each sequence at most."""

    @property
    def break_even(self) -> float:
        """Tokens that a pass must give each sequence to be as fast as iterations without drafts."""
        return (self.pass_s + self.drafting_s) / self.plain_s


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
    drafted: list[DraftedBatch]
    """Decode batches with and without draft tokens; empty without speculation."""
    compute_dtype: str
    """Data type of most matrices; MFU is relative to its peak."""
    notes: list[str]


def survey(settings: RooflineSettings) -> Survey:
    """Computes the survey. Raises ValueError if the model does not fit or an iteration cannot be priced."""
    memory = settings.plan_memory()
    model = settings.iteration_model()
    sizes = settings.batch_sizes
    # Prompts that exceed the token budget are split over several iterations.
    at_once = max(settings.max_num_batched_tokens // settings.prompt, 1)
    shapes = [_decode_shape(settings, size) for size in sizes]
    within = sorted({size for size in sizes if size < at_once} | {at_once})
    shapes += [_prefill_shape(settings, size) for size in within]
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
    proposer = settings.speculation
    if proposer is not None:
        notes.append(
            "Decodes are passes with draft tokens, and drafting after them; tokens/s counts one token per "
            "sequence and pass, to which accepted draft tokens add."
        )
    return Survey(
        settings=settings,
        memory=memory,
        largest=largest_batch(memory, settings.context, settings.engine.max_num_seqs),
        points=[operating_point(model, shape) for shape in shapes],
        explained=operating_point(model, chosen),
        operators=model.explain(chosen),
        drafted=[_drafted(settings, proposer, model, size) for size in sizes] if proposer else [],
        compute_dtype=settings.replica.roofline(settings.calibration).compute_dtype,
        notes=notes,
    )


def _chosen_shape(settings: RooflineSettings) -> IterationShape:
    sizes = settings.batch_sizes
    if settings.phase == "decode":
        return _decode_shape(settings, settings.batch_size or sizes[len(sizes) // 2])
    return _prefill_shape(settings, settings.batch_size or sizes[0])


def _decode_shape(settings: RooflineSettings, size: int) -> IterationShape:
    """Returns a decode of a batch; with speculation each sequence verifies a draft and gets the next."""
    proposer = settings.speculation
    if proposer is None:
        return decode_shape(size, settings.context)
    return pass_of_equal(size, size * settings.context, proposer.num_speculative_tokens, num_places(proposer))


def _prefill_shape(settings: RooflineSettings, size: int) -> IterationShape:
    """Returns a prefill of a batch; with speculation drafts are made after it."""
    shape, proposer = prefill_shape(size, settings.prompt), settings.speculation
    if proposer is None:
        return shape
    drafted = size * proposer.num_speculative_tokens
    return shape._replace(drafts=DraftWork(0, 0, size, num_places(proposer), drafted))


def _drafted(
    settings: RooflineSettings, proposer: Proposer, model: IterationModel, size: int
) -> DraftedBatch:
    """Compares a decode batch with and without draft tokens."""
    plain = replace(settings, speculation=None).iteration_model()  # its host may schedule otherwise
    whole = _decode_shape(settings, size)
    pass_s = float(settings.latency.iteration_model(settings.replica).seconds(whole))
    return DraftedBatch(
        num_seqs=size,
        plain_s=float(plain.seconds(decode_shape(size, settings.context))),
        pass_s=pass_s,
        drafting_s=float(model.seconds(whole)) - pass_s,
        most_tokens=1 + num_places(proposer),
    )
