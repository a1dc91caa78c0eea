"""Parallel layout of one replica over devices: the share of each device, and the stages of a pipeline.

    tensor     heads, MLP columns, vocabulary are cut; two all-reduces per layer (Megatron-LM, Shoeybi 2019)
    sequence   norms on a share of the tokens, reduce-scatter and all-gather in place of each all-reduce
               (Korthikanti 2022)
    pipeline layers are cut into stages, which a batch passes one after the other; other batches follow it
    (GPipe, Huang 2019). A chunk of a prompt is never split over batches
    context    a prompt's tokens are cut, keys and values pass around a ring (Liu 2023), or queries if these
               are fewer (pass-Q, Yang 2024); in decode each device holds a share of every context
    attention data   every group of tensor-parallel devices has its own sequences; the experts are shared
    expert     routed experts are distributed; tokens travel to them and back (GShard, Lepikhin 2020)

tensor x context x attention data x pipeline = devices of a replica. Expert-parallel devices of a stage hold
different experts; the remaining parallelism cuts each expert's matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fieldlimits import Checked, PositiveInt, check
from hwmodels.device import Device
from hwmodels.exact import Num, divided_up, larger, smaller
from hwmodels.iterations import AdapterBatch, DraftWork, IterationShape
from hwmodels.model import MixtureOfExperts, ModelSpec
from hwmodels.model.weights import share_of

NO_ADAPTERS = AdapterBatch(0, 0, 0, 0)

SMALLEST_PIECE = 256
"""Minimum tokens of a piece of a chunk if micro-batches cut chunks (`ParallelLayout.cuts_chunks`)."""


class RankBatch(NamedTuple):
    """Work of one device in an iteration, or in each of its micro-batches. Fields are numbers or arrays.

    It is the share of the most loaded device, because sequences are not split.
    """

    tokens: Num
    """Rows of the device's projections; with a CUDA graph, the captured size."""
    all_tokens: Num
    """Tokens that enter an expert layer, from all devices of the stage."""
    rows: Num
    """Number of sampled rows."""
    decode_seqs: Num
    decode_context_tokens: Num
    prefill_seqs: Num
    prefill_tokens: Num
    prefill_pairs: Num
    prefill_context_tokens: Num
    adapter_count: Num = 0
    adapter_tokens: Num = 0
    adapter_rank_tokens: Num = 0
    adapter_ranks: Num = 0
    draft_tokens: Num = 0
    """Draft tokens that decodes verify; they are among `tokens`, not among `decode_seqs`."""
    draft_pairs: Num = 0


