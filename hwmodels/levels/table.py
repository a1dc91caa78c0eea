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
from typing import Any, NamedTuple

import numpy as np

from hwmodels.by_count import ByCount
from hwmodels.devices.host import CudaGraphs, HostOverhead, HostShare
from hwmodels.exact import Num
from hwmodels.iterations.iteration import COMPONENTS, Explained, IterationModel, IterationShape, counted
from hwmodels.iterations.layout import RankBatch
from hwmodels.iterations.ops import Operator
from hwmodels.levels.explained import share_out
from hwmodels.levels.grid import Floats
from hwmodels.levels.profile import AROUND, Profile

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
        self._around = {name: profile.grid((name,), AROUND) for name in BY_COUNT}
        self._tokens_s = ByCount(self._tokens_seconds)
        self._rows_s = ByCount(self._rows_seconds)
        self._attention = profile.attention
        num_kernels = profile.num_kernels + sum(op.calls * op.kernels for op in self._lacking)
        self._host = HostShare(host or HostOverhead(), cuda_graphs or CudaGraphs(), num_kernels)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the wall time of the iteration in seconds; for arrays, of each iteration."""
        if shape.drafts is not None or any(isinstance(field, np.ndarray) for field in shape):
            return self._seconds_many(shape)
        num_seqs, _, chunks, tokens, _, _, sampled = counted("table", shape)
        replays = self._host.replays(int(num_seqs + tokens), tokens)
        gpu_s = self._counted(int(num_seqs + tokens), replays, int(sampled))
        if self._attention is not None:
            gpu_s = gpu_s + self._attention.seconds(shape)
        else:
            # One-element arrays make numbers and arrays take the same path through the base.
            gpu_s = gpu_s + float(self._attention_of_base(_flat(shape).plain)[0])
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
            gpu_s = gpu_s + self._attention_of_base(_flat(shape).plain)
        wall_s = self._host.wall_seconds(np.broadcast_to(gpu_s, contexts.shape), replays, num_seqs)
        return list(accumulate(wall_s.tolist(), initial=start_s))[1:]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; components that the table lacks are the base's."""
        flat = _flat(shape)
        tokens, prefill_tokens, num_seqs, sampled = flat.counts
        parts: dict[str, Any] = dict.fromkeys(COMPONENTS, np.zeros(len(tokens)))
        replays = self._host.replays(tokens, prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays).astype(np.float64)
        for name in BY_COUNT:
            parts[name] = self._component_seconds(name, sampled if name == "lm_head" else computed)
        parts["attention"] = self._attention_many(flat)
        gpu_s = sum(parts.values())
        parts["launch"], parts["host"] = self._host.parts(gpu_s, replays, num_seqs)
        return {name: part.reshape(flat.answer_shape)[()] for name, part in parts.items()}

    def model_breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component without the operators around the model (`AROUND`)."""
        flat, parts = _flat(shape), self.breakdown(shape)
        tokens, _, _, sampled = flat.counts
        for name, grid in self._around.items():
            if grid is not None:
                counts = np.asarray(sampled if name == "lm_head" else tokens, dtype=np.float64)
                around_s = np.where(counts > 0, grid.at_many(np.maximum(counts, 1.0)), 0.0)
                parts[name] = parts[name] - around_s.reshape(flat.answer_shape)[()]
        return parts

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
        flat = _flat(shape)
        tokens, prefill_tokens, num_seqs, sampled = flat.counts
        replays = self._host.replays(tokens, prefill_tokens)
        computed = self._host.computed_tokens(tokens, replays)
        gpu_s: Any = self._tokens_s.of(computed) + self._rows_s.of(sampled.astype(np.intp))
        gpu_s = gpu_s + self._attention_many(flat)
        return self._host.wall_seconds(gpu_s, replays, num_seqs).reshape(flat.answer_shape)[()]

    def _counted(self, tokens: int, replays: bool, sampled: int) -> float:
        """Returns GPU seconds that depend only on the numbers of tokens and of sampled rows."""
        tokens_s: float = self._tokens_s.of(self._host.computed_tokens(tokens, replays))
        return tokens_s + float(self._rows_s.of(sampled))

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

    def _attention_many(self, flat: Flat) -> Any:
        """Returns the attention seconds; passes with draft tokens are computed apart from the rest."""
        price = self._attention_of_base if self._attention is None else self._attention.seconds_many
        seconds = price(flat.plain)
        return seconds if flat.passes is None else seconds + price(flat.passes)

    def _attention_of_base(self, fields: IterationShape) -> Any:
        return self._base.breakdown(fields)["attention"]


class Flat(NamedTuple):
    """The shapes of N iterations as arrays [N]; passes: those with draft tokens, each as a prompt's chunk."""

    plain: IterationShape
    passes: IterationShape | None
    answer_shape: tuple[int, ...]

    @property
    def counts(self) -> tuple[Any, Any, Any, Any]:
        """Tokens (whole numbers), tokens beside single decodes, sequences, and sampled rows."""
        plain, passes = self.plain, self.passes
        prefill_tokens, num_seqs = plain.prefill_tokens, plain.decode_seqs + plain.prefill_seqs
        if passes is not None:
            prefill_tokens, num_seqs = prefill_tokens + passes.prefill_tokens, num_seqs + passes.prefill_seqs
        tokens = np.asarray(plain.decode_seqs + prefill_tokens).astype(np.intp)
        return tokens, prefill_tokens, num_seqs, plain.sampled_seqs


def _flat(shape: IterationShape) -> Flat:
    """Returns the fields as arrays of one length. Raises UnknownIterationError for adapters."""
    drafts = shape.drafts
    counts: tuple[Any, ...] = counted("table", shape._replace(drafts=None))
    if drafts is None:
        plain, answer_shape = _arrays(counts)
        return Flat(IterationShape(*plain), None, answer_shape)
    (seqs, context, *others, tokens, pairs), answer_shape = _arrays((*counts, drafts.tokens, drafts.pairs))
    none, has_drafts = np.zeros_like(seqs), tokens > 0
    own, own_context = np.where(has_drafts, seqs, 0), np.where(has_drafts, context, 0)
    passes = IterationShape(none, none, own, tokens + own, pairs + own_context, own_context + tokens, none)
    return Flat(IterationShape(seqs - own, context - own_context, *others), passes, answer_shape)


def _arrays(fields: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Returns fields as flat arrays of one length, and the shape of the answer."""
    arrays = np.broadcast_arrays(*(np.asarray(field, dtype=np.float64) for field in fields))
    return [array.ravel() for array in arrays], arrays[0].shape
