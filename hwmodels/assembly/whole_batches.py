"""Prices iterations, and leaps of decode-only iterations, with batches that one device computes whole.

No attention groups, ring or micro-batches share these batches. A simulation needs these prices in each of
its steps, so figures that depend only on the number of sequences are cached by that number.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hwmodels.assembly.counted import CountedTimes
from hwmodels.devices.host import HostShare
from hwmodels.iterations.decodes import Decodes, PassParts, Straight, seconds_of_pass, seconds_of_passes
from hwmodels.iterations.equal_passes import EqualPasses, by_keys
from hwmodels.iterations.iteration import IterationShape
from hwmodels.iterations.ops import Operator, rows_each

FEW_ITERATIONS = 48
"""Largest number of iterations priced one by one: numpy takes as long for 50."""

MOST_PASSES = 50_000
"""Passes kept, by numbers of sequences and draft tokens; a policy with draft lengths of its own has many."""


class _DecodeBatch(NamedTuple):
    """Figures that all decode-only iterations with the same number of sequences share."""

    counted_s: float
    """GPU seconds that do not depend on contexts."""
    floor_s: float
    added_s: float
    """Seconds of the host: the iteration takes max(GPU, floor_s) + added_s; see `HostShare`."""
    straight: Straight


class _PassBatch(NamedTuple):
    """Figures that all passes with the same numbers of sequences and draft tokens share."""

    counted_s: float
    """GPU seconds by number of tokens."""
    floor_s: float
    added_s: float
    lines: PassParts


class WholeBatches:
    """Prices iterations with batches that one device computes whole."""

    def __init__(
        self,
        *,
        counted: CountedTimes,
        decodes: Decodes,
        prefills: Iterable[Operator],
        host: HostShare,
    ) -> None:
        self._tokens_s, self._rows_s = counted.tokens_s, counted.rows_s
        self._decodes = decodes
        self._prefills = [(op.calls, op.seconds) for op in prefills]
        self._host = host
        self._batches: dict[int, _DecodeBatch] = {}
        self._prefill_bounds: dict[tuple[int, bool], tuple[float, float]] = {}
        self._passes: dict[tuple[Any, Any], _PassBatch] = {}

    def prefill_seconds(self, shape: IterationShape) -> float:
        """Returns the wall time of one iteration with prompt chunks in seconds."""
        batch: Any = shape  # a device's share of the whole batch is the batch
        decode_seqs, context_tokens, prefill_seqs, prefill_tokens, _, _, sampled_seqs, _, drafts, _ = batch
        if drafts is None:
            gpu_s = self._tokens_s.of(int(decode_seqs + prefill_tokens)) + self._rows_s.of(int(sampled_seqs))
            if decode_seqs:
                gpu_s += self._decodes.seconds(decode_seqs, context_tokens)
        else:
            tokens = drafts.tokens
            gpu_s = self._tokens_s.of(int(decode_seqs + tokens + prefill_tokens))
            gpu_s += self._rows_s.of(int(sampled_seqs))
            if decode_seqs:
                gpu_s += self._decodes.pass_seconds(decode_seqs, context_tokens, tokens, drafts.pairs)
        prefills_s = 0.0
        for calls, seconds in self._prefills:
            prefills_s += calls * seconds(batch)
        gpu_s += prefills_s
        num_seqs = decode_seqs + prefill_seqs
        key = num_seqs, decode_seqs > 0
        floor_s, added_s = self._prefill_bounds.get(key) or self._bounds_beside_prefill(*key)
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def pass_seconds(self, num_seqs: Any, context_tokens: Any, tokens: Any, pairs: Any, rows: Any) -> float:
        """Returns the wall time of one iteration of decodes with draft tokens in seconds."""
        key = num_seqs, tokens
        counted_s, floor_s, added_s, lines = self._passes.get(key) or self._pass_batch(*key)
        gpu_s = counted_s + self._rows_s.of(int(rows))
        gpu_s += seconds_of_pass(lines, num_seqs, context_tokens, tokens, pairs)
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def pass_seconds_many(self, num_seqs: int, contexts: Any, tokens: int, pairs: Any, rows: int) -> Any:
        """Computes `pass_seconds` of each of many iterations of the same sequences."""
        key = num_seqs, tokens
        counted_s, floor_s, added_s, lines = self._passes.get(key) or self._pass_batch(*key)
        gpu_s = counted_s + self._rows_s.of(int(rows))
        return (
            np.maximum(gpu_s + seconds_of_passes(lines, num_seqs, contexts, tokens, pairs), floor_s) + added_s
        )

    def equal_passes(self, num_seqs: int, tokens: int, rows: int, most_pairs: float) -> EqualPasses | None:
        """Returns the prices of passes by context, each key of which is seen by most_pairs rows at most.

        None: they depend on more than the number of keys.
        """
        counted_s, floor_s, added_s, lines = self._pass_batch(num_seqs, tokens)
        operators = by_keys(lines, most_pairs)
        if operators is None:
            return None
        return EqualPasses(counted_s + self._rows_s.of(rows), floor_s, added_s, tokens, operators)

    def decode_seconds(self, num_seqs: Any, context_tokens: Any) -> float:
        """Returns the wall time of one decode-only iteration in seconds."""
        counted_s, floor_s, added_s, _ = self._batches.get(num_seqs) or self._batch(num_seqs)
        gpu_s = counted_s + self._decodes.seconds(num_seqs, context_tokens)
        return (gpu_s if gpu_s > floor_s else floor_s) + added_s

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        batch = self._batches.get(num_seqs) or self._batch(num_seqs)
        counted_s, _, added_s, (from_context, lines) = batch
        last = num_context_tokens + num_seqs * num_iterations
        if num_context_tokens < from_context:
            durations_s = self._leap_seconds(batch, num_seqs, range(num_context_tokens, last, num_seqs))
            return list(accumulate(durations_s, initial=start_s))[1:]
        if num_iterations > FEW_ITERATIONS:
            contexts = np.arange(num_context_tokens, last, num_seqs, dtype=np.float64)
            return self._long_leap_ends(start_s, batch, contexts)
        steps = range(num_context_tokens, last, num_seqs)
        if len(lines) == 1:  # as nearly always
            [(calls, fixed_s, token_s)] = lines
            times_s = [counted_s + calls * (fixed_s + token_s * context) + added_s for context in steps]
        else:
            times_s = []
            for context in steps:
                decodes_s = 0.0
                for calls, fixed_s, token_s in lines:
                    decodes_s += calls * (fixed_s + token_s * context)
                times_s.append(counted_s + decodes_s + added_s)
        times_s[0] += start_s
        return list(accumulate(times_s))

    def _long_leap_ends(
        self, start_s: float, batch: _DecodeBatch, contexts: NDArray[np.float64]
    ) -> list[float]:
        """Computes `decode_ends` of many iterations with straight lines as prices."""
        decodes_s = np.zeros(len(contexts))
        for calls, fixed_s, token_s in batch.straight.lines:
            decodes_s += calls * (fixed_s + token_s * contexts)
        times_s = batch.counted_s + decodes_s + batch.added_s
        times_s[0] += start_s
        ends_s: list[float] = times_s.cumsum().tolist()
        return ends_s

    def _leap_seconds(self, batch: _DecodeBatch, num_seqs: int, contexts: range) -> list[float]:
        """Returns the wall time in seconds of each of several consecutive decode-only iterations."""
        counted_s, floor_s, added_s, _ = batch
        # No iteration takes longer than the last.
        if counted_s + self._decodes.seconds(num_seqs, contexts[-1]) <= floor_s:
            return [floor_s + added_s] * len(contexts)
        if len(contexts) <= FEW_ITERATIONS:
            return [self.decode_seconds(num_seqs, context) for context in contexts]
        at = np.arange(contexts.start, contexts.stop, contexts.step, dtype=np.float64)
        gpu_s = counted_s + self._decodes.seconds_many(num_seqs, at)
        times_s: list[float] = (np.maximum(gpu_s, floor_s) + added_s).tolist()
        return times_s

    def _batch(self, num_seqs: Any) -> _DecodeBatch:
        replays = self._host.replays(num_seqs, 0)
        tokens = self._host.computed_tokens(int(num_seqs), replays)
        counted_s = self._tokens_s.of(tokens) + self._rows_s.of(int(num_seqs))
        floor_s, added_s = self._host.bounds(replays, num_seqs)
        straight = self._decodes.straight(num_seqs, counted_s, floor_s)
        self._batches[num_seqs] = _DecodeBatch(counted_s, floor_s, added_s, straight)
        return self._batches[num_seqs]

    def _pass_batch(self, num_seqs: Any, tokens: Any) -> _PassBatch:
        rows, computed = rows_each(num_seqs, tokens), int(num_seqs + tokens)
        replays = self._host.replays(computed, 0)
        counted_s = self._tokens_s.of(self._host.computed_tokens(computed, replays, rows))
        lines = self._decodes.pass_lines(num_seqs, rows)
        if len(self._passes) >= MOST_PASSES:
            self._passes.clear()
        known = _PassBatch(counted_s, *self._host.bounds(replays, num_seqs), lines)
        self._passes[num_seqs, tokens] = known
        return known

    def _bounds_beside_prefill(self, num_seqs: Any, is_mixed: bool) -> tuple[float, float]:
        """Returns floor_s and added_s of an iteration with prompt chunks, which no CUDA graph replays."""
        more_kernels = self._host.mixed_kernels(int(is_mixed), 1)
        self._prefill_bounds[num_seqs, is_mixed] = self._host.bounds(False, num_seqs, more_kernels)
        return self._prefill_bounds[num_seqs, is_mixed]
