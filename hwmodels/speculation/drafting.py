"""Prices of drafting after a pass, by kind of draft.

Steps are passes of the draft over one row per sequence, as engines run them in a loop after sampling:

    drafting = start + first step + (steps - 1) x later step

A draft with KV of its own computes in its first step all rows of the target's pass and the prompt chunks
beside them (vLLM's proposers; a separate model also the sampled tokens), even if no token is to be drafted,
so that its KV stays complete. Later steps are priced at the context in their middle. A draft runs on all
devices of the target's tensor, data and context parallel groups, after the last stage of a pipeline. Its
steps replay CUDA graphs of their own, or are launched kernel by kernel, behind `step_s` of work of the host;
there is no scheduler between them. With asynchronous scheduling the host prepares the steps while the devices
still run the pass, so that `start_s` and `step_s` are hidden; kernels are launched in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import Any, Protocol, cast

import numpy as np
from numpy import ndarray

from hwmodels.assembly import Inputs, head_operators
from hwmodels.assembly.counted import CountedTimes
from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Site
from hwmodels.devices.host import CudaGraphs, HostOverhead
from hwmodels.exact import Num, divided_up, larger, smaller
from hwmodels.iterations.critical_path import bound_of
from hwmodels.iterations.iteration import COMPONENTS, DraftWork, Explained, IterationShape
from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Per
from hwmodels.levels.rooflines import Replica
from hwmodels.model.matrices import Matrix, Ranks
from hwmodels.model.model_spec import ModelSpec
from hwmodels.speculation.draft import (
    Draft,
    HeadDraft,
    HostDraft,
    LayerDraft,
    ModelDraft,
    PassDraft,
    SkipDraft,
    Stepwise,
)


class Drafting(Protocol):
    """Prices what a draft does after a pass. Results are numbers, or arrays with equal bits."""

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of drafting."""

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component (`COMPONENTS`); they sum to `seconds`."""

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of drafting; their seconds sum to `seconds`, shares are left 0."""

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of drafting."""

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that drafting reads."""


def drafts_of(shape: IterationShape) -> DraftWork:
    """Returns the draft tokens of an iteration that has some."""
    assert shape.drafts is not None
    return shape.drafts


