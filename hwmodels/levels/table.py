"""Level `table`: an iteration is the sum of measured operators, interpolated.

    gpu        sum over operators of calls * latency(tokens or rows) + attention (`AttentionTable`)
    iteration  with launches and the host's work as everywhere: see `HostOverhead`

Between measured sizes times are linear, beyond the largest proportional to it. Components that a table lacks
(the all-reduces of tensor parallelism, often attention) come from another model, and experts that it lacks
from their formulas (`coverage`). Operators are measured
alone: effects of their neighbours on clocks and caches are not included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hwmodels.by_count import ByCount
from hwmodels.devices.host import CudaGraphs, HostOverhead, HostShare
from hwmodels.exact import Num
from hwmodels.iterations.iteration import COMPONENTS, Explained, IterationModel, IterationShape, counted
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import Operator
from hwmodels.levels.explained import share_out
from hwmodels.levels.grid import Floats
from hwmodels.levels.profile import Profile

BY_COUNT = ("gemm", "elementwise", "communication", "lm_head")
"""Components that depend on one number: of tokens, lm_head of sampled rows."""


class MeasuredTable:
    """An `IterationModel` of one replica from the profile of one of its devices.

    FLOPs, bytes and peaks are those of `base`, which also prices the components that the profile lacks
    (`missing`). Communication is missing if there are several devices and no such rows.
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
        """Takes in `lacking` the operators by number of tokens that the profile has not, such as experts."""
        needed = {"gemm", "attention", "elementwise", "lm_head"} | (
            {"communication"} if num_devices > 1 else set()
        )
        self.missing = tuple(sorted(needed - profile.components))
        self.peak_flops_per_s = base.peak_flops_per_s
        self.peak_bytes_per_s = base.peak_bytes_per_s
        self._base = base
        self._lacking = () if "gemm" in self.missing else tuple(lacking)
        self.lacking = tuple(dict.fromkeys(op.name for op in self._lacking))
        self._by_component = {name: profile.grid((name,)) for name in BY_COUNT}
        self._tokens_s = ByCount(self._tokens_seconds)
        self._rows_s = ByCount(self._rows_seconds)
        self._attention = profile.attention
        num_kernels = profile.num_kernels + sum(op.calls * op.kernels for op in self._lacking)
        self._host = HostShare(host or HostOverhead(), cuda_graphs or CudaGraphs(), num_kernels)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        if any(isinstance(field, np.ndarray) for field in shape):
            return self._seconds_many(shape)
        num_seqs, _, chunks, tokens, _, _, sampled = counted("table", shape)
        replays = self._host.replays(int(num_seqs + tokens), tokens)
        gpu_s = self._counted(int(num_seqs + tokens), replays, int(sampled))
        if self._attention is not None:
            gpu_s = gpu_s + self._attention.seconds(shape)
        else:
            # One-element arrays make numbers and arrays take the same path through the base.
            gpu_s = gpu_s + float(self._attention_of_base(_flat(shape)[0])[0])
        return self._host.wall_seconds(gpu_s, replays, num_seqs + chunks)

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        last = num_context_tokens + num_seqs * num_iterations
        contexts = np.arange(num_context_tokens, last, num_seqs, dtype=np.float64)
        replays = self._host.replays(num_seqs, 0)
        gpu_s: Any = self._counted(num_seqs, replays, num_seqs)
        if self._attention is not None:
            gpu_s = gpu_s + self._attention.decode_seconds_many(num_seqs, contexts)
        else:
            shape = IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs)
            gpu_s = gpu_s + self._attention_of_base(_flat(shape)[0])
        wall_s = self._host.wall_seconds(np.broadcast_to(gpu_s, contexts.shape), replays, num_seqs)
        return list(accumulate(wall_s.tolist(), initial=start_s))[1:]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; components that the table lacks are the base's."""
        fields, answer_shape = _flat(shape)
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, np.zeros(len(fields.decode_seqs)))
        tokens = (fields.decode_seqs + fields.prefill_tokens).astype(np.intp)
        replays = self._host.replays(tokens, fields.prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays).astype(np.float64)
        for name in BY_COUNT:
            counts = fields.sampled_seqs if name == "lm_head" else computed
            parts[name] = self._component_seconds(name, counts)
        parts["attention"] = self._attention_many(fields)
        gpu_s = sum(parts.values())
        num_seqs = fields.decode_seqs + fields.prefill_seqs
        parts["launch"], parts["host"] = self._host.parts(gpu_s, replays, num_seqs)
        return {name: part.reshape(answer_shape)[()] for name, part in parts.items()}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the base's operators, those of each component scaled by one factor to the measured time."""
        lines = self._base.explain(shape)
        measured = {name: float(np.sum(part)) for name, part in self.breakdown(shape).items()}
        # The base counts time of no operator as host: launches are part of it.
        measured["host"] += measured.pop("launch")
        return share_out(lines, measured)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs as the base counts them; see `IterationModel`."""
        return self._base.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes moved as the base counts them; see `IterationModel`."""
        return self._base.bytes_moved(shape)

    def _seconds_many(self, shape: IterationShape) -> Any:
        fields, answer_shape = _flat(shape)
        num_seqs, _, chunks, prefill_tokens, _, _, sampled = counted("table", fields)
        tokens = (num_seqs + prefill_tokens).astype(np.intp)
        replays = self._host.replays(tokens, prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays)
        gpu_s: Any = self._tokens_s.of_many(computed) + self._rows_s.of_many(sampled.astype(np.intp))
        gpu_s = gpu_s + self._attention_many(fields)
        return self._host.wall_seconds(gpu_s, replays, num_seqs + chunks).reshape(answer_shape)

    def _counted(self, tokens: int, replays: bool, sampled: int) -> float:
        """Returns GPU seconds that depend only on the numbers of tokens and of sampled rows."""
        return self._tokens_s.of(self._host.computed_tokens(tokens, replays)) + self._rows_s.of(sampled)

    def _tokens_seconds(self, num_tokens: Floats) -> Floats:
        return sum(
            (self._component_seconds(name, num_tokens) for name in BY_COUNT if name != "lm_head"),
            np.zeros_like(num_tokens),
        )

    def _rows_seconds(self, num_rows: Floats) -> Floats:
        return self._component_seconds("lm_head", num_rows)

    def _component_seconds(self, name: str, counts: Floats) -> Floats:
        """Returns measured seconds, or the base's; 0 s for 0 tokens or rows."""
        grid, some = self._by_component[name], np.maximum(counts, 1.0)
        if grid is not None:
            seconds: Any = grid.at_many(some)
        elif name in self.missing:
            # A prompt of `some` tokens, all of them sampled: no other size enters these components.
            prompt = IterationShape(0, 0, 1, some, some * (some + 1) / 2, some, some)
            seconds = self._base.breakdown(prompt)[name]
        else:
            seconds = 0.0
        if self._lacking:
            batch = RankBatch(some, some, some, 0, 0, 0, 0, 0, 0)
            own = [op.calls * op.seconds(batch) for op in self._lacking if op.component == name]
            seconds = sum(own, seconds)
        return np.where(counts > 0, seconds, 0.0)

    def _attention_many(self, fields: IterationShape) -> Any:
        if self._attention is None:
            return self._attention_of_base(fields)
        return self._attention.seconds_many(fields)

    def _attention_of_base(self, fields: IterationShape) -> Any:
        return self._base.breakdown(fields)["attention"]


def _flat(shape: IterationShape) -> tuple[Any, tuple[int, ...]]:
    """Returns the fields as arrays of one length, and the shape of the answer."""
    fields = np.broadcast_arrays(*(np.asarray(field, dtype=np.float64) for field in counted("table", shape)))
    flat: list[Any] = [field.ravel() for field in fields]
    return IterationShape(*flat), fields[0].shape
