"""What policies see of a sequence: everything but when it will end, read-only."""

from __future__ import annotations

from typing import Protocol

from policies.core.request import Request
from policies.core.sequence import FinishReason, SequenceState


class SequenceView(Protocol):
    """A `Sequence` as policies see it; its properties can be read and not written."""

    @property
    def request_id(self) -> int:
        """The number of its request."""
        ...

    @property
    def request(self) -> Request:
        """What the client asked for."""
        ...

    @property
    def state(self) -> SequenceState:
        """Where it stands."""
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
        """The rows of its branches while it holds KV: one, its slot, if it has none."""
        ...

    @property
    def width(self) -> int:
        """Tokens that it gets in an iteration in which it decodes: branches alive, or to be; else 1."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
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
        """Tokens whose KV is stored; of branches, what they share is one token, and a copy another."""
        ...

    @property
    def num_known(self) -> int:
        """Prompt tokens and output tokens so far."""
        ...

    @property
    def num_held(self) -> int:
        """Tokens whose KV it holds: the computed ones, less what a lossy cache has dropped."""
        ...

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that still lack KV: what a prefill has left, 1 while decoding (of each branch)."""
        ...

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far; of the longest branch, if it has several."""
        ...

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens produced so far, by all its branches together."""
        ...

    @property
    def num_found(self) -> int:
        """Tokens whose KV need not be computed at its last admission: a cache or another tier had it."""
        ...

    @property
    def num_swapped(self) -> int:
        """Computed tokens whose KV lies in host memory or in another engine; 0 unless it came from there."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it lost its KV."""
        ...

    @property
    def num_lost(self) -> int:
        """Tokens that it had computed when it was preempted last."""
        ...

    @property
    def displaced_by(self) -> int | None:
        """The request for whose KV it was preempted last (it may be its own); None: a policy wished it."""
        ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None until then."""
        ...
