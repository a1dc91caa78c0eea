"""Host time of draft tokens: scheduling and packing them, keeping those that are accepted, and searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fieldlimits import Checked, NonNegative, Unit
from hwmodels.iterations.iteration import IterationShape
from hwmodels.speculation.steps import drafting_context, drafts_of

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