class InFlight(NamedTuple):
    """Numbers of micro-batches of an iteration. Numbers or arrays."""

    full: Num
    """Micro-batches of the size of `rank_batch`: those with a piece of a chunk, or all if there are no
    chunks.
    """
    light: Num
    """The other micro-batches, which only decode: see `without_chunks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout(Checked):
    """Parallel sizes of one replica, named as in vLLM and SGLang."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    context_parallel_size: PositiveInt = 1
    attention_data_parallel_size: PositiveInt = 1
    expert_parallel_size: PositiveInt = 1
    """Groups over which routed experts are distributed; 1: every device holds a slice of every expert."""
    sequence_parallel: bool = False
    attention_data_parallel_padding: bool = False
    """Whether all attention groups send as many tokens to the experts as the most loaded group."""
    num_micro_batches: Annotated[PositiveInt | None, "null for one per stage"] = None
    """Maximum number of micro-batches per iteration in a pipeline; None: the number of stages."""
    pp_layer_partition: tuple[int, ...] | None = None
    """Layers of each stage (VLLM_PP_LAYER_PARTITION, SGLANG_PP_LAYER_PARTITION); None: equal numbers."""

    def __post_init__(self) -> None:
        check(self)
        if self.pp_layer_partition is not None:
            self._check_partition(self.pp_layer_partition)
        if self.stage_size % self.expert_parallel_size:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size}: must divide the {self.stage_size} "
                "devices of a stage, tensor x context x attention data parallel"
            )

    def _check_partition(self, layers: tuple[int, ...]) -> None:
        """Raises ValueError unless every stage has an integer number of layers."""
        shown = ",".join(map(str, layers))
        if self.pipeline_parallel_size == 1 or len(layers) != self.pipeline_parallel_size:
            raise ValueError(
                f"pp_layer_partition=[{shown}]: must have one number for each of the "
                f"pipeline_parallel_size={self.pipeline_parallel_size} stages, at least two; set "
                f"pipeline_parallel_size={max(2, len(layers))}, or pp_layer_partition=null for equal stages"
            )
        for number in layers:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"pp_layer_partition=[{shown}]: {number} must be a whole number of layers >= 1, as every "
                    "stage has at least one; set pp_layer_partition=null for equal stages"
                )

    @property
    def cuts_chunks(self) -> bool:
        """True if micro-batches cut the chunk of a prompt; a pipeline's micro-batches do not."""
        return self.pipeline_parallel_size == 1

    @property
    def stage_size(self) -> int:
        """Number of devices that hold the same layers."""
        return self.tensor_parallel_size * self.num_token_groups

    @property
    def num_token_groups(self) -> int:
        """Tensor-parallel groups of a stage, each with its own tokens."""
        return self.context_parallel_size * self.attention_data_parallel_size

    @property
    def num_devices(self) -> int:
        """Number of devices of one replica."""
        return self.stage_size * self.pipeline_parallel_size

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Number of devices that share one expert's matrices."""
        return self.stage_size // self.expert_parallel_size

    @property
    def micro_batches(self) -> int:
        """Maximum number of micro-batches; a batch of fewer sequences leaves some of them empty."""
        return self.num_micro_batches or self.pipeline_parallel_size

    def stage_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers per stage; left-over layers go to the stages before the last one, as in vLLM.

        The last stage has the LM head. 33 layers in 4 stages: 8, 8, 9, 8; 35: 9, 9, 9, 8. An explicit
        partition has precedence.
        """
        if self.pp_layer_partition is not None:
            return self.pp_layer_partition
        each, left = divmod(num_layers, self.pipeline_parallel_size)
        before_last = range(self.pipeline_parallel_size - 1 - left, self.pipeline_parallel_size - 1)
        return tuple(each + (stage in before_last) for stage in range(self.pipeline_parallel_size))

    def stage_share(self, num_layers: int) -> float:
        """Returns the largest share of the model's layers on one stage: 31 of 61 in 2 stages."""
        if self.pp_layer_partition is not None:
            return max(self.pp_layer_partition) / num_layers
        return share_of(num_layers, self.pipeline_parallel_size) / num_layers

    @property
    def num_batch_shares(self) -> int:
        """Attention groups times micro-batches: the parts over which sequences are distributed."""
        return self.attention_data_parallel_size * self.micro_batches

    def nodes_spanned(self, num_ranks: int, device: Device, stride: int = 1) -> int:
        """Returns the nodes spanned by num_ranks devices with this stride, equally many per node.

        With eight per node: 2 ranks 8 apart in 2 nodes, 4 ranks 4 apart in 2, 9 neighbours in 3.
        """
        least = min(num_ranks, divided_up(num_ranks * stride, device.gpus_per_node))
        return next(nodes for nodes in range(least, num_ranks + 1) if num_ranks % nodes == 0)

    def check(self, model: ModelSpec, device: Device) -> None:
        """Raises ValueError if the model or the node does not allow this layout."""
        device.check_reaches(self.tensor_parallel_size)
        model.check_tensor_parallel_size(self.tensor_parallel_size)
        if self.pipeline_parallel_size > model.num_layers:
            raise ValueError(
                f"pipeline_parallel_size={self.pipeline_parallel_size}: must be <= {model.num_layers}, "
                f"the layers of {model.name}"
            )
        partition = self.pp_layer_partition
        if partition is not None and sum(partition) != model.num_layers:
            raise ValueError(
                f"pp_layer_partition=[{','.join(map(str, partition))}]: the sum is {sum(partition)}; must be "
                f"{model.num_layers}, the layers of {model.name}"
            )
        experts = [b.mlp for b in model.blocks if isinstance(b.mlp, MixtureOfExperts)]
        if self.expert_parallel_size > 1 and not experts:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size}: {model.name} has no experts; must be 1"
            )
        for mlp in experts:
            if mlp.num_experts % self.expert_parallel_size:
                divisors = [n for n in range(1, mlp.num_experts + 1) if mlp.num_experts % n == 0]
                nearest = min(divisors, key=lambda n: abs(n - self.expert_parallel_size))
                raise ValueError(
                    f"expert_parallel_size={self.expert_parallel_size}: must divide the {mlp.num_experts} "
                    f"experts of {model.name}; nearest: {nearest}"
                )
        if self.num_devices > device.gpus_per_node and device.inter_node is None:
            raise ValueError(
                f"{self.num_devices} devices per replica: must be <= {device.gpus_per_node}, one node, as "
                f"{device.name} has no link between nodes (inter_node)"
            )

    def rank_batch(self, shape: IterationShape) -> RankBatch:
        """Returns the most loaded device's share of an iteration, or of each of its micro-batches."""
        shares = self.attention_data_parallel_size * self.context_parallel_size
        if shares * (self.num_micro_batches or self.pipeline_parallel_size) == 1:
            decodes, context, chunks, new, pairs, prefill_context, rows, adapters, drafts, _ = shape
            drafted, draft_pairs = (0, 0) if drafts is None else drafts[:2]
            tokens = decodes + new + drafted
            of_chunks = chunks, new, pairs, prefill_context
            others = *(adapters or NO_ADAPTERS), drafted, draft_pairs
            return RankBatch._make((tokens, tokens, rows, decodes, context, *of_chunks, *others))
        batch = self._rows_and_chunks(shape)
        return batch if shape.drafts is None else self._with_drafts(batch, shape, shape.drafts)

    def _with_drafts(self, batch: RankBatch, shape: IterationShape, drafts: DraftWork) -> RankBatch:
        """Returns a device's share with draft tokens, which are distributed with their sequences."""
        decodes = shape.decode_seqs
        own, own_pairs = drafts.tokens, drafts.pairs
        if self.num_batch_shares > 1:
            some = larger(decodes, 1)
            own = divided_up(own * batch.decode_seqs, some)
            own_pairs = own_pairs * batch.decode_seqs / some
        drafted = divided_up(shape.totals.draft_tokens, self.micro_batches)
        if self.attention_data_parallel_padding:
            drafted = larger(drafted, self.attention_data_parallel_size * own)
        return batch._replace(
            tokens=batch.tokens + own,
            all_tokens=batch.all_tokens + drafted,
            draft_tokens=own,
            draft_pairs=own_pairs / self.context_parallel_size,
        )

    def _rows_and_chunks(self, shape: IterationShape) -> RankBatch:
        """Computes `rank_batch` without draft tokens, if several devices share them."""
        decodes, context, chunks, new, pairs, prefill_context, rows, adapters, *_ = shape
        shares, ring = self.num_batch_shares, self.context_parallel_size
        # Products before quotients: equal shares of sequences are exact, so rounding lowers no price.
        own_decodes = divided_up(decodes, shares)
        some_chunks = larger(chunks, 1)
        group_chunks = divided_up(chunks, self.attention_data_parallel_size)
        group_new = new * group_chunks / some_chunks
        group_pairs = pairs * group_chunks / some_chunks
        passing = self._passing_at_once(group_new, group_chunks)
        own_new = divided_up(passing, ring)
        # Each chunk has at least one token; the context counts the chunks on this device.
        own_chunks = smaller(divided_up(group_chunks, self.micro_batches), own_new)
        passing_pairs = smaller(group_pairs * passing / larger(group_new, 1), group_pairs)
        with_adapters: tuple[Any, ...] = ()
        if adapters is not None:  # adapters are spread over the tokens; a share may use all adapters
            share = smaller((own_decodes + own_new) / larger(decodes + new, 1), 1)
            work = adapters.tokens * share, adapters.rank_tokens * share
            with_adapters = (adapters.adapters, *work, adapters.ranks)
        totals = shape.totals
        all_tokens = divided_up(totals.decode_seqs, self.micro_batches) + self._passing_at_once(
            totals.prefill_tokens, totals.prefill_seqs, self.attention_data_parallel_size
        )
        if self.attention_data_parallel_padding:
            all_tokens = larger(all_tokens, self.attention_data_parallel_size * (own_decodes + passing))
        batch = RankBatch(
            tokens=own_decodes + own_new,
            all_tokens=all_tokens,
            rows=divided_up(rows, shares),
            decode_seqs=own_decodes,
            decode_context_tokens=context * own_decodes / larger(decodes, 1) / ring,
            prefill_seqs=own_chunks,
            prefill_tokens=own_new,
            prefill_pairs=passing_pairs / ring,
            prefill_context_tokens=prefill_context * own_chunks / some_chunks,
        )
        return batch if adapters is None else RankBatch(*batch[:9], *with_adapters)

    def in_flight(self, shape: IterationShape) -> InFlight:
        """Returns the numbers of micro-batches of an iteration, none of them empty."""
        decodes, _, chunks, new, *_ = shape
        groups = self.attention_data_parallel_size
        decoding = smaller(divided_up(decodes, groups), self.micro_batches)
        group_new = new * divided_up(chunks, groups) / larger(chunks, 1)
        passing = larger(self._passing_at_once(group_new, divided_up(chunks, groups)), 1)
        prefilling = smaller(divided_up(group_new, passing), self.micro_batches)
        with_chunk = smaller(prefilling, 1)
        full = prefilling + decoding * (1 - with_chunk)
        return InFlight(full, larger(decoding - prefilling, 0) * with_chunk)

    def without_chunks(self, shape: IterationShape, batch: RankBatch) -> RankBatch:
        """Returns the most loaded device's share of a decode-only micro-batch; batch: of one with a chunk."""
        totals = shape.totals
        all_tokens = divided_up(totals.decode_seqs + totals.draft_tokens, self.micro_batches)
        decodes, context, drafts = batch.decode_seqs, batch.decode_context_tokens, batch.draft_tokens
        if self.attention_data_parallel_padding:
            all_tokens = larger(all_tokens, self.attention_data_parallel_size * (decodes + drafts))
        light = RankBatch(decodes + drafts, all_tokens, decodes + drafts, decodes, context, 0, 0, 0, 0)
        return light._replace(draft_tokens=drafts, draft_pairs=batch.draft_pairs)

    def _passing_at_once(self, new: Num, chunks: Num, groups: int = 1) -> Any:
        """Returns the new tokens of the largest micro-batch, for equal chunks in `groups` attention groups.

        In a pipeline chunks are not split: 4 chunks in 4 micro-batches are one each; 5 chunks put two in the
        largest. Otherwise it is an equal share, but a piece of a chunk has at least `SMALLEST_PIECE` tokens,
        so a longer chunk or an additional chunk is never cheaper. With 4 micro-batches: 100 of a chunk of 100
        tokens, 256 of 600, 500 of 2,000.
        """
        if not self.cuts_chunks:
            at_once = larger(divided_up(chunks, self.micro_batches), smaller(chunks, groups))
            return divided_up(new * at_once, larger(chunks, 1))
        share = divided_up(new, self.micro_batches)
        if self.micro_batches == 1:
            return share
        piece = smaller(divided_up(new, larger(chunks, 1)), SMALLEST_PIECE) * smaller(chunks, groups)
        return larger(share, smaller(piece, new))


