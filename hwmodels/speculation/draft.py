"""Drafts and their prices: sequential passes of a small model, heads, work of the host, or more rows.

A draft states its memory in addition to the target model: weights and KV of one device.

    ModelDraft   a small model with the target's vocabulary; as many decode steps as draft tokens
    LayerDraft   one or a few layers on the target's hidden states: EAGLE, EAGLE-3, multi-token prediction
    HeadDraft    Medusa: heads on the last hidden state, all at once
    SkipDraft a subset of the target's layers, on the KV of these layers
    HostDraft    a search on the host: n-grams of the prompt, suffix trees
    PassDraft    rows of the target's own pass, or of a further one: lookahead decoding
    SeveralDrafts  several small models in turn

Steps are passes of the draft over one row per sequence, as engines run them in a loop after sampling:

    drafting = start + first step + (steps - 1) x later step

A draft with its own KV computes in its first step all rows of the target's pass and its prompt chunks (vLLM's
proposers; a separate model also the sampled tokens), even if no token is drafted, so that its KV stays
complete. Later steps are priced at the context in their middle. A draft runs on all devices of the target's
tensor, data and context parallel groups, after the last stage of a pipeline. Its steps replay their own CUDA
graphs, or are launched kernel by kernel, after `step_s` of host work; the scheduler does not run between
them. With asynchronous scheduling the host prepares the steps while the devices still run the pass, so
`start_s` and `step_s` only bound the complete iteration (`SpeculativeModel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import singledispatch
from typing import Annotated, Any, Protocol

from fieldlimits import Checked, MinLen, NonNegative, OneOf, PositiveInt, Unit
from hwmodels.assembly import Inputs, head_operators
from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Site
from hwmodels.exact import Num, divided_up, larger, smaller, whole
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import COMPONENTS, Explained, IterationShape
from hwmodels.iterations.layout import ParallelLayout, RankBatch
from hwmodels.iterations.ops import CountedTimes, Operator, Per, bound_of
from hwmodels.levels import Replica
from hwmodels.model import Block, DenseMlp, MixtureOfExperts, ModelSpec
from hwmodels.model.attention import Attention, NoAttention
from hwmodels.model.recurrent import RecurrentLayer
from hwmodels.model.weights import Matrix, Ranks, Role, share_of
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

LAYER_KINDS = ("eagle", "eagle3", "mtp")

START_S = 0.5e-3
STEP_S = 0.7e-3
"""Host times of a synchronous engine in Python: vLLM 0.9, EAGLE for Llama-3.1-8B on an H100 (issue 20780).

