"""The read-only view of a sequence for policies: all attributes except its true end."""

from __future__ import annotations

from typing import Protocol

from policies.core.request import Request
from policies.core.sequence import FinishReason, SequenceState


class SequenceView(Protocol):
    """A `Sequence` as policies see it; its properties can be read and not written.

    A type checker refuses what is not declared here. The true end is private at run time, too; the
    conformance suite finds policies with decisions that depend on it (`blind_to_the_truth`).
    """

    @property
    def request_id(self) -> int:
        """Id of its request."""
        ...

    @property
    def request(self) -> Request:
        """The request as the client sent it."""
        ...

    @property
    def state(self) -> SequenceState:
        """The state of the sequence in its engine."""
        ...

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: the smallest is admitted first, the largest is preempted first."""
        ...

    @property
    def slot(self) -> int | None:
        """Its row in the engine's arrays while it holds KV."""
        ...

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of its branches while it holds KV; only its own slot if it has no branches."""
        ...

    @property
    def width(self) -> int:
        """Tokens per decode iteration: the number of branches alive (or requested), 1 without branches."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        ...

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output tokens at which client, model or KV cache end it at the latest."""
        ...

    @property
    def num_predicted_tokens(self) -> int:
        """Output tokens that the engine's length predictor expects; ValueError without a predictor."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens with stored KV; with branches, a shared token counts once and each copy counts."""
        ...

    @property
    def num_known(self) -> int:
        """Number of prompt tokens plus output tokens so far."""
        ...

    @property
    def num_held(self) -> int:
        """Number of tokens with KV in the cache: computed tokens minus those dropped by a lossy cache."""
        ...

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: the rest of a prefill, or 1 while decoding (1 per branch)."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far; those of the longest branch if there are several."""
        ...

    @property
    def num_emitted_tokens(self) -> int:
        """Number of output tokens so far, summed over its branches."""
        ...

    @property
    def num_found(self) -> int:
        """Tokens with KV in a cache or another tier at its last admission; they were not computed again."""
        ...

    @property
    def num_swapped(self) -> int:
        """Computed tokens with KV in host memory or in another engine, to be loaded; else 0."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions."""
        ...

    @property
    def num_lost(self) -> int:
        """Tokens that it had computed when it was last preempted."""
        ...

    @property
    def displaced_by(self) -> int | None:
        """Id of the request that needed its blocks at its last preemption (may be its own id).

        None if a policy preempted it.
        """
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why it ended; None until then."""
        ...