def within_window(batch: RankBatch, window: int | None) -> RankBatch:
    """Returns the batch with contexts and pairs cut to the last `window` tokens, including the query's own.

    A batch holds only sums, so its sequences (and its chunks) are assumed to be equal. That is exact if all
    contexts are longer than the window, or all shorter; a mixture is counted up to a few percent too high.
    """
    if window is None:
        return batch
    return batch._replace(
        decode_context_tokens=smaller(batch.decode_context_tokens, window * batch.decode_seqs),
        prefill_pairs=_pairs(batch, window),
        prefill_context_tokens=smaller(
            batch.prefill_context_tokens, batch.prefill_tokens + window * batch.prefill_seqs
        ),
    )


def seen(
    num_seqs: Any, context_tokens: Any, draft_tokens: Any, draft_pairs: Any, window: int | None
) -> tuple[Any, Any]:
    """Returns the KV tokens that decodes read, each once, and their query-key pairs, with draft tokens."""
    if window is not None:
        context_tokens = smaller(context_tokens, window * num_seqs)
        draft_pairs = smaller(draft_pairs, window * draft_tokens)
    return context_tokens + draft_tokens, context_tokens + draft_pairs


def decode_keys(batch: RankBatch, window: int | None = None) -> Any:
    """Returns the KV tokens that the decodes of a batch read: see `seen`."""
    return _seen(batch, window)[0]


