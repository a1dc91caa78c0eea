"""Prices of drafting after a pass, by kind of draft.

Steps are passes of the draft over one row per sequence, as engines run them in a loop after sampling:

    drafting = start + first step + (steps - 1) x later step

A draft with KV of its own computes in its first step all rows of the target's pass and the prompt chunks
beside them (vLLM's proposers; a separate model also the sampled tokens), even if no token is to be drafted,
so that its KV stays complete. Later steps are priced at the context in their middle. A draft runs on all
devices of the target's tensor, data and context parallel groups, after the last stage of a pipeline. Its
steps replay CUDA graphs of their own, or are launched kernel by kernel, behind `step_s` of work of the host;
there is no scheduler between them. With asynchronous scheduling the host prepares the steps while the devices
still run the pass, so `start_s` and `step_s` bound the whole iteration only (`SpeculativeModel`).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import singledispatch
from typing import Any

from hwmodels.assembly import Inputs, head_operators
from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Site
from hwmodels.exact import Num, divided_up, larger, smaller, whole
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import COMPONENTS, Explained, IterationShape
from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import CountedTimes, Operator, Per, bound_of
from hwmodels.levels import Replica
from hwmodels.model.model_spec import ModelSpec
from hwmodels.model.weights import Matrix, Ranks
from hwmodels.speculation.draft import (
    Draft,
    HeadDraft,
    HostDraft,
    LayerDraft,
    ModelDraft,
    PassDraft,
    SeveralDrafts,
    SkipDraft,
    Stepwise,
)
from hwmodels.speculation.steps import (
    Drafting,
    DraftShape,
    InTurn,
    OnHost,
    Steps,
    TargetScale,
    Windows,
    drafting_context,
    drafts_of,
    waiting,
)


class Heads:
    """Medusa's heads on the last hidden state of each sequence that drafts, all in one go.

    site, whole: a rank of the target, and the target on one device.
    """

    def __init__(
        self,
        draft: HeadDraft,
        site: Site,
        whole: Site,
        *,
        start_s: float,
        launch_s: float,
        target: TargetScale | None = None,
    ) -> None:
        """Takes the CPU seconds to launch a kernel; 0: a CUDA graph replays the heads."""
        self._made_of = draft, site, whole, start_s, launch_s
        self._target = target
        self._start_s = start_s
        self._shares = site.layout.attention_data_parallel_size
        self._device = site.device
        self._operators, self._whole = _head_operators(draft, site), _head_operators(draft, whole)
        self._rows_s = CountedTimes(self._operators, site.layout).rows_s
        self._launches_s = launch_s * sum(op.calls * op.kernels for op in self._operators)

    def scaled_by(self, target: TargetScale) -> Heads:
        """Returns the same heads with prices that are scaled as the target's LM head."""
        draft, site, whole, start_s, launch_s = self._made_of
        return Heads(draft, site, whole, start_s=start_s, launch_s=launch_s, target=target)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the heads' matrices and of sampling from their logits."""
        rows = self._rows(shape)
        return self._start_s + larger(self._gpu_seconds(rows), self._launches(rows))

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component: all are of LM heads, but for the start."""
        parts: dict[str, Num] = dict.fromkeys(COMPONENTS, 0.0)
        gpu_s = self._gpu_seconds(self._rows(shape))
        waits_s = self.seconds(shape) - self._start_s - gpu_s
        return parts | {"lm_head": gpu_s, "launch": waits_s, "host": self._start_s}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all heads."""
        batch = _of_rows(self._rows(shape))
        lines = [waiting(float(self.seconds(shape) - self._gpu_seconds(self._rows(shape))))]
        for op in self._operators:
            seconds, flops, moved = (float(q(batch)) for q in (op.seconds, op.flops, op.bytes_moved))
            if batch.rows:
                bound = bound_of(op, self._device, flops, moved, seconds)
                counts = (op.calls * flops, op.calls * moved, op.calls)
                lines.append(Explained(op.name, op.component, op.calls * seconds, 0.0, bound, *counts))
        modelled_s = sum(line.seconds for line in lines[1:]) or 1.0
        scale = 1.0 if self._target is None else float(self._gpu_seconds(self._rows(shape))) / modelled_s
        return [lines[0], *(line._replace(seconds=scale * line.seconds) for line in lines[1:])]

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

    def _launches(self, rows: Any) -> Any:
        return self._launches_s * smaller(rows, 1)

    def _gpu_seconds(self, rows: Any) -> Any:
        seconds = self._rows_s.of(whole(rows))
        if self._target is None:
            return seconds
        some = larger(rows, 1)
        alike = IterationShape(some, some, 0, 0, 0, 0, some)
        return self._target.scaled({"lm_head": seconds}, alike)["lm_head"]


