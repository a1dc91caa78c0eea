"""Host time of draft tokens: scheduling and packing them, keeping those that are accepted, and searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fieldlimits import Checked, NonNegative, Unit
from hwmodels.exact import Num
from hwmodels.iterations.iteration import Explained, IterationShape
from hwmodels.speculation.drafting import Drafting
from hwmodels.speculation.relative import TargetScale
from hwmodels.speculation.steps import drafting_context, drafts_of, waiting

OTHERS = "others"
"""Key of the host time of all proposers that have none of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHost(Checked):
    """Seconds that an engine's process spends on drafts in an iteration, beside those of `HostOverhead`.

    iteration_s + sequence_s x sequences + token_s x draft tokens that are verified
    + kilotoken_s x 1,000 tokens of context of the sequences for which it drafts
    """

    iteration_s: Annotated[NonNegative, Unit("s")] = 0.0
    sequence_s: Annotated[NonNegative, Unit("s")] = 0.0
    token_s: Annotated[NonNegative, Unit("s")] = 0.0
    kilotoken_s: Annotated[NonNegative, Unit("s")] = 0.0

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of an iteration with draft tokens."""
        return (
            self.iteration_s
            + self.sequence_s * (shape.decode_seqs + shape.prefill_seqs)
            + self.token_s * drafts_of(shape).tokens
            + self.kilotoken_s * 0.001 * drafting_context(shape)
        )


def draft_host_of(hosts: Mapping[str, DraftHost], method: str) -> DraftHost | None:
    """Returns the host time of a proposer, or that of all others; None: neither is known."""
    return hosts.get(method) or hosts.get(OTHERS)


class Hosted:
    """Another `Drafting`, and the host's time beside it, in which the devices wait."""

    def __init__(self, drafting: Drafting, host: DraftHost) -> None:
        self._drafting, self._host = drafting, host

    def scaled_by(self, target: TargetScale) -> Hosted:
        """Returns the same drafting on a device whose target is measured; the host's time is as it was."""
        return Hosted(self._drafting.scaled_by(target), self._host)

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds from the end of the pass to that of drafting, and of the host."""
        return self._drafting.seconds(shape) + self._host.seconds(shape)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component."""
        parts = self._drafting.breakdown(shape)
        return parts | {"host": parts["host"] + self._host.seconds(shape)}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of drafting, and the wait for the host."""
        return [*self._drafting.explain(shape), waiting(float(self._host.seconds(shape)))]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of drafting."""
        return self._drafting.flops(shape)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes that drafting reads."""
        return self._drafting.bytes_moved(shape)