def decode_pairs(batch: RankBatch, window: int | None = None) -> Any:
    """Returns the query-key pairs of the decodes of a batch: see `seen`."""
    return _seen(batch, window)[1]


def _seen(batch: RankBatch, window: int | None) -> tuple[Any, Any]:
    decodes, context = batch.decode_seqs, batch.decode_context_tokens
    return seen(decodes, context, batch.draft_tokens, batch.draft_pairs, window)


def _pairs(batch: RankBatch, window: int) -> Any:
    """Returns the pairs of n new tokens on c cached ones; query i = 1, 2, ... sees min(c + i, w) tokens.

    r = min(n, max(w - c, 0)) queries see all tokens; r c + r (r + 1) / 2 + (n - r) w.
    n = 4, c = 2, w = 3: r = 1: 3 + 3 x 3 = 12. The result never exceeds the pairs without a window.
    """
    chunks = larger(batch.prefill_seqs, 1)
    new = batch.prefill_tokens / chunks
    cached = larger(batch.prefill_context_tokens / chunks - new, 0.0)
    rising = smaller(new, larger(window - cached, 0.0))
    pairs = rising * cached + rising * (rising + 1) / 2 + (new - rising) * window
    return smaller(chunks * pairs, batch.prefill_pairs)


class Part(Enum):
    """Position of an operator in the model, which determines its pipeline stage."""

    first = "before all layers"
    layers = "in a layer"
    between = "from a stage to the next"
    last = "after all layers"


