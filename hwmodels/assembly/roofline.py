"""Iterations priced operator by operator: levels `spec` and `calibrated`, which differ only in parameters.

Roofline: Williams, Waterman, Patterson, CACM 2009, with curves for the share of it that kernels reach:

    operator    hwmodels/operators: the larger of compute and memory time at the shares that its shape
                reaches, and the start of its kernels; collectives by message size and algorithm
    gpu         sum over operators, tokens padded to the captured size where a CUDA graph replays;
                micro-batches: see `Stages`
    iteration   see `HostOverhead`

Every time is computed once, with arithmetic that is bit-identical for numbers and arrays (`hwmodels.exact`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from hwmodels.assembly import Inputs, iteration_operators, offloaded, over_chips
from hwmodels.assembly.site import AddedByAdapters, Kernels, Site
from hwmodels.device import Device
from hwmodels.exact import Num, larger, whole
from hwmodels.host import CudaGraphs, HostOverhead, HostShare, Offload
from hwmodels.iterations import COMPONENTS, DraftWork, Explained, IterationShape
from hwmodels.iterations.decodes import ByContext, DecodeBatch, Decodes, OneByOne, Prices, ends_of, seconds_of
from hwmodels.iterations.layout import InFlight, MicroBatch, ParallelLayout, Part, Pass, RankBatch, Stages
from hwmodels.iterations.ops import CountedTimes, Operator, Per, bound_of, rows_each, total_seconds
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Lora, Role
from hwmodels.operators import Calibration

FEW_ITERATIONS = 16
"""Maximum number of iterations of shared batches priced one by one: an array takes as long as 20 numbers."""

MOST_BATCHES = 50_000
"""Number of cached decode batches, by numbers of sequences, draft tokens and sampled rows; a policy with
varying draft lengths has many.
"""

NO_MICRO_BATCH = MicroBatch(0.0, 0.0, 0.0, 0.0)


class Computed(NamedTuple):
    """The work and the GPU time of one device in an iteration, or in each micro-batch; numbers or arrays."""

    own: RankBatch
    replays: Any
    """Whether a CUDA graph runs the whole iteration."""
    tokens: Any
    """Tokens that are computed: the captured size if a graph replays."""
    rows: Any
    gpu_s: Any
    decodes_s: Any
    """The part of gpu_s that depends on the contexts of decodes."""
    adapter_kernels: Any
    """Launches of adapter kernels, as the equivalent number of other kernels' launches."""


class Passing(NamedTuple):
    """A batch on the critical path, and the number of runs of each model part's operators for it."""

    batch: RankBatch
    times: dict[Part, Any]