class Steps:
    """Sequential steps of a draft, each priced by a roofline.

    first, later: rooflines of the first step and of those after it. has_kv: the first one computes the rows
    and the chunks of the target's pass, and `extra` rows more for each decoding sequence, even if no token is
    to be drafted; else it has one row per sequence. rows: rows of a sequence in a later step, with a tree
    those of its widest level.
    """

    def __init__(
        self,
        first: Roofline,
        later: Roofline,
        *,
        start_s: float,
        has_kv: bool = True,
        extra: int = 0,
        rows: int = 1,
    ) -> None:
        self._first, self._later, self._start_s = first, later, start_s
        self._has_kv, self._extra, self._rows = has_kv, extra, rows

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of the last step."""
        if self._has_kv and self._rows == 1:
            decodes, context, _, chunks, *_, work = shape
            tokens, pairs, seqs, steps, _ = cast("Any", work)
            all_draft = type(decodes) is int and type(seqs) is int and seqs == decodes and chunks == 0
            if all_draft and type(tokens) is int and type(steps) is int and steps:
                return self._seconds_of_decodes(seqs, context, tokens, pairs, steps)
        once, count = self._counts(shape)
        first_s = self._start_s + once * self._first.seconds(self._to_first(shape))
        if not isinstance(count, ndarray) and not count:
            return first_s
        return first_s + count * self._later.seconds(self._to_later(shape))

    def _seconds_of_decodes(self, seqs: int, context: Any, tokens: int, pairs: Any, steps: int) -> Any:
        """Computes `seconds` of decodes that all draft; takes half the time. Arrays: contexts and pairs."""
        if self._extra:
            tokens, pairs = tokens + self._extra * seqs, pairs + self._extra * (context + tokens + seqs)
        first_s = self._start_s + self._first.pass_seconds(seqs, context, tokens, pairs, seqs)
        if steps == 1:
            return first_s
        later_s = self._later.pass_seconds(seqs, context + 0.5 * steps * seqs, 0, 0, seqs)
        return first_s + (steps - 1) * later_s

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; the start is the host's."""
        once, count = self._counts(shape)
        first, later = (
            self._first.breakdown(self._to_first(shape)),
            self._later.breakdown(self._to_later(shape)),
        )
        parts: dict[str, Num] = {name: once * first[name] + count * later[name] for name in COMPONENTS}
        return parts | {"host": parts["host"] + self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all steps, each once."""
        once, count = self._counts(shape)
        lines = {"host and launches": waiting(self._start_s)}
        for times, step in ((once, (self._first, self._to_first)), (count, (self._later, self._to_later))):
            for line in step[0].explain(step[1](shape)) if times else ():
                lines[line.operator] = _with(lines.get(line.operator), line, float(times))
        return list(lines.values())

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all steps."""
        return self._total(Roofline.flops, shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of all steps, each of which reads the draft's weights."""
        return self._total(Roofline.bytes_moved, shape)

    def _total(self, quantity: Callable[[Roofline, IterationShape], Num], shape: IterationShape) -> Num:
        once, count = self._counts(shape)
        first, later = (
            quantity(self._first, self._to_first(shape)),
            quantity(self._later, self._to_later(shape)),
        )
        total: Num = once * first + count * later
        return total

    def _counts(self, shape: IterationShape) -> tuple[Any, Any]:
        """Returns the number of first steps, 0 or 1, and of steps after it."""
        _, _, seqs, steps, _ = drafts_of(shape)
        some = smaller(seqs, 1)
        return 1 if self._has_kv else some * smaller(steps, 1), larger(steps - 1, 0) * some

    def _to_first(self, shape: IterationShape) -> IterationShape:
        """Returns the first step of the draft after an iteration of the target."""
        tokens, pairs, seqs, _, _ = drafts_of(shape)
        if not self._has_kv:
            some = larger(seqs, 1)
            return IterationShape(some, _drafting_context(shape), 0, 0, 0, 0, some)
        decodes, context = shape.decode_seqs, shape.decode_context_tokens
        if self._extra:
            tokens, pairs = (
                tokens + self._extra * decodes,
                pairs + self._extra * (context + tokens + decodes),
            )
        return IterationShape(*shape[:6], seqs, None, DraftWork(tokens, pairs, 0, 0, 0))

    def _to_later(self, shape: IterationShape) -> IterationShape:
        """Returns the step in the middle of those after the first one."""
        drafts = drafts_of(shape)
        seqs = larger(drafts.seqs, 1)
        context = _drafting_context(shape) + 0.5 * drafts.steps * seqs
        if self._rows == 1:
            return IterationShape(seqs, context, 0, 0, 0, 0, seqs)
        more = self._rows - 1
        work = DraftWork(more * seqs, more * context, 0, 0, 0)
        return IterationShape(seqs, context, 0, 0, 0, 0, self._rows * seqs, None, work)


def _drafting_context(shape: IterationShape) -> Any:
    """Returns the KV tokens of the sequences that draft: decodes first, then those of completed prompts."""
    decodes, context, chunks, _, _, prefill_context, *_ = shape
    seqs = drafts_of(shape).seqs
    of_decodes = context * smaller(seqs, decodes) / larger(decodes, 1)
    return of_decodes + prefill_context * larger(seqs - decodes, 0) / larger(chunks, 1)


def _with(line: Explained | None, added: Explained, times: float) -> Explained:
    """Returns a line, or nothing, with another one added several times."""
    if line is None:
        line = added._replace(seconds=0.0, share=0.0, flops=0.0, bytes_moved=0.0, calls=0.0)
    return line._replace(
        seconds=line.seconds + times * added.seconds,
        flops=line.flops + times * added.flops,
        bytes_moved=line.bytes_moved + times * added.bytes_moved,
        calls=line.calls + times * added.calls,
    )


class Heads:
    """Medusa's heads on the last hidden state of each sequence that drafts, all in one go.

    site, whole: a rank of the target, and the target on one device.
    """

    def __init__(self, draft: HeadDraft, site: Site, whole: Site) -> None:
        self._start_s = draft.start_s
        self._shares = site.layout.attention_data_parallel_size
        self._device = site.device
        self._operators, self._whole = _head_operators(draft, site), _head_operators(draft, whole)
        self._rows_s = CountedTimes(self._operators, site.layout).rows_s

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the heads' matrices and of sampling from their logits."""
        return self._start_s + self._gpu_seconds(self._rows(shape))

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component: all are of LM heads, but for the start."""
        parts: dict[str, Num] = dict.fromkeys(COMPONENTS, 0.0)
        return parts | {"lm_head": self._gpu_seconds(self._rows(shape)), "host": self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all heads."""
        batch = _of_rows(self._rows(shape))
        lines = [waiting(self._start_s)]
        for op in self._operators:
            seconds, flops, moved = (float(q(batch)) for q in (op.seconds, op.flops, op.bytes_moved))
            if batch.rows:
                bound = bound_of(op, self._device, flops, moved, seconds)
                counts = (op.calls * flops, op.calls * moved, op.calls)
                lines.append(Explained(op.name, op.component, op.calls * seconds, 0.0, bound, *counts))
        return lines

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all heads for the sequences that draft."""
        return self._total("flops", shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of the heads' weights."""
        return self._total("stored_bytes", shape)

    def _total(self, quantity: str, shape: IterationShape) -> Num:
        batch = _of_rows(drafts_of(shape).seqs)
        total: Num = sum(op.calls * getattr(op, quantity)(batch) for op in self._whole)
        return total

    def _rows(self, shape: IterationShape) -> Any:
        return divided_up(drafts_of(shape).seqs, self._shares)

    def _gpu_seconds(self, rows: Any) -> Any:
        if isinstance(rows, ndarray):
            return self._rows_s.of_many(rows.astype(np.intp))
        return self._rows_s.of(int(rows))


def _head_operators(draft: HeadDraft, site: Site) -> list[Operator]:
    proj, _ = draft.matrices(site.model, site.ranks)
    return [*site.gemm(proj, 1, Per.row), *head_operators(site, draft.num_heads)]


def _of_rows(rows: Num) -> RankBatch:
    return RankBatch(rows, rows, rows, 0, 0, 0, 0, 0, 0)


class Searches:
    """A search of the host for every sequence that drafts, one after the other."""

    def __init__(self, draft: HostDraft) -> None:
        self._draft = draft

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the CPU seconds, in which the devices wait."""
        draft = self._draft
        return (
            draft.start_s
            + draft.sequence_s * drafts_of(shape).seqs
            + draft.kilotoken_s * 0.001 * _drafting_context(shape)
        )

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component: all are the host's."""
        parts: dict[str, Num] = dict.fromkeys(COMPONENTS, 0.0)
        return parts | {"host": self.seconds(shape)}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the wait for the host."""
        return [waiting(float(self.seconds(shape)))]

    def flops(self, shape: IterationShape) -> Num:
        """Returns 0: the devices compute nothing."""
        return 0.0

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns 0: the devices read nothing."""
        return 0.0


def waiting(seconds: float) -> Explained:
    """Returns the line of the seconds in which devices wait for the host."""
    return Explained("host and launches", "host", seconds, 0.0, "host", 0.0, 0.0, 0.0)


@singledispatch
def drafting_of(draft: Draft, replica: Replica, rows: int) -> Drafting:
    """Returns the price of a draft on the devices of a replica; rows: see `Steps`.

    Raises ValueError if the target and its layout cannot have the draft, or if the kind of draft is unknown.
    """
    raise ValueError(f"draft={draft}: must be one of the drafts of hwmodels.speculation.draft")


@drafting_of.register
def _(draft: ModelDraft, replica: Replica, rows: int) -> Drafting:
    layout = _draft_layout(replica.layout, draft.model, draft.cut(replica.layout))
    model = _roofline(draft, replica, draft.model, layout)
    return Steps(model, model, start_s=_shown(draft.start_s, replica), extra=1, rows=rows)


@drafting_of.register
def _(draft: LayerDraft, replica: Replica, rows: int) -> Drafting:
    target = replica.model
    layers = draft.layers(target)
    layout = _draft_layout(replica.layout, layers, replica.layout.tensor_parallel_size)

    def of_step(ranks: Ranks) -> list[Matrix]:
        return list(draft.step_matrices(target, ranks))

    def of_first(ranks: Ranks) -> list[Matrix]:
        return [*draft.pass_matrices(target), *draft.step_matrices(target, ranks)]

    later = _roofline(draft, replica, layers, layout, of_step)
    first = _roofline(draft, replica, layers, layout, of_first) if draft.pass_matrices(target) else later
    return Steps(first, later, start_s=_shown(draft.start_s, replica), rows=rows)


@drafting_of.register
def _(draft: SkipDraft, replica: Replica, rows: int) -> Drafting:
    layers = draft.layers(replica.model)
    layout = _draft_layout(replica.layout, layers, replica.layout.tensor_parallel_size)
    model = _roofline(draft, replica, layers, layout)
    return Steps(model, model, start_s=_shown(draft.start_s, replica), has_kv=False, rows=rows)


@drafting_of.register
def _(draft: HeadDraft, replica: Replica, rows: int) -> Drafting:
    target = replica.roofline(replica.calibration)
    return Heads(draft, target.site, replace(target.site, layout=ParallelLayout()))


@drafting_of.register
def _(draft: HostDraft, replica: Replica, rows: int) -> Drafting:
    return Searches(draft)


@drafting_of.register
def _(draft: PassDraft, replica: Replica, rows: int) -> Drafting:
    return Searches(HostDraft(start_s=draft.start_s))  # guesses are refined in the pass itself


def _roofline(
    draft: Stepwise,
    replica: Replica,
    model: ModelSpec,
    layout: ParallelLayout,
    inputs: Inputs | None = None,
) -> Roofline:
    """Returns the roofline of a step; the host prepares and launches it while the devices run."""
    host = HostOverhead(
        iteration_s=_shown(draft.step_s, replica),
        sequence_s=0.0,
        launch_s=replica.host.launch_s,
        graph_replay_s=replica.host.graph_replay_s,
        overlapped=True,
    )
    return Roofline(
        model=model,
        device=replica.device,
        layout=layout,
        calibration=replica.calibration,
        host=host,
        cuda_graphs=replica.cuda_graphs if draft.cuda_graphs else CudaGraphs(enabled=False),
        kernels=replica.kernels,
        inputs=inputs,
    )


def _shown(host_s: float, replica: Replica) -> float:
    """Returns the seconds of the host that devices can wait for: 0 with asynchronous scheduling."""
    return 0.0 if replica.host.overlapped else host_s


def _draft_layout(target: ParallelLayout, model: ModelSpec, tensor_parallel_size: int) -> ParallelLayout:
    """Returns the layout of a draft: that of a stage, with dense layers on all of its devices."""
    return replace(
        target,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=1,
        num_micro_batches=None,
        expert_parallel_size=target.expert_parallel_size if model.has_experts else 1,
        sequence_parallel=target.sequence_parallel and tensor_parallel_size > 1,
    )