Mean accepted length x TPOT is 9.2 ms with 2 draft tokens and grows by 0.73 ms per token, of which the devices
need 0.60 ms; extrapolated to no draft tokens it is 0.5 ms more than a decode.
"""


class Draft(Protocol):
    """A way to draft tokens, with its additional memory on the most loaded device."""

    @property
    def pass_tokens(self) -> int:
        """Rows of a sequence in the target's pass in addition to its next token and the draft tokens."""

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError if the target and its layout cannot have this draft."""

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        """Returns the bytes of weights that the target does not have."""

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        """Returns the bytes of KV per token of a sequence, in addition to the target's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InTarget(Checked):
    """A draft without additional memory and without rows in the target's pass."""

    @property
    def pass_tokens(self) -> int:
        return 0

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises no error, because it supports every target."""

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return 0.0

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepwise(InTarget):
    """A draft that generates one token after the other, each with a separate pass on the target's devices."""

    cuda_graphs: bool = True
    """Whether a step replays a CUDA graph; False: the host launches it kernel by kernel."""
    start_s: Annotated[NonNegative, Unit("s")] = START_S
    """Seconds for which the devices wait between the end of the target's pass and the first step."""
    step_s: Annotated[NonNegative, Unit("s")] = STEP_S
    """CPU seconds to prepare a step, in addition to its kernel launches; a step takes at least this time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDraft(Stepwise):
    """A small model with the target's vocabulary and its own weights and KV."""

    model: ModelSpec
    tensor_parallel_size: PositiveInt | None = None
    """Number of devices over which the draft is sharded, the target's size or 1; None: the target's. 1: every
    device computes all of it.
    """
    computes_rejected: bool = True
    """Whether its first step computes all rows of the pass, as in vLLM, or only the row without KV."""

    def cut(self, layout: ParallelLayout) -> int:
        """Returns the number of devices over which the draft is sharded."""
        return self.tensor_parallel_size or layout.tensor_parallel_size

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError for a different vocabulary, or for a sharding that no engine supports."""
        if self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"model={self.model.name}: has {self.model.vocab_size:,} tokens in its vocabulary, "
                f"{target.name} has {target.vocab_size:,}; choose a draft of the same vocabulary"
            )
        if self.cut(layout) not in (1, layout.tensor_parallel_size):
            own = layout.tensor_parallel_size
            allowed = "1" if own == 1 else f"1 or {own}, the target's"
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size}: must be {allowed}; leave it null for the "
                "target's"
            )
        self.model.check_tensor_parallel_size(self.cut(layout))

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return self.model.weight_bytes_per_rank(self.cut(layout))

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return self.model.kv_bytes_per_token(self.cut(layout))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerDraft(Stepwise):
    """Layers that predict the next hidden state from the last one and the token sampled there.

    Each step runs num_layers layers and an LM head over one row per sequence; the first over all rows of the
    pass, to write their KV. The embedding table is the target's.

        eagle   a matrix of 2 hidden to hidden before the layers; the target's LM head (Li et al., 2024)
        eagle3  3 hidden states of the target to one, once per pass; the first layer reads 2 hidden; an LM
                head of its own with the most frequent tokens only (Li et al., 2025)
        mtp     as eagle, with layers like the target's last one (DeepSeek-V3, 2024, section 2.2)
    """

    kind: Annotated[str, OneOf(LAYER_KINDS)] = "eagle"
    num_layers: PositiveInt = 1
    """Layers that run in a step."""
    num_modules: PositiveInt = 1
    """Number of separate sets of layers, used in turn by the steps; 1: all steps use the same set."""
    vocab_size: Annotated[PositiveInt | None, "null for the target's"] = None
    """Vocabulary size of its own LM head; None: it shares the target's."""
    intermediate_size: Annotated[PositiveInt | None, "null for the target's"] = None
    """Width of a dense MLP; None: the MLP of the target's last layer."""
    attention: Attention | None = None
    """Attention of its layers; None: the same as the target's last layer."""
    weights: str | None = None
    """Storage format of its matrices; None: for mtp the target's format, for others the target's dtype."""

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError if the width of the MLP is unknown, or its heads cannot be divided."""
        if self.attention is not None:
            try:
                self.layers(target).check_tensor_parallel_size(layout.tensor_parallel_size)
            except ValueError as error:
                raise ValueError(f"attention: {error}") from None
        of_target = self._like(target).mlp
        if self.kind != "mtp" and self.intermediate_size is None and not isinstance(of_target, DenseMlp):
            has = "experts" if isinstance(of_target, MixtureOfExperts) else "layers without an MLP"
            raise ValueError(
                f"intermediate_size=null: {self.kind} layers have a dense MLP, but {target.name} has "
                f"{has}; give its width"
            )

    def _like(self, target: ModelSpec) -> Block:
        """Returns the target's layers that the draft's layers copy: its MTP layer, else the last one."""
        if self.kind == "mtp" and target.mtp_block is not None:
            return target.mtp_block
        last = target.blocks[-1]
        if not isinstance(last.attention, RecurrentLayer | NoAttention):
            return last
        with_kv = [b for b in target.blocks if b.attention.kv_bytes_per_token(target.kv_dtype) > 0]
        return with_kv[-1] if with_kv else last

    def layers(self, target: ModelSpec) -> ModelSpec:
        """Returns the layers of a step as a model, with its LM head and without its input matrix."""
        last = self._like(target)
        mlp = last.mlp
        if self.intermediate_size is not None:
            mlp = DenseMlp(intermediate_size=self.intermediate_size)
        attention = self.attention or last.attention
        with_target = self.kind == "mtp" and self.weights is None
        formats = last.formats if with_target else ()
        block = replace(last, count=self.num_layers, mlp=mlp, attention=attention, formats=formats)
        has_experts = isinstance(mlp, MixtureOfExperts)
        return replace(
            target,
            name=f"{self.kind} of {target.name}",
            blocks=(block,),
            vocab_size=self.vocab_size or target.vocab_size,
            other_weights=(),
            weights=target.weights if with_target else self.weights,
            moe_weights=target.moe_weights if with_target and has_experts else None,
        )

    def step_matrices(self, target: ModelSpec, ranks: Ranks) -> tuple[Matrix, ...]:
        """Returns the matrices of a step other than those of its layers, on one rank."""
        hidden = target.hidden_size
        if self.kind == "eagle3":  # the first layer's queries, keys and values come from two hidden states
            qkv, *_ = self.layers(target).blocks[0].attention.matrices(hidden, ranks.tensor)
            return (replace(qkv, name="draft_qkv_proj", k=hidden),)
        return (Matrix("draft_proj", 2 * hidden, hidden, role=Role.plain),)

    def pass_matrices(self, target: ModelSpec) -> tuple[Matrix, ...]:
        """Returns the matrices applied to all rows of the pass before the first step."""
        hidden = target.hidden_size
        return (Matrix("draft_proj", 3 * hidden, hidden, role=Role.plain),) if self.kind == "eagle3" else ()

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        layers, ranks = self.layers(target), _ranks(layout)
        own = layers.layer_matrices(ranks)
        own += self.step_matrices(target, ranks)
        matrix_bytes = sum(layers.matrix_bytes(m) for m in own)
        vectors = layers.vector_elements(ranks) + 2 * target.hidden_size
        once = sum(m.elements for m in self.pass_matrices(target))
        if self.vocab_size is not None:
            once += share_of(self.vocab_size, layout.tensor_parallel_size) * target.hidden_size
        element_bytes = target.element_bytes
        return self.num_modules * (matrix_bytes + vectors * element_bytes) + once * element_bytes

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        of_step = self.layers(target).kv_bytes_per_token(layout.tensor_parallel_size)
        return self.num_modules * of_step


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDraft(InTarget):
    """Medusa: heads that predict the tokens after the next one from the last hidden state.

    A head is num_layers residual layers, hidden to hidden, and a separate LM head (Cai et al., 2024).
    """

    num_heads: PositiveInt = 4
    num_layers: PositiveInt = 1
    start_s: Annotated[NonNegative, Unit("s")] = START_S
    """Seconds for which the devices wait between the end of the target's pass and the heads."""

    def matrices(self, target: ModelSpec, ranks: Ranks) -> tuple[Matrix, ...]:
        """Returns the matrices of all heads, on one rank; residual layers are not sharded."""
        hidden, heads = target.hidden_size, self.num_heads
        vocabulary = share_of(target.vocab_size, ranks.tensor)
        return (
            Matrix("medusa_proj", hidden, hidden, count=heads * self.num_layers, role=Role.plain),
            Matrix("medusa_lm_head", hidden, vocabulary, count=heads, role=Role.plain),
        )

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        biases = self.num_heads * self.num_layers * target.hidden_size
        elements = biases + sum(m.elements for m in self.matrices(target, _ranks(layout)))
        return elements * target.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipDraft(Stepwise):
    """num_layers of the target's layers as its draft (self-speculative decoding, LayerSkip).

    It uses the KV of these layers, which the pass writes again.
    """

    num_layers: PositiveInt

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError if the target does not have more layers than the draft."""
        if self.num_layers >= target.num_layers:
            raise ValueError(
                f"num_layers={self.num_layers}: must be < {target.num_layers}, the layers of {target.name}"
            )

    def layers(self, target: ModelSpec) -> ModelSpec:
        """Returns the target's kept layers as a model; kinds of layers are kept in order."""
        left, kept = self.num_layers, list[Block]()
        for block in target.blocks:
            count = min(block.count, left)
            left -= count
            if count:
                kept.append(replace(block, count=count))
        return replace(target, name=f"{self.num_layers} layers of {target.name}", blocks=tuple(kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostDraft(InTarget):
    """A search on the host, sequence by sequence, while the devices wait."""

    start_s: Annotated[NonNegative, Unit("s")] = 0.0
    """CPU seconds per iteration, for any number of sequences."""
    sequence_s: Annotated[NonNegative, Unit("s")] = 0.0
    """CPU seconds per sequence, for any length of its context."""
    kilotoken_s: Annotated[NonNegative, Unit("s")] = 0.0
    """CPU seconds per sequence and 1,000 tokens of its context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassDraft(InTarget):
    """Guesses of later tokens that the target's own pass refines (lookahead decoding: Fu et al., 2024).

    With a window of W and n-grams of N tokens, a pass has W (N - 1) rows per sequence in addition to the
    candidates, which are its draft tokens.
    """

    extra_tokens: PositiveInt
    columns: PositiveInt = 1
    """W: number of rows sampled in a separate pass; in the verifying pass, all rows are sampled."""
    own_pass: bool = False
    """Whether the rows are computed in a separate pass after the verifying one, as in this project's engine.
    """
    start_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds after each pass for which the devices wait while the host updates the pool of n-grams."""

    @classmethod
    def of_window(cls, window: int, ngram: int, own_pass: bool = False, start_s: float = 0.0) -> PassDraft:
        """Returns the rows of a window of W places and n-grams of N tokens."""
        return cls(extra_tokens=window * (ngram - 1), columns=window, own_pass=own_pass, start_s=start_s)

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError for a separate pass in a pipeline."""
        if self.own_pass and layout.pipeline_parallel_size > 1:
            raise ValueError(
                f"own_pass=true: pipeline_parallel_size={layout.pipeline_parallel_size}: must be 1; set "
                "own_pass to false"
            )

    @property
    def pass_tokens(self) -> int:
        return 0 if self.own_pass else self.extra_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralDrafts(InTarget):
    """Small models of the target's vocabulary on the same devices, by name; all draft in every pass.

    They draft in turn, one branch of a token tree each (SpecInfer: Miao et al., 2024).
    """

    drafts: Annotated[Mapping[str, ModelDraft], MinLen(1)]

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError, with the name of the draft, if the target cannot have one of them."""
        for name, draft in self.drafts.items():
            try:
                draft.check(target, layout)
            except ValueError as error:
                raise ValueError(f"drafts.{name}.{error}") from None

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return sum(draft.weight_bytes(target, layout) for draft in self.drafts.values())

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return sum(draft.kv_bytes_per_token(target, layout) for draft in self.drafts.values())


def _ranks(layout: ParallelLayout) -> Ranks:
    return Ranks(layout.tensor_parallel_size, layout.expert_tensor_parallel_size, layout.expert_parallel_size)


class Heads:
    """Medusa's heads on the last hidden state of each drafting sequence, all at once.

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
        """Builds it. The CPU seconds to launch a kernel are 0 if a CUDA graph replays the heads."""
        self._made_of = draft, site, whole, start_s, launch_s
        self._target = target
        self._start_s = start_s
        self._shares = site.layout.attention_data_parallel_size
        self._device = site.device
        self._operators, self._whole = _head_operators(draft, site), _head_operators(draft, whole)
        self._rows_s = CountedTimes(self._operators, site.layout).rows_s
        self._launches_s = launch_s * sum(op.calls * op.kernels for op in self._operators)

    def scaled_by(self, target: TargetScale) -> Heads:
        """Returns the same heads with prices scaled like the target's LM head."""
        draft, site, whole, start_s, launch_s = self._made_of
        return Heads(draft, site, whole, start_s=start_s, launch_s=launch_s, target=target)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of the heads' matrices and of sampling from their logits."""
        rows = self._rows(shape)
        return self._start_s + larger(self._gpu_seconds(rows), self._launches(rows))

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component: everything except the start belongs to LM heads."""
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
        shape = shape._replace(share=Fraction(0))  # only the last accepted draft token lacks its KV
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
    """Returns the host's seconds for which devices wait: 0 with asynchronous scheduling."""
    return 0.0 if replica.host.overlapped else host_s


def _draft_layout(target: ParallelLayout, model: ModelSpec, tensor_parallel_size: int) -> ParallelLayout:
    """Returns the layout of a draft: a stage's layout, with dense layers on all of its devices."""
    return replace(
        target,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=1,
        num_micro_batches=None,
        expert_parallel_size=target.expert_parallel_size if model.has_experts else 1,
        sequence_parallel=target.sequence_parallel and tensor_parallel_size > 1,
    )
