"""The read-only view that policies have of a sequence: everything except when it will end."""

from __future__ import annotations

from typing import Protocol

from policies.core.request import Request
from policies.core.sequence import FinishReason, SequenceState


class SequenceView(Protocol):
    """A `Sequence` as policies see it; its properties can be read and not written."""

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
        """Tokens whose KV is stored; with branches, a shared token counts once and each copy once more."""
        ...

    @property
    def num_known(self) -> int:
        """Number of prompt tokens and output tokens so far."""
        ...

    @property
    def num_held(self) -> int:
        """Number of tokens whose KV it holds: the computed ones minus those a lossy cache has dropped."""
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
        """Tokens whose KV a cache or another tier held at its last admission; they need no computation."""
        ...

    @property
    def num_swapped(self) -> int:
        """Computed tokens whose KV lies in host memory or in another engine; 0 unless it came from there."""
        ...

    @property
    def num_preemptions(self) -> int:
        """Number of times it lost its KV."""
        ...

    @property
    def num_lost(self) -> int:
        """Tokens that it had computed when it was last preempted."""
        ...

    @property
    def displaced_by(self) -> int | None:
        """The request that needed its KV at its last preemption (may be its own); None.

        A policy asked for it.
        """
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why it ended; None until then."""
        ...