Seconds = NDArray[np.float64]


class Round(NamedTuple):
    """Times of every stage and micro-batch of a round, shape [stages, micro-batches]."""

    start_s: Seconds
    end_s: Seconds
    """End of the stage's own work."""
    sent_s: Seconds
    """Time at which the next stage has the output and this stage is free; on the last stage, end_s."""

    @property
    def busy_s(self) -> float:
        """Total busy time of all stages, including sends."""
        return float((self.sent_s - self.start_s).sum())


class Pipeline:
    """Pipeline stages with the time until which each is busy.

    waits_for_tokens=False: a micro-batch may enter before the last round's micro-batch has returned.

    Each stage works on each micro-batch at these times:

        stage 1  |0|1|2|3|0|1|2|3|        rounds of 4 micro-batches in 3 equal stages: the first of a round
        stage 2 |0|1|2|3|0|1|2|3| may begin when that of the last round has left the last stage stage 3
        |0|1|2|3|0|1|2|3|

    From an empty pipeline to an empty one, (stages - 1) of (micro-batches + stages - 1) slots are bubbles in
    one round (GPipe, Huang et al., NeurIPS 2019). In consecutive rounds, bubbles arise only from unequal
    stages, or from fewer micro-batches than stages. A stage processes batches in order; it is busy until it
    has sent its output. The simulator's engine calls `enter` per batch; tests and timelines call `play` per
    round. `Stages` is the closed form of a round.
    """

    def __init__(self, num_stages: int, *, waits_for_tokens: bool = True) -> None:
        self._waits_for_tokens = waits_for_tokens
        self._free_s = [0.0] * num_stages
        self._back_s: list[float] = []  # ends of the last round's micro-batches
        self._host_free_s = 0.0  # end of the engine's work on the last batch

    def enter(self, batch: Pass, now: float, factor: float = 1.0) -> float:
        """Returns the time at which a batch planned now has its tokens; it follows earlier batches.

        factor: multiplies all times of the batch.
        """
        begin_s = max(now, self._host_free_s)
        host_end_s = begin_s + factor * batch.host_s
        exposed_s = batch.exposed_s
        here_s = host_end_s if exposed_s is None else begin_s
        self._host_free_s = host_end_s
        send_s, free_s = factor * batch.send_s, self._free_s
        for stage, stage_s in enumerate(batch.stage_s):
            end_s = max(here_s, free_s[stage]) + factor * stage_s
            free_s[stage] = here_s = end_s + send_s
        free_s[-1] = end_s
        if exposed_s is None:
            return end_s
        self._host_free_s = host_end_s + factor * batch.launch_s
        return max(end_s, self._host_free_s) + factor * exposed_s

    def play(self, stage_s: ArrayLike, send_s: ArrayLike = 0.0, not_before_s: float = 0.0) -> Round:
        """Runs the next round. stage_s: [stages, micro-batches]; send_s: per micro-batch, or one for all.

        Micro-batch m enters when the last round's micro-batch m has returned, but not before not_before_s.
        """
        work_s = np.asarray(stage_s, dtype=np.float64)
        num_stages, count = work_s.shape
        sends_s = np.broadcast_to(np.asarray(send_s, dtype=np.float64), count)
        start_s, end_s, sent_s = (np.empty((num_stages, count)) for _ in range(3))
        last = num_stages - 1
        for m in range(count):
            here_s = max(not_before_s, self._back_s[m] if m < len(self._back_s) else 0.0)
            for stage in range(num_stages):
                start_s[stage, m] = max(here_s, self._free_s[stage])
                end_s[stage, m] = start_s[stage, m] + work_s[stage, m]
                here_s = end_s[stage, m] + (0.0 if stage == last else sends_s[m])
                sent_s[stage, m] = self._free_s[stage] = here_s
        if self._waits_for_tokens:
            self._back_s = end_s[last].tolist()
        return Round(start_s, end_s, sent_s)