class Roofline:
    """An `IterationModel` of one replica: a model on the devices of a layout.

    `seconds` is called millions of times in a simulation. Times that depend only on the numbers of tokens and
    sampled rows are looked up, as are decode times that depend on numbers of sequences. `breakdown` and
    `explain` go operator by operator.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        device: Device,
        layout: ParallelLayout | None = None,
        calibration: Calibration | None = None,
        host: HostOverhead | None = None,
        cuda_graphs: CudaGraphs | None = None,
        kernels: Kernels | None = None,
        lora: Lora | None = None,
        inputs: Inputs | None = None,
        offload: Offload | None = None,
    ) -> None:
        """Builds it; inputs: returns the matrices applied to all tokens before the first layer.

        offload: weights in host memory; None: none.
        """
        self.layout = layout or ParallelLayout()
        self.layout.check(model, device)
        self.model = replace(model, dtype=device.compute_dtype(model.dtype))
        self.device = device
        self.calibration = calibration or Calibration()
        calibration = self.calibration.on(device)
        self.site = site = Site(
            model=self.model,
            device=calibration.under_load(device),
            layout=self.layout,
            calibration=calibration.in_a_stream(),
            kernels=kernels or Kernels(),
        )
        host = host or HostOverhead()
        self._adapters = AddedByAdapters(site, host.launch_s, lora)
        self._whole_adapters = AddedByAdapters(replace(site, layout=ParallelLayout()))
        self.operators = iteration_operators(site, inputs)
        if device.chain is not None:
            self.operators = over_chips(self.operators, site, device.chain)
        if offload is not None and offload.is_used:
            self.operators = offloaded(self.operators, site, offload)
        self._whole_model = iteration_operators(replace(site, layout=ParallelLayout()), inputs)
        weights, _ = site.stored(Role.dense)
        self.compute_dtype = weights.compute_dtype(device, self.model.dtype)
        num_devices = self.layout.num_devices
        self.peak_flops_per_s = num_devices * device.peak_flops_per_s[self.compute_dtype]
        self.peak_bytes_per_s = num_devices * device.memory_bandwidth_bytes_per_s

        self._counted = CountedTimes(self.operators, self.layout)
        self._decodes = Decodes(op for op in self.operators if op.per is Per.decode)
        self._prefill_ops = [op for op in self.operators if op.per is Per.prefill]
        # Every stage launches its own kernels, for each of its micro-batches.
        most_layers = self.layout.micro_batches * self.layout.stage_share(self.model.num_layers)
        num_kernels = max(1.0, most_layers) * sum(
            op.calls * host.launches(op.name, op.kernels) for op in self.operators
        )
        mixed_kernels = most_layers * sum(op.calls * op.mixed_kernels for op in self.operators)
        attentions = sum(
            op.calls
            for op in self.operators
            if op.per is Per.decode and op.kernels and op.component != "communication"
        )
        self._host = HostShare(
            host,
            cuda_graphs or CudaGraphs(),
            num_kernels,
            mixed_kernels=mixed_kernels,
            attentions=most_layers * attentions,
        )
        is_shared = self.layout.num_batch_shares > 1 or self.layout.context_parallel_size > 1
        self._is_whole = not (is_shared or self._adapters.in_every_batch)
        """False if several devices, or micro-batches, share each batch, or if all batches have adapters."""
        self._decode_batches: dict[tuple[Any, Any, Any], DecodeBatch] = {}
        self._prompt_bounds: dict[tuple[Any, bool], tuple[float, float]] = {}
        self._leaps: dict[int, Prices] = {}
        self.stages = Stages(self.layout, self.model.num_layers) if self.layout.micro_batches > 1 else None
        """None if an iteration is a single batch that passes all stages once."""
        if self.stages is not None:
            self._one_batch = replace(self.layout, num_micro_batches=1)
            self._stage_kernels = [
                (
                    sum(
                        op.calls * host.launches(op.name, op.kernels) * stage.share(op.part)
                        for op in self.operators
                    ),
                    sum(op.calls * op.mixed_kernels * stage.share(op.part) for op in self.operators),
                    stage.layers,
                )
                for stage in self.stages.all
            ]

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        shape = self._adapters.of(shape)
        decodes, context, chunks, new, _, _, sampled, adapters, drafts, ranks = shape
        if adapters is None and ranks is None and self._is_whole:
            tokens, pairs = (0, 0) if drafts is None else drafts[:2]
            if type(decodes) is type(new) is type(tokens) is type(sampled) is int:
                if not new:
                    return self._decode_batch(decodes, tokens, sampled).seconds(context, pairs)
                if type(pairs) is not ndarray and ndarray not in map(type, shape):
                    return self._prompt_seconds(shape, tokens, pairs)
        work = self._computed(shape, self.layout)
        gpu_s, totals = work.gpu_s, shape if ranks is None else ranks
        if self.stages is not None:
            gpu_s = self.stages.seconds(*self._micro_batches(shape, work))
        more_kernels = self._host.mixed_kernels(decodes, chunks) + work.adapter_kernels
        num_seqs = totals.decode_seqs + totals.prefill_seqs
        return self._host.wall_seconds(gpu_s, work.replays, num_seqs, more_kernels)

    def pass_seconds(self, num_seqs: int, context_tokens: Any, tokens: int, pairs: Any, rows: int) -> Any:
        """Returns `seconds` of num_seqs decodes with draft tokens; contexts and pairs may be arrays."""
        if self._is_whole:
            return self._decode_batch(num_seqs, tokens, rows).seconds(context_tokens, pairs)
        drafts = DraftWork(tokens, pairs, 0, 0, 0)
        return self.seconds(IterationShape(num_seqs, context_tokens, 0, 0, 0, 0, rows, None, drafts))

    def equal_passes(self, num_seqs: int, tokens: int, rows: int, most_pairs: float) -> ByContext | None:
        """Returns the prices of passes by context, where at most most_pairs rows attend to each key.

        None: they depend on more than contexts, or devices share the batch.
        """
        if not self._is_whole:
            return None
        return self._decode_batch(num_seqs, tokens, rows).by_context(most_pairs)

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        last = num_context_tokens + num_seqs * num_iterations
        prices = self._leaps.get(num_seqs) or self._decodes_by_context(num_seqs)
        return ends_of(prices, start_s, range(num_context_tokens, last, num_seqs))

    def round(self, shape: IterationShape) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the largest micro-batch, the counts, and a decode-only micro-batch; times in GPU seconds.

        For arrays, of each iteration. Without micro-batches, the whole batch is the only one.
        """
        shape = self._adapters.of(shape)
        work = self._computed(shape, self.layout)
        if self.stages is None:
            return MicroBatch(work.gpu_s, 0.0, 0.0, 0.0), InFlight(1, 0), NO_MICRO_BATCH
        return self._micro_batches(shape, work)

    def one_batch(self, shape: IterationShape) -> MicroBatch:
        """Returns the GPU seconds of an iteration that passes the stages as one batch; also arrays."""
        shape = self._adapters.of(shape)
        return self._micro_batch(self._computed(shape, self._one_batch))

    def stage_times(self, shape: IterationShape) -> Pass:
        """Returns the times of an iteration that passes the stages as one batch. The counts are numbers."""
        assert self.stages is not None
        shape = self._adapters.of(shape)
        work = self._computed(shape, self._one_batch)
        is_mixed, totals = bool(shape.decode_seqs and shape.prefill_seqs), shape.totals
        launches_s = self._host.stage_launch_seconds(
            work.replays,
            [
                kernels + mixed * is_mixed + work.adapter_kernels * layers
                for kernels, mixed, layers in self._stage_kernels
            ],
        )
        stage_s, send_s = self.stages.one(self._micro_batch(work))
        return Pass(
            self._host.engine_seconds(totals.decode_seqs + totals.prefill_seqs),
            [max(own_s, launch_s) for own_s, launch_s in zip(stage_s, launches_s, strict=True)],
            send_s,
            sum(launches_s),
            self._host.exposed_s,
        )

    def _computed(self, shape: IterationShape, layout: ParallelLayout) -> Computed:
        """Returns the work of a device of a layout; the shape includes the adapters of every batch."""
        own, replays, tokens = self._padded(shape, layout)
        rows, decodes_s = whole(own.rows), self._decodes.seconds(own)
        gpu_s = self._counted.of(tokens, whole(own.all_tokens), rows) + decodes_s
        gpu_s = gpu_s + total_seconds(self._prefill_ops, own)
        adapter_kernels = 0.0
        if shape.adapters is not None:
            adapters_s, adapter_kernels = self._adapters.seconds(own)
            gpu_s = gpu_s + adapters_s
        return Computed(own, replays, tokens, rows, gpu_s, decodes_s, adapter_kernels)

    def _prompt_seconds(self, shape: Any, draft_tokens: int, draft_pairs: Any) -> float:
        """Computes `seconds` of chunks and decodes on one device, without CUDA graphs or padding.

        It takes half the time of `_computed`. A device's share of a whole batch is the batch.
        """
        decodes, context, chunks, new, _, _, sampled, *_ = shape
        gpu_s: float = self._counted.of(decodes + draft_tokens + new, 0, sampled)
        if decodes:
            parts = self._decodes.parts(decodes, rows_each(decodes, draft_tokens))
            gpu_s += seconds_of(parts, decodes, context, draft_tokens, draft_pairs)
        gpu_s += total_seconds(self._prefill_ops, shape)
        key = decodes + chunks, decodes > 0
        if key not in self._prompt_bounds:
            more_kernels = self._host.mixed_kernels(int(key[1]), 1)
            self._prompt_bounds[key] = self._host.bounds(False, key[0], more_kernels)
        floor_s, added_s = self._prompt_bounds[key]
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def _padded(self, shape: IterationShape, layout: ParallelLayout) -> tuple[RankBatch, Any, Any]:
        """Returns a device's batch, whether a CUDA graph replays, and the tokens that are computed."""
        own = layout.rank_batch(shape)
        tokens = whole(own.tokens)
        replays = self._host.replays(tokens, shape.prefill_tokens)
        if shape.adapters is not None and not self._adapters.captured:
            replays = replays & (shape.adapters.adapters == 0)
        each = rows_each(own.decode_seqs, own.draft_tokens)
        return own, replays, self._host.computed_tokens(tokens, replays, each)

    def _micro_batch(self, work: Computed) -> MicroBatch:
        return MicroBatch(work.gpu_s, *self._counted.ends(work.tokens, work.rows))

    def _micro_batches(
        self, shape: IterationShape, work: Computed
    ) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the largest micro-batch, the counts, and a micro-batch without a piece of a chunk."""
        batch, in_flight = self._micro_batch(work), self.layout.in_flight(shape)
        if not isinstance(in_flight.light, ndarray) and not in_flight.light:
            return batch, in_flight, NO_MICRO_BATCH
        light = self.layout.without_chunks(shape, work.own)
        tokens = whole(light.tokens)
        gpu_s = self._counted.of(tokens, whole(light.all_tokens), tokens) + work.decodes_s
        return batch, in_flight, MicroBatch(gpu_s, *self._counted.ends(tokens, tokens))

    def _decode_batch(self, num_seqs: int, tokens: int, rows: int) -> DecodeBatch:
        """Returns the prices of decodes on one device, with this many draft tokens and sampled rows."""
        key = num_seqs, tokens, rows
        if known := self._decode_batches.get(key):
            return known
        each, computed = rows_each(num_seqs, tokens), num_seqs + tokens
        replays = self._host.replays(computed, 0)
        counted_s = self._counted.of(self._host.computed_tokens(computed, replays, each), 0, rows)
        if len(self._decode_batches) >= MOST_BATCHES:
            self._decode_batches.clear()
        bounds, parts = self._host.bounds(replays, num_seqs), self._decodes.parts(num_seqs, each)
        batch = self._decode_batches[key] = DecodeBatch(counted_s, *bounds, num_seqs, tokens, parts)
        return batch

    def _decodes_by_context(self, num_seqs: int) -> Prices:
        """Returns the prices of decode-only iterations of this many sequences."""
        prices: Prices | None = self.equal_passes(num_seqs, 0, num_seqs, 1)
        if prices is None:
            prices = OneByOne(
                lambda contexts: self.seconds(IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs)),
                few=FEW_ITERATIONS,
            )
        self._leaps[num_seqs] = prices
        return prices

    def operator_seconds(self, shape: IterationShape) -> list[tuple[Operator, Num]]:
        """Returns GPU seconds of every operator over all its calls; they sum to the iteration's GPU seconds.

        In a pipeline: one micro-batch on all stages, or all micro-batches on the slowest stage, whichever
        takes longer.
        """
        shape = self._adapters.of(shape)
        parts = self._critical_path(shape)
        return [(op, total_of(op, parts, partial(call_seconds, op))) for op in self._operators_of(shape)]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; `launch` and `host`: waits for launches and for other host work."""
        shape = self._adapters.of(shape)
        zeros = np.zeros(np.broadcast(*shape.counts, *(shape.drafts or ())).shape)[()]
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, zeros)
        for op, seconds in self.operator_seconds(shape):
            parts[op.component] = parts[op.component] + seconds
        batch, replays, _ = self._padded(shape, self.layout)
        num_seqs = shape.decode_seqs + shape.prefill_seqs
        more_kernels = self._host.mixed_kernels(shape.decode_seqs, shape.prefill_seqs)
        if shape.adapters is not None:
            more_kernels = more_kernels + self._adapters.seconds(batch)[1]
        gpu_s = sum(parts.values())
        parts["launch"], parts["host"] = self._host.parts(gpu_s, replays, num_seqs, more_kernels)
        return parts

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration with their time and their bound, the longest first.

        An operator is bound by the larger of its data-sheet times, or by launches if it takes less than
        15 us per kernel and that data-sheet time is less than a quarter of it. Pipelines: `operator_seconds`.
        """
        shape = self._adapters.of(shape)
        path = self._critical_path(shape)
        fullest = path[0].batch
        total_s = float(self.seconds(shape))
        lines: dict[str, Explained] = {}
        for op in self._operators_of(shape):
            seconds = float(total_of(op, path, partial(call_seconds, op)))
            if seconds == 0:
                continue
            calls = op.calls * sum(float(passing.times[op.part]) for passing in path)
            bound = bound_of(
                op, self.device, float(op.flops(fullest)), float(op.bytes_moved(fullest)), seconds / calls
            )
            old = lines.get(op.name, Explained(op.name, op.component, 0.0, 0.0, bound, 0.0, 0.0, 0.0))
            lines[op.name] = old._replace(
                seconds=old.seconds + seconds,
                share=old.share + seconds / total_s,
                flops=old.flops + float(total_of(op, path, op.flops)),
                bytes_moved=old.bytes_moved + float(total_of(op, path, op.bytes_moved)),
                calls=old.calls + calls,
            )
        waits = total_s - sum(line.seconds for line in lines.values())
        lines["host"] = Explained("host and launches", "host", waits, waits / total_s, "host", 0.0, 0.0, 0.0)
        return sorted(lines.values(), key=lambda line: -line.seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs; see `IterationModel`.

        2 per weight and token, 4 heads head_dim per query-key pair and layer; the LM head on sampled rows.
        """
        shape = self._adapters.of(shape)
        return whole_total(self._whole_operators_of(shape), "flops", shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of the matrices applied to tokens, and of KV and states."""
        shape = self._adapters.of(shape)
        return whole_total(self._whole_operators_of(shape), "stored_bytes", shape)

    def _operators_of(self, shape: IterationShape) -> list[Operator]:
        """Returns the operators of an iteration on one device, including its adapters."""
        return self.operators if shape.adapters is None else [*self.operators, *self._adapters.operators]

    def _whole_operators_of(self, shape: IterationShape) -> list[Operator]:
        """Returns the operators of an iteration of the undivided model, including its adapters."""
        if shape.adapters is None:
            return self._whole_model
        return [*self._whole_model, *self._whole_adapters.operators]

    def _critical_path(self, shape: IterationShape) -> list[Passing]:
        """Returns the batches on the critical path, each with the number of runs of each part's operators."""
        own, _, tokens = self._padded(shape, self.layout)
        together = self._counted.any_tokens_s is None
        batch = own._replace(tokens=tokens, all_tokens=tokens if together else own.all_tokens)
        if self.stages is None:
            return [Passing(batch, dict.fromkeys(Part, 1.0))]
        full, in_flight, light = self.round(shape)
        ways = [full.all_s, *self.stages.stage_seconds(full, in_flight, light)]
        longest = np.argmax(np.stack(np.broadcast_arrays(*ways)), axis=0)
        sizes = np.broadcast(*shape.counts, *(shape.drafts or ())).shape
        times = []
        for count, passes in ((in_flight.full, 1.0), (in_flight.light, 0.0)):
            by_part = {
                part: np.choose(
                    longest, [passes, *(count * stage.share(part) for stage in self.stages.slowest)]
                )
                for part in Part
            }
            times.append({part: by_part[part].reshape(sizes)[()] for part in Part})
        decoding = self.layout.without_chunks(shape, batch)
        # A missing micro-batch runs zero times, but expert times are undefined for 0 tokens.
        decoding = decoding._replace(all_tokens=larger(decoding.all_tokens, 1))
        return [Passing(batch, times[0]), Passing(decoding, times[1])]


def call_seconds(op: Operator, batch: RankBatch) -> Any:
    """Returns seconds of one call; 0 for the LM head and what follows it if no row is sampled."""
    seconds = op.seconds(batch)
    return seconds * np.minimum(batch.rows, 1) if op.per is Per.row else seconds


def total_of(op: Operator, path: Iterable[Passing], quantity: Callable[[RankBatch], Any]) -> Any:
    """Sums a quantity of one call over all calls on the critical path."""
    first, *others = (op.calls * passing.times[op.part] * quantity(passing.batch) for passing in path)
    return sum(others, start=first)


def whole_total(operators: list[Operator], quantity: str, shape: IterationShape) -> Num:
    """Sums a quantity over all calls of the operators, for a batch that one device holds."""
    batch = ParallelLayout().rank_batch(shape)
    total: Num = sum(op.calls * getattr(op, quantity)(batch) for op in operators)
    return total
