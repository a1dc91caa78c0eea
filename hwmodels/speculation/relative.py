"""Prices drafting on a device whose target is measured and whose draft is not.

A draft on such a device takes as many times the seconds of its roofline as the operators of the target do:
its first step as in the same iteration without drafts, later steps as in decodes of the sequences that draft.
"""

from __future__ import annotations

from typing import Any

from hwmodels.exact import Num, larger, smaller
from hwmodels.iterations.iteration import Explained, IterationModel, IterationShape
from hwmodels.speculation.drafting import Drafting

NOT_OPERATORS = ("host", "launch")


class RelativeDrafting:
    """A `Drafting` whose times are scaled by measured over modelled seconds of the target."""

    def __init__(self, drafting: Drafting, measured: IterationModel, modelled: IterationModel) -> None:
        self._drafting = drafting
        self._measured = measured
        self._modelled = modelled

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of drafting."""
        return sum(factor * self._drafting.seconds(part) for factor, part in self._parts(shape))

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component; they sum to `seconds`."""
        sums: dict[str, Any] = {}
        for factor, part in self._parts(shape):
            for name, seconds in self._drafting.breakdown(part).items():
                sums[name] = sums.get(name, 0.0) + factor * seconds
        return sums

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of drafting; their seconds sum to `seconds`, in the roofline's shares."""
        scale = float(self.seconds(shape)) / max(float(self._drafting.seconds(shape)), 1e-12)
        return [line._replace(seconds=scale * line.seconds) for line in self._drafting.explain(shape)]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of drafting."""
        return self._drafting.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of weights and KV that drafting reads."""
        return self._drafting.bytes_moved(shape)

    def _parts(self, shape: IterationShape) -> list[tuple[Any, IterationShape]]:
        """Returns factors and shapes, whose priced products sum up: all steps, and the first one again."""
        drafts = shape.drafts
        assert drafts is not None
        plain = shape._replace(sampled_seqs=shape.sampled_seqs - drafts.tokens, drafts=None)
        seqs = larger(drafts.seqs, 1)
        context = larger(shape.decode_context_tokens + shape.prefill_context_tokens, seqs)
        of_first, of_later = (
            self._factor(plain),
            self._factor(IterationShape(seqs, context, 0, 0, 0, 0, seqs)),
        )
        first = shape._replace(drafts=drafts._replace(steps=smaller(drafts.steps, 1)))
        return [(of_later, shape), (of_first - of_later, first)]

    def _factor(self, plain: IterationShape) -> Any:
        return _operators_s(self._measured, plain) / _operators_s(self._modelled, plain)


def _operators_s(model: IterationModel, shape: IterationShape) -> Any:
    parts = model.breakdown(shape)
    return sum(part for name, part in parts.items() if name not in NOT_OPERATORS)