def bubble_share(rounds: Sequence[Round]) -> float:
    """Returns the idle share of all stages' time from the first start to the last end."""
    num_stages = len(rounds[0].start_s)
    span_s = max(float(r.sent_s.max()) for r in rounds) - min(float(r.start_s.min()) for r in rounds)
    return 1 - sum(r.busy_s for r in rounds) / (num_stages * span_s)


class MicroBatch(NamedTuple):
    """Seconds of a micro-batch on all stages in total, and of the parts that only some stages have."""

    all_s: Any
    first_s: Any
    between_s: Any
    last_s: Any

    @property
    def layers_s(self) -> Any:
        return self.all_s - self.first_s - self.between_s - self.last_s


class Pass(NamedTuple):
    """Times of one batch that passes the stages, in seconds."""

    host_s: float
    """Work of the engine's process before the batch enters the first stage, one batch after the other."""
    stage_s: list[float]
    """Time of each stage, kernels or their launches, whichever takes longer."""
    send_s: float
    """Time of the send to the next stage; both are busy with it."""
    launch_s: float
    """Time in which all stages launch their kernels."""
    exposed_s: float | None
    """None: the first stage waits for the engine's process. Otherwise both work at once (asynchronous
    scheduling), and the tokens follow this long after the later of the two.
    """


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's share of the layers, of the operators before and after them, and of the sends."""

    layers: float
    first: int
    between: float
    last: int

    def seconds(self, batch: MicroBatch) -> Any:
        """Returns the seconds of one micro-batch on this stage."""
        return (
            self.layers * batch.layers_s
            + self.first * batch.first_s
            + self.between * batch.between_s
            + self.last * batch.last_s
        )

    def share(self, part: Part) -> float:
        """Returns this stage's share of an operator in a part of the model."""
        return {
            Part.first: self.first,
            Part.layers: self.layers,
            Part.between: self.between,
            Part.last: self.last,
        }[part]


