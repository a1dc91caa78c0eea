"""Speculative decoding as a level over another one: an iteration that gives every sequence one token.

A pass verifies num_draft_tokens of each sequence besides its next token, and drafts as many for the next pass
with the model's multi-token prediction layer, one after the other. Of these, accepted_tokens are kept on
average, the next token included. The simulator's iterations give a sequence one token each, so decodes take

    (one pass of num_draft_tokens + 1 tokens per sequence + drafting) / accepted_tokens

and prompt chunks take what they add to a pass. Throughput and mean times between tokens are those of
the passes; that tokens come in groups is not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy import ndarray

from hwmodels.by_count import ByCount, Counts
from hwmodels.checks import check_whole
from hwmodels.exact import Num, larger
from hwmodels.iterations.iteration import Explained, IterationModel, IterationShape
from hwmodels.iterations.jitter import Jitter
from hwmodels.levels.explained import share_out
from hwmodels.levels.rooflines import Calibrated, LatencyLevel, Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculative:
    """Level `speculative`: decodes by multi-token prediction, priced by another level."""

    base: LatencyLevel = Calibrated()
    num_draft_tokens: int = 3
    """Tokens that are drafted for each sequence in a pass."""
    accepted_tokens: float = 2.5
    """Mean number of tokens that a sequence gets from a pass; 1 to num_draft_tokens + 1."""

    def __post_init__(self) -> None:
        check_whole("num_draft_tokens", self.num_draft_tokens)
        if not 1 <= self.accepted_tokens <= self.num_draft_tokens + 1:
            raise ValueError(
                f"accepted_tokens={self.accepted_tokens}: must be from 1 to {self.num_draft_tokens + 1}, "
                "num_draft_tokens + 1"
            )

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times: that of the base, if it has this setting."""
        jitter: Jitter | None = getattr(self.base, "jitter", None)
        return jitter

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model. Raises ValueError if the base cannot price the replica."""
        return SpeculativeModel(self, self.base.iteration_model(replica), replica.model.num_layers)

    def basis(self, replica: Replica) -> str:
        return (
            f"{self.base.basis(replica)} Speculative decoding: {self.num_draft_tokens} drafted tokens, "
            f"{self.accepted_tokens:g} tokens per pass."
        )


class SpeculativeModel:
    """An `IterationModel` of speculative decoding. num_layers: layers of the model, to price one draft."""

    def __init__(self, level: Speculative, base: IterationModel, num_layers: int) -> None:
        self._level, self._base, self._num_layers = level, base, num_layers
        layers = ("gemm", "attention", "communication", "elementwise")
        self._heads_s = ByCount(partial(self._seconds_of, ["lm_head"]))
        self._layers_s = ByCount(partial(self._seconds_of, layers))
        self.peak_flops_per_s = base.peak_flops_per_s
        self.peak_bytes_per_s = base.peak_bytes_per_s

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds that chunks add to a pass, and the decodes' share of one."""
        if ndarray in map(type, shape):
            return self._seconds_many(shape)
        decodes_s = self._decodes_seconds(shape) if shape.decode_seqs else 0.0
        if not shape.prefill_tokens:
            return decodes_s
        whole_s = self._base.seconds(shape)
        alone_s = self._base.seconds(_only_decodes(shape)) if shape.decode_seqs else 0.0
        return whole_s - alone_s + decodes_s

    def _seconds_many(self, shape: IterationShape) -> Any:
        """Computes `seconds` of each of many iterations, in the same order of operations."""
        has_decodes = np.asarray(shape.decode_seqs) > 0
        some = _only_decodes(shape._replace(decode_seqs=np.maximum(shape.decode_seqs, 1)))
        decodes_s = np.where(has_decodes, self._decodes_seconds(some), 0.0)
        has_chunks = np.asarray(shape.prefill_tokens) > 0
        if not has_chunks.any():
            return decodes_s
        alone_s = np.where(has_decodes, self._base.seconds(some), 0.0)
        return np.where(has_chunks, self._base.seconds(shape) - alone_s + decodes_s, decodes_s)

    def decode_ends(
        self, start_s: float, num_seqs: int, num_context_tokens: int, num_iterations: int
    ) -> list[float]:
        """Returns the end times of consecutive decode-only iterations; see `IterationModel`."""
        contexts = num_context_tokens + num_seqs * np.arange(num_iterations)
        durations = self.seconds(IterationShape(num_seqs, contexts, 0, 0, 0, 0, num_seqs))
        return list(accumulate(durations.tolist(), initial=start_s))[1:]

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component, in the proportions of the base."""
        parts = self._base.breakdown(shape)
        factor = self.seconds(shape) / sum(parts.values())
        return {name: seconds * factor for name, seconds in parts.items()}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of one iteration, in the proportions of the base."""
        parts = self.breakdown(shape)
        seconds = {name: float(part) for name, part in parts.items()}
        seconds["host"] += seconds.pop("launch")
        return share_out(self._base.explain(shape), seconds)

    def flops(self, shape: IterationShape) -> Num:
        """Returns the model FLOPs of the tokens that are kept."""
        return self._base.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV read: those of chunks, and the decodes' share of a pass.

        Those of drafting are left out, as its FLOPs are.
        """
        some = _only_decodes(shape._replace(decode_seqs=larger(shape.decode_seqs, 1)))
        pass_bytes = self._base.bytes_moved(self._verified(some))
        saved = self._base.bytes_moved(some) - pass_bytes / self._level.accepted_tokens
        return self._base.bytes_moved(shape) - saved * (shape.decode_seqs > 0)

    def _decodes_seconds(self, shape: IterationShape) -> Any:
        """Returns the share of a pass for one token of each of the decoding sequences (>= 1)."""
        level = self._level
        head_s: Any
        layers_s: Any
        if isinstance(shape.decode_seqs, ndarray):
            counts = np.asarray(shape.decode_seqs, dtype=np.intp)
            head_s, layers_s = self._heads_s.of_many(counts), self._layers_s.of_many(counts)
        else:
            head_s, layers_s = (
                self._heads_s.of(int(shape.decode_seqs)),
                self._layers_s.of(int(shape.decode_seqs)),
            )
        draft_s = level.num_draft_tokens * (layers_s / self._num_layers + head_s)
        return (self._base.seconds(self._verified(shape)) + draft_s) / level.accepted_tokens

    def _verified(self, shape: IterationShape) -> IterationShape:
        """Returns the decodes of a pass, in which every drafted token is one more of its sequence."""
        tokens = shape.decode_seqs * (self._level.num_draft_tokens + 1)
        return _only_decodes(shape)._replace(decode_seqs=tokens, sampled_seqs=tokens)

    def _seconds_of(self, components: Iterable[str], num_seqs: Counts) -> Any:
        """Returns seconds of some components of decodes with short contexts, by number of sequences."""
        seqs = np.maximum(num_seqs, 1)
        parts = self._base.breakdown(IterationShape(seqs, seqs, 0, 0, 0, 0, seqs))
        return sum(parts[name] for name in components)


def _only_decodes(shape: IterationShape) -> IterationShape:
    decodes = shape.decode_seqs
    return IterationShape(decodes, shape.decode_context_tokens, 0, 0, 0, 0, decodes)
