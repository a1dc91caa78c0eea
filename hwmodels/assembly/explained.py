"""Where the time of an iteration goes: seconds, FLOPs and bytes operator by operator.

`TimedOperators` is the half of a roofline that goes through its operators one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np

from hwmodels.assembly.adapters import AddedByAdapters
from hwmodels.assembly.counted import CountedTimes
from hwmodels.devices.device import Device
from hwmodels.devices.host import HostShare
from hwmodels.exact import Num, larger
from hwmodels.iterations.critical_path import Passing, bound_of, seconds_of, total_of, whole_total
from hwmodels.iterations.iteration import COMPONENTS, Explained, IterationShape
from hwmodels.iterations.layout import InFlight, ParallelLayout, RankBatch
from hwmodels.iterations.ops import Operator, Part, rows_each
from hwmodels.iterations.stages import MicroBatch, Stages


class TimedOperators(ABC):
    """Operators of an iteration on one device, and the parts of their time."""

    device: Device
    layout: ParallelLayout
    operators: list[Operator]
    stages: Stages | None
    """None if an iteration is one batch that passes all stages once."""
    _whole_model: list[Operator]
    _adapters: AddedByAdapters
    _whole_adapters: AddedByAdapters
    _counted: CountedTimes
    _host: HostShare

    @abstractmethod
    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""

    @abstractmethod
    def round(self, shape: IterationShape) -> tuple[MicroBatch, InFlight, MicroBatch]:
        """Returns the fullest micro-batch, their counts, and a decode-only one; times in GPU seconds."""

    def operator_seconds(self, shape: IterationShape) -> list[tuple[Operator, Num]]:
        """Returns GPU seconds of every operator over all its calls; they sum to the iteration's GPU seconds.

        In a pipeline: one micro-batch on all stages, or all on the slowest stage, whichever takes longer.
        """
        shape = self._adapters.of(shape)
        parts = self._critical_path(shape)
        return [(op, total_of(op, parts, partial(seconds_of, op))) for op in self._operators_of(shape)]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; `launch` and `host`: waits for launches and for other host work."""
        shape = self._adapters.of(shape)
        zeros = np.zeros(np.broadcast(*shape.counts, *(shape.drafts or ())).shape)[()]
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, zeros)
        for op, seconds in self.operator_seconds(shape):
            parts[op.component] = parts[op.component] + seconds
        batch = self.layout.rank_batch(shape)
        replays = self._replays(whole(batch.tokens), shape)
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
            seconds = float(total_of(op, path, partial(seconds_of, op)))
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
        """Returns the bytes of the matrices that tokens are multiplied with, and of KV and states."""
        shape = self._adapters.of(shape)
        return whole_total(self._whole_operators_of(shape), "stored_bytes", shape)

    def _replays(self, tokens: Any, shape: IterationShape) -> Any:
        """Returns whether a CUDA graph runs the whole iteration, adapters included."""
        replays = self._host.replays(tokens, shape.prefill_tokens)
        if shape.adapters is None or self._adapters.captured:
            return replays
        return replays & (shape.adapters.adapters == 0)

    def _operators_of(self, shape: IterationShape) -> list[Operator]:
        """Returns the operators of an iteration on one device, those of its adapters included."""
        return self.operators if shape.adapters is None else [*self.operators, *self._adapters.operators]

    def _whole_operators_of(self, shape: IterationShape) -> list[Operator]:
        """Returns the operators of an iteration of the undivided model, those of its adapters included."""
        if shape.adapters is None:
            return self._whole_model
        return [*self._whole_model, *self._whole_adapters.operators]

    def _critical_path(self, shape: IterationShape) -> list[Passing]:
        """Returns the batches on the critical path, each with the number of runs of each part's operators."""
        batch = self._padded_batch(shape)
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
        # A micro-batch that does not exist runs zero times, but experts have no time for no token.
        decoding = decoding._replace(all_tokens=larger(decoding.all_tokens, 1))
        return [Passing(batch, times[0]), Passing(decoding, times[1])]

    def _padded_batch(self, shape: IterationShape) -> RankBatch:
        batch = self.layout.rank_batch(shape)
        tokens = whole(batch.tokens)
        replays = self._replays(tokens, shape)
        tokens = self._host.computed_tokens(tokens, replays, rows_of_each(batch))[()]
        return batch._replace(
            tokens=tokens, all_tokens=tokens if self._counted.any_tokens_s is None else batch.all_tokens
        )


def rows_of_each(batch: RankBatch) -> Any:
    """Returns the rows of each decoding sequence of a batch, its draft tokens included."""
    tokens = batch.draft_tokens
    return rows_each(batch.decode_seqs, tokens) if isinstance(tokens, np.ndarray) or tokens else 1


def whole(count: Any) -> Any:
    """Returns counts as an array of whole numbers."""
    return np.asarray(count, dtype=np.intp)