class Stages:
    """Stages of a layout, and the time of a round on them.

    A batch passes all stages one after the other: its time is the sum over the stages and the sends between
    them. Another batch may follow as soon as the first stage is free, so a full pipeline takes the time of
    the slowest stage per batch. The scheduler's batches are not cut further, so a single prompt overlaps with
    nothing, and m batches from an empty pipeline of p equal stages gain at most a factor of m p / (m + p -
    1).

    A round of batches that repeats takes max(one batch on all stages, all batches on the slowest stage); a
    `Pass` is one batch, for several batches in flight (`sim.engine.iteration_times`). Rounds serve for
    steady-state estimates, and for work without batches in flight (drafts): sequences are divided over as
    many micro-batches as there are stages; chunks of prompts are not split. `Pipeline` plays both exactly,
    and a test compares them. A stage's time includes its layers (of average size), the embedding on the first
    stage, the LM head, sampling and drafts on the last, and sending its output. 8 stages of Llama-3.1-8B: 4
    layers of 218 M weights each, and on the last stage an LM head of 525 M, for which all others wait.

    Not modelled: micro-batches of different sizes in a round delay each other (played exactly, a loaded run
    takes 2 % longer in 2 stages, 0.7 % in 4 stages).
    """

    def __init__(self, layout: ParallelLayout, num_layers: int) -> None:
        count = layout.pipeline_parallel_size
        self.all = tuple(
            Stage(
                layers / num_layers,
                int(index == 0),
                0.0 if index == count - 1 else 1 / (count - 1),
                int(index == count - 1),
            )
            for index, layers in enumerate(layout.stage_layers(num_layers))
        )
        self._silent = [replace(stage, between=0.0) for stage in self.all]
        self.slowest = _undominated(self.all)
        """The stages that may be the slowest, depending on the batch."""

    def seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> Any:
        """Returns the seconds of a round; batch: a full micro-batch; light: a decode-only one."""
        longest = batch.all_s
        for stage_s in self.stage_seconds(batch, in_flight, light):
            longest = larger(longest, stage_s)
        return longest

    def stage_seconds(self, batch: MicroBatch, in_flight: InFlight, light: MicroBatch) -> list[Any]:
        """Returns the seconds of all micro-batches on each stage in `slowest`."""
        return [
            in_flight.full * stage.seconds(batch) + in_flight.light * stage.seconds(light)
            for stage in self.slowest
        ]

    def one(self, batch: MicroBatch) -> tuple[list[Any], Any]:
        """Returns the seconds of one batch on each stage without sends, and of a send."""
        return [stage.seconds(batch) for stage in self._silent], batch.between_s / max(len(self.all) - 1, 1)

    def to_play(self, full: MicroBatch, count: InFlight, light: MicroBatch) -> tuple[Seconds, Seconds]:
        """Returns the arguments of `Pipeline.play`: seconds [stages, micro-batches], and of sends."""
        columns = [full] * int(count.full) + [light] * int(count.light)
        times = [self.one(column) for column in columns]
        return np.array([stage_s for stage_s, _ in times], float).T, np.array([send_s for _, send_s in times])


def _undominated(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Removes stages that have no larger share of any part than another stage."""
    kept: list[Stage] = []
    for stage in dict.fromkeys(stages):
        if not any(_at_most(stage, other) for other in stages if other != stage):
            kept.append(stage)
    return tuple(kept)


def _at_most(stage: Stage, other: Stage) -> bool:
    return all(stage.share(part) <= other.share(part) for part in Part)
