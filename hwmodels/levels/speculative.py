"""Speculative decoding as a level over another one: an iteration that gives every sequence one token.

A pass verifies num_draft_tokens of each sequence in addition to its next token, and drafts the same number
for the next pass with the model's multi-token prediction layer, one after the other. On average
accepted_tokens of these are kept, including the next token. In a run without `speculation=` an iteration
yields one token per sequence, so decodes take

    (one pass of num_draft_tokens + 1 rows per sequence + drafting) / accepted_tokens

and prompt chunks take the time that they add to a pass. Passes are priced by `hwmodels.speculation`.
Throughput and mean times between tokens match the passes; the arrival of tokens in groups is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import ndarray

from fieldlimits import Checked, PositiveInt, check
from hwmodels.exact import Num, larger
from hwmodels.iterations import IterationModel, IterationShape, Jitter
from hwmodels.levels import Calibrated, InProportions, LatencyLevel, Replica, jitter_of
from hwmodels.speculation import SpeculativeModel, decodes_with_drafts
from hwmodels.speculation.draft import LayerDraft


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculative(Checked):
    """Level `speculative`: decodes by multi-token prediction, priced by another level."""

    base: LatencyLevel = Calibrated()
    num_draft_tokens: PositiveInt = 3
    """Number of tokens drafted per sequence in a pass."""
    accepted_tokens: float = 2.5
    """Mean number of tokens that a sequence gets from a pass; 1 to num_draft_tokens + 1."""

    def __post_init__(self) -> None:
        check(self)
        if not 1 <= self.accepted_tokens <= self.num_draft_tokens + 1:
            raise ValueError(
                f"accepted_tokens={self.accepted_tokens}: must be from 1 to {self.num_draft_tokens + 1}, "
                "num_draft_tokens + 1"
            )

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times: the base's, if it has this setting."""
        return jitter_of(self.base)

    def iteration_model(self, replica: Replica) -> IterationModel:
        """Returns the iteration model. Raises ValueError if the base cannot price the replica or passes."""
        base = self.base.iteration_model(replica)
        # One engine runs pass and layer without waiting for the host in between (TensorRT-LLM).
        layer = LayerDraft(kind="mtp", start_s=0.0, step_s=0.0)
        return MeanOfPasses(self, base, SpeculativeModel(base, layer, replica))

    def basis(self, replica: Replica) -> str:
        return (
            f"{self.base.basis(replica)} Speculative decoding: {self.num_draft_tokens} drafted tokens, "
            f"{self.accepted_tokens:g} tokens per pass."
        )


class MeanOfPasses(InProportions):
    """An `IterationModel` in which a decode is its share of a pass.

    base: prices prompt chunks; passes: prices passes with drafting.
    """

    def __init__(self, level: Speculative, base: IterationModel, passes: SpeculativeModel) -> None:
        super().__init__(base)
        self._level, self._base, self._passes = level, base, passes

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

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV read by chunks, and the decodes' share of a pass."""
        some = _only_decodes(shape._replace(decode_seqs=larger(shape.decode_seqs, 1)))
        saved: Any = self._base.bytes_moved(some) - self._of_pass(self._passes.bytes_moved, some)
        moved: Num = self._base.bytes_moved(shape) - saved * (shape.decode_seqs > 0)
        return moved

    def _decodes_seconds(self, shape: IterationShape) -> Any:
        return self._of_pass(self._passes.seconds, shape)

    def _of_pass(self, quantity: Callable[[IterationShape], Any], shape: IterationShape) -> Any:
        """Returns the share of a quantity of a pass for one token of each decoding sequence (>= 1)."""
        seqs: Any = shape.decode_seqs
        a_pass = decodes_with_drafts(seqs, shape.decode_context_tokens, self._level.num_draft_tokens)
        return quantity(a_pass) / self._level.accepted_tokens


def _only_decodes(shape: IterationShape) -> IterationShape:
    decodes = shape.decode_seqs
    return IterationShape(decodes, shape.decode_context_tokens, 0, 0, 0, 0, decodes)
