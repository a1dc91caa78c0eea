"""Iterations priced operator by operator: levels `spec` and `calibrated`, which differ in parameters only.

Roofline: Williams, Waterman, Patterson, CACM 2009, with curves for the share that kernels reach of it:

    operator    hwmodels/operators: the larger of compute and memory time at the shares that its shape
                reaches, and the start of its kernels; collectives by message size and algorithm
    gpu         sum over operators, tokens padded to the captured size where a CUDA graph replays;
                micro-batches: see `Stages`
    iteration   see `HostOverhead`

Every time is computed for a number and for an array, side by side to keep the two equal. Times of batches
that one device computes whole are in `whole_batches`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy import ndarray

from hwmodels.assembly import Inputs, iteration_operators
from hwmodels.assembly.adapters import AddedByAdapters
from hwmodels.assembly.chain import over_chips
from hwmodels.assembly.counted import CountedTimes
from hwmodels.assembly.explained import TimedOperators, rows_of_each, whole
from hwmodels.assembly.offloaded import offloaded
from hwmodels.assembly.site import Kernels, Site
from hwmodels.assembly.whole_batches import WholeBatches
from hwmodels.by_count import Counts, RowsByCount
from hwmodels.devices.device import Device
from hwmodels.devices.host import CudaGraphs, HostOverhead, HostShare
from hwmodels.iterations.decodes import Decodes
from hwmodels.iterations.equal_passes import EqualPasses
from hwmodels.iterations.iteration import DraftWork, IterationShape
from hwmodels.iterations.layout import InFlight, ParallelLayout, RankBatch
from hwmodels.iterations.offload import Offload
from hwmodels.iterations.ops import Per
from hwmodels.iterations.stages import MicroBatch, Pass, Stages
from hwmodels.model.lora import Lora
from hwmodels.model.matrices import Role
from hwmodels.model.model_spec import ModelSpec
from hwmodels.operators.calibration import Calibration

FEW_ITERATIONS = 16
"""Largest number of iterations priced one by one: an array takes as long as 20 numbers."""

NO_MICRO_BATCH = MicroBatch(0.0, 0.0, 0.0, 0.0)


class Roofline(TimedOperators):
    """An `IterationModel` of one replica: a model on the devices of a layout.

    `seconds` is called millions of times in a simulation. Times that depend only on the numbers of tokens and
    sampled rows are looked up; attention is added by arithmetic that gives the same bits for numbers and
    arrays (`hwmodels.exact`). `breakdown` and `explain` go operator by operator.
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
        """Builds it; inputs: returns the matrices that all tokens go through before the first layer.

        offload: weights that are in host memory; None: none are.
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
        self._host = HostShare(host, cuda_graphs or CudaGraphs(), num_kernels, mixed_kernels=mixed_kernels)
        is_shared = self.layout.num_batch_shares > 1 or self.layout.context_parallel_size > 1
        self._whole = (
            None
            if is_shared or self._adapters.in_every_batch
            else WholeBatches(
                counted=self._counted,
                decodes=self._decodes,
                prefills=self._prefill_ops,
                host=self._host,
            )
        )
        """None if several devices, or micro-batches, share each batch, or if all batches have adapters."""
        self._decode_batches = RowsByCount(self._decode_batch_figures)
        self._known_batches: dict[float, list[float]] = {}
        self.stages = Stages(self.layout, self.model.num_layers) if self.layout.micro_batches > 1 else None
        """None if an iteration is one batch that passes all stages once."""
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
            self._decode_ends = RowsByCount(self._decode_ends_figures)
            self._known_ends: dict[float, list[float]] = {}

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        shape = self._adapters.of(shape)
        of_passes = None if shape.drafts is None else _of_passes(shape, shape.drafts)
        if of_passes is not None and self._whole is not None:
            return self.pass_seconds(*of_passes)
        if ndarray in map(type, shape) or (shape.drafts and ndarray in map(type, shape.drafts)):
            return self._seconds_many(shape)
        decode_seqs, context_tokens, prefill_seqs, prefill_tokens, _, _, sampled, adapters, drafts, ranks = (
            shape
        )
        if adapters is None:
            if drafts is None and ranks is None and not prefill_tokens and sampled == decode_seqs:
                return self._decode_seconds(decode_seqs, context_tokens)
            if prefill_tokens and self._whole is not None:
                return self._whole.prefill_seconds(shape)
        own: Any = self.layout.rank_batch(shape)
        tokens, all_tokens, rows = int(own.tokens), int(own.all_tokens), int(own.rows)
        replays = self._replays(tokens, shape)
        computed = self._host.computed_tokens(tokens, replays, rows_of_each(own))
        gpu_s = self._counted.of(computed, all_tokens, rows)
        decodes_s = 0.0
        if decode_seqs:
            decodes_s = self._decodes.batch_seconds(own)
            gpu_s += decodes_s
        prefills_s = 0.0
        for op in self._prefill_ops:
            prefills_s += op.calls * op.seconds(own)
        gpu_s += prefills_s
        more_kernels = self._host.mixed_kernels(decode_seqs, prefill_seqs)
        if adapters is not None:
            added_gpu_s, adapter_kernels = self._adapters.seconds(own)
            gpu_s += added_gpu_s
            more_kernels = more_kernels + adapter_kernels
        if self.stages is not None:
            gpu_s = self._round(shape, own, computed, rows, gpu_s, decodes_s)
        num_seqs = decode_seqs + prefill_seqs if ranks is None else ranks.decode_seqs + ranks.prefill_seqs
        floor_s, added_s = self._host.bounds(replays, num_seqs, more_kernels)
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def pass_seconds(self, num_seqs: int, context_tokens: Any, tokens: int, pairs: Any, rows: int) -> Any:
        """Returns `seconds` of num_seqs decodes with draft tokens; contexts and pairs may be arrays."""
        if self._whole is None:
            drafts = DraftWork(tokens, pairs, 0, 0, 0)
            return self.seconds(IterationShape(num_seqs, context_tokens, 0, 0, 0, 0, rows, None, drafts))
        if isinstance(context_tokens, ndarray):
            return self._whole.pass_seconds_many(num_seqs, context_tokens, tokens, pairs, rows)
        return self._whole.pass_seconds(num_seqs, context_tokens, tokens, pairs, rows)

    def equal_passes(self, num_seqs: int, tokens: int, rows: int, most_pairs: float) -> EqualPasses | None:
        """Returns what `WholeBatches.equal_passes` does; None if devices share the batch."""
        if self._whole is None:
            return None
        return self._whole.equal_passes(num_seqs, tokens, rows, most_pairs)

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        if self._whole is not None:
            return self._whole.decode_ends(start_s, num_seqs, num_context_tokens, num_iterations)
        contexts = [num_context_tokens + num_seqs * i for i in range(num_iterations)]
        if num_iterations <= FEW_ITERATIONS and not self._adapters.in_every_batch:
            durations_s = [self._decode_seconds(num_seqs, context) for context in contexts]
        else:
            shape = IterationShape(num_seqs, np.array(contexts), 0, 0, 0, 0, num_seqs)
            durations_s = self._seconds_many(shape).tolist()
        return list(accumulate(durations_s, initial=start_s))[1:]

    def round(self, shape: IterationShape) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the fullest micro-batch, their counts, and a decode-only one; times in GPU seconds.

        For arrays, of each iteration. Without micro-batches, the whole batch is the only one.
        """
        shape = self._adapters.of(shape)
        own = self.layout.rank_batch(shape)
        computed, rows, gpu_s, decodes_s = self._of_batch(shape, own)
        if self.stages is None:
            return MicroBatch(gpu_s, 0.0, 0.0, 0.0), InFlight(1, 0), NO_MICRO_BATCH
        return self._micro_batches(shape, own, computed, rows, gpu_s, decodes_s)

    def _of_batch(self, shape: IterationShape, own: RankBatch) -> tuple[Any, Any, Any, Any]:
        """Returns the computed tokens, the rows, and the GPU seconds of all and of decodes; also arrays."""
        tokens, all_tokens, rows = map(whole, (own.tokens, own.all_tokens, own.rows))
        replays = self._replays(tokens, shape)
        computed = self._host.computed_tokens(tokens, replays, rows_of_each(own))
        decodes_s = self._decodes.batch_seconds_many(own)
        gpu_s = self._counted.of_many(computed, all_tokens, rows) + decodes_s
        gpu_s = gpu_s + sum(op.calls * op.seconds(own) for op in self._prefill_ops)
        if shape.adapters is not None:
            gpu_s = gpu_s + self._adapters.seconds(own)[0]
        return computed, rows, gpu_s, decodes_s

    def one_batch(self, shape: IterationShape) -> MicroBatch:
        """Returns the GPU seconds of an iteration that passes the stages as one batch; also arrays."""
        assert self.stages is not None
        shape = self._adapters.of(shape)
        computed, rows, gpu_s, _ = self._of_batch(shape, self._one_batch.rank_batch(shape))
        return MicroBatch(gpu_s, *self._counted.ends(computed, rows))

    def stage_times(self, shape: IterationShape) -> Pass:
        """Returns the times of an iteration that passes the stages as one batch. The counts are numbers."""
        assert self.stages is not None
        shape = self._adapters.of(shape)
        own: Any = self._one_batch.rank_batch(shape)
        tokens, rows = int(own.tokens), int(own.rows)
        replays = self._replays(tokens, shape)
        computed = self._host.computed_tokens(tokens, replays)
        gpu_s = self._counted.of(computed, int(own.all_tokens), rows)
        if shape.decode_seqs:
            gpu_s += self._decodes.batch_seconds(own)
        for op in self._prefill_ops:
            gpu_s += op.calls * op.seconds(own)
        adapter_kernels = 0.0
        if shape.adapters is not None:
            adapters_s, adapter_kernels = self._adapters.seconds(own)
            gpu_s += adapters_s
        batch = MicroBatch(gpu_s, *self._counted.ends(computed, rows))
        is_mixed, totals = bool(shape.decode_seqs and shape.prefill_seqs), shape.totals
        launches_s = self._host.stage_launch_seconds(
            replays,
            [
                kernels + mixed * is_mixed + adapter_kernels * layers
                for kernels, mixed, layers in self._stage_kernels
            ],
        )
        stage_s, send_s = self.stages.one(batch)
        return Pass(
            self._host.engine_seconds(totals.decode_seqs + totals.prefill_seqs),
            [max(own_s, launch_s) for own_s, launch_s in zip(stage_s, launches_s, strict=True)],
            send_s,
            sum(launches_s),
            self._host.exposed_s,
        )

    def _decode_seconds(self, num_seqs: Any, context_tokens: Any) -> float:
        """Returns the wall time of one decode-only iteration in seconds."""
        if self._whole is not None:
            return self._whole.decode_seconds(num_seqs, context_tokens)
        counted_s, floor_s, added_s = self._known_batches.get(num_seqs) or self._decode_batch(num_seqs)
        gpu_s = counted_s + self._decodes.seconds(*self._own_decodes(num_seqs, context_tokens))
        if self.stages is not None:
            gpu_s = self._decode_round(gpu_s, *self._decode_ends_of(num_seqs))
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def _decode_batch(self, num_seqs: Any) -> list[float]:
        """Returns figures that do not depend on contexts: GPU seconds, floor_s and added_s of the host."""
        if num_seqs not in self._known_batches:
            self._known_batches[num_seqs] = self._decode_batches.of_many(whole(num_seqs)).tolist()
        return self._known_batches[num_seqs]

    def _decode_batch_figures(self, num_seqs: Counts) -> tuple[Any, Any, Any]:
        """Computes `_decode_batch` for many numbers of sequences."""
        batch = self.layout.rank_batch(IterationShape(num_seqs, 0, 0, 0, 0, 0, num_seqs))
        tokens, all_tokens, rows = map(whole, (batch.tokens, batch.all_tokens, batch.rows))
        replays = self._host.replays(tokens, 0)
        gpu_s = self._counted.of_many(self._host.computed_tokens(tokens, replays), all_tokens, rows)
        return (gpu_s, *self._host.bounds(replays, num_seqs))

    def _decode_round(self, all_s: Any, full: Any, first_s: Any, between_s: Any, last_s: Any) -> Any:
        """Returns seconds of a round of decode-only micro-batches that take all_s each on all stages."""
        assert self.stages is not None
        batch = MicroBatch(all_s, first_s, between_s, last_s)
        return self.stages.seconds(batch, InFlight(full, 0), NO_MICRO_BATCH)

    def _decode_ends_of(self, num_seqs: Any) -> list[float]:
        """Returns the number of decode-only micro-batches; their seconds before, between, after layers."""
        if num_seqs not in self._known_ends:
            self._known_ends[num_seqs] = self._decode_ends.of_many(whole(num_seqs)).tolist()
        return self._known_ends[num_seqs]

    def _decode_ends_figures(self, num_seqs: Counts) -> tuple[Any, Any, Any, Any]:
        """Computes `_decode_ends_of` for many numbers of sequences."""
        shape = IterationShape(num_seqs, 0, 0, 0, 0, 0, num_seqs)
        batch = self.layout.rank_batch(shape)
        tokens = whole(batch.tokens)
        computed = self._host.computed_tokens(tokens, self._host.replays(tokens, 0))
        return self.layout.in_flight(shape).full, *self._counted.ends(computed, whole(batch.rows))

    def _round(
        self, shape: IterationShape, own: RankBatch, computed: Any, rows: Any, gpu_s: Any, decodes_s: Any
    ) -> Any:
        """Returns seconds of a round of an iteration's micro-batches, the fullest of which takes gpu_s."""
        assert self.stages is not None
        batches = self._micro_batches(shape, own, computed, rows, gpu_s, decodes_s)
        return self.stages.seconds(*batches)

    def _micro_batches(
        self, shape: IterationShape, own: RankBatch, computed: Any, rows: Any, gpu_s: Any, decodes_s: Any
    ) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the fullest micro-batch, the counts, and a micro-batch without a piece of a chunk."""
        batch = MicroBatch(gpu_s, *self._counted.ends(computed, rows))
        in_flight = self.layout.in_flight(shape)
        if not isinstance(in_flight.light, ndarray) and not in_flight.light:
            return batch, in_flight, NO_MICRO_BATCH
        light = self.layout.without_chunks(shape, own)
        tokens, all_tokens = light.tokens, light.all_tokens
        if isinstance(in_flight.light, ndarray):
            tokens, all_tokens = np.broadcast_arrays(whole(tokens), whole(all_tokens))
            counted_s = self._counted.of_many(tokens, all_tokens, tokens)
        else:
            counted_s = self._counted.of(int(tokens), int(all_tokens), int(tokens))
        return batch, in_flight, MicroBatch(counted_s + decodes_s, *self._counted.ends(tokens, tokens))

    def _own_decodes(self, num_seqs: Any, context_tokens: Any) -> tuple[Any, Any]:
        """Returns one device's share of the sequences and of their context tokens."""
        batch = self.layout.rank_batch(IterationShape(num_seqs, context_tokens, 0, 0, 0, 0, num_seqs))
        return batch.decode_seqs, batch.decode_context_tokens

    def _seconds_many(self, shape: IterationShape) -> Any:
        """Computes `seconds` of each of many iterations, in the same order of operations."""
        shape = self._adapters.of(shape)
        batch = self.layout.rank_batch(shape)
        prefills = np.asarray(shape.prefill_tokens).any()
        no_adapters = shape.adapters is None
        if (
            shape.drafts is None
            and shape.gathered is None
            and no_adapters
            and not prefills
            and np.array_equal(shape.sampled_seqs, shape.decode_seqs)
        ):
            counted_s, floor_s, added_s = self._decode_batches.of_many(whole(shape.decode_seqs))
            gpu_s = counted_s + self._decodes.seconds_many(batch.decode_seqs, batch.decode_context_tokens)
            if self.stages is not None:
                ends = self._decode_ends.of_many(whole(shape.decode_seqs))
                gpu_s = self._decode_round(gpu_s, *ends)
            return np.maximum(gpu_s, floor_s) + added_s
        tokens, all_tokens, rows = map(whole, (batch.tokens, batch.all_tokens, batch.rows))
        replays = self._replays(tokens, shape)
        computed = self._host.computed_tokens(tokens, replays, rows_of_each(batch))
        decodes_s = self._decodes.batch_seconds_many(batch)
        gpu_s = self._counted.of_many(computed, all_tokens, rows) + decodes_s
        if prefills:
            gpu_s = gpu_s + sum(op.calls * op.seconds(batch) for op in self._prefill_ops)
        more_kernels = self._host.mixed_kernels(shape.decode_seqs, shape.prefill_seqs)
        if not no_adapters:
            added_gpu_s, adapter_kernels = self._adapters.seconds(batch)
            more_kernels = more_kernels + adapter_kernels
            gpu_s = gpu_s + added_gpu_s
        if self.stages is not None:
            gpu_s = self._round(shape, batch, computed, rows, gpu_s, decodes_s)
        totals = shape.totals
        return self._host.wall_seconds(gpu_s, replays, totals.decode_seqs + totals.prefill_seqs, more_kernels)


def _of_passes(shape: IterationShape, drafts: DraftWork) -> tuple[int, Any, int, Any, int] | None:
    """Returns the arguments of `Roofline.pass_seconds`; None if more than contexts are arrays, or chunks."""
    decodes, context, _, chunks, _, _, sampled, adapters, _, ranks = shape
    if adapters is not None or ranks is not None or type(chunks) is not int or chunks:
        return None
    tokens: Any = drafts.tokens
    if type(decodes) is int and type(sampled) is int and type(tokens) is int:
        return decodes, context, tokens, drafts.pairs, sampled
    return None