def _head_operators(draft: HeadDraft, site: Site) -> list[Operator]:
    proj, _ = draft.matrices(site.model, site.ranks)
    return [*site.gemm(proj, 1, Per.row), *head_operators(site, draft.num_heads)]


def _of_rows(rows: Num) -> RankBatch:
    return RankBatch(rows, rows, rows, 0, 0, 0, 0, 0, 0)


@singledispatch
def drafting_of(draft: Draft, replica: Replica, shape: DraftShape) -> Drafting:
    """Returns the price of a draft on the devices of a replica; shape: of its draft tokens.

    Raises ValueError if the target and its layout cannot have the draft, or if the kind of draft is unknown.
    """
    raise ValueError(f"draft={draft}: must be one of the drafts of hwmodels.speculation.draft")


@drafting_of.register
def _(draft: ModelDraft, replica: Replica, shape: DraftShape) -> Drafting:
    layout = _draft_layout(replica.layout, draft.model, draft.cut(replica.layout))
    model = _roofline(draft, replica, draft.model, layout)
    if not draft.computes_rejected and not shape.level_rows:
        shape = shape._replace(
            share=Fraction(0)
        )  # of the draft tokens only the last accepted one lacks its KV
    return Steps(model, model, start_s=_shown(draft.start_s, replica), extra=1, shape=shape)


@drafting_of.register
def _(draft: LayerDraft, replica: Replica, shape: DraftShape) -> Drafting:
    target = replica.model
    layers = draft.layers(target)
    layout = _draft_layout(replica.layout, layers, replica.layout.tensor_parallel_size)

    def of_step(ranks: Ranks) -> list[Matrix]:
        return list(draft.step_matrices(target, ranks))

    def of_first(ranks: Ranks) -> list[Matrix]:
        return [*draft.pass_matrices(target), *draft.step_matrices(target, ranks)]

    later = _roofline(draft, replica, layers, layout, of_step)
    first = _roofline(draft, replica, layers, layout, of_first) if draft.pass_matrices(target) else later
    return Steps(first, later, start_s=_shown(draft.start_s, replica), shape=shape)


@drafting_of.register
def _(draft: SkipDraft, replica: Replica, shape: DraftShape) -> Drafting:
    layers = draft.layers(replica.model)
    layout = _draft_layout(replica.layout, layers, replica.layout.tensor_parallel_size)
    model = _roofline(draft, replica, layers, layout)
    return Steps(model, model, start_s=_shown(draft.start_s, replica), has_kv=False, shape=shape)


@drafting_of.register
def _(draft: HeadDraft, replica: Replica, shape: DraftShape) -> Drafting:
    target = replica.roofline(replica.calibration)
    whole = replace(target.site, layout=ParallelLayout())
    launch_s = 0.0 if replica.cuda_graphs.enabled else replica.host.launch_s
    start_s = _shown(draft.start_s, replica)
    return Heads(draft, target.site, whole, start_s=start_s, launch_s=launch_s)


@drafting_of.register
def _(draft: HostDraft, replica: Replica, shape: DraftShape) -> Drafting:
    def seconds(shape: IterationShape) -> Any:
        by_context_s = draft.kilotoken_s * 0.001 * drafting_context(shape)
        return draft.start_s + draft.sequence_s * drafts_of(shape).seqs + by_context_s

    return OnHost(seconds)


@drafting_of.register
def _(draft: PassDraft, replica: Replica, shape: DraftShape) -> Drafting:
    if not draft.own_pass:
        return OnHost(lambda shape: draft.start_s)  # guesses are refined in the pass itself
    host = replace(replica.host, iteration_s=0.0, sequence_s=0.0)
    target = replace(replica, host=host).roofline(replica.calibration)
    return Windows(target, guesses=draft.extra_tokens, columns=draft.columns, start_s=draft.start_s)


@drafting_of.register
def _(draft: SeveralDrafts, replica: Replica, shape: DraftShape) -> Drafting:
    own = tuple(-(-rows // len(draft.drafts)) for rows in shape.level_rows)  # each drafts a share of a level
    return InTurn(
        [drafting_of(one, replica, shape._replace(level_rows=own)) for one in draft.drafts.values()]
    )


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
