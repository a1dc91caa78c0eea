"""A sequence of tokens under way in an engine: the record that the core keeps of it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from policies.core.request import Request

if TYPE_CHECKING:
    from policies.caching.branches import Branches
    from policies.core.growth import Growth


class SequenceState(Enum):
    """Where a sequence stands in its engine."""

    waiting = 0  # holds no slot; also after a preemption
    prefilling = 1  # holds KV for a part of its known tokens
    decoding = 2  # KV for all known tokens but the newest: one token an iteration
    ended = 3
    paused = 4  # as decoding, but a policy makes it stand still; it keeps slot and KV
    loading = 5  # holds slot and blocks; KV from another tier is on its way into them
    leaving = 6  # holds slot and blocks until another engine has a copy of its KV


AT_WORK = (SequenceState.prefilling, SequenceState.decoding, SequenceState.paused)
"""States of sequences that may compute; the others wait, for KV too, or have ended."""


class FinishReason(Enum):
    """Why a sequence ended."""

    stop = 0  # the answer was complete
    length = 1  # max_tokens, the model's context or the KV cache's size was reached
    aborted = 2  # the client gave up
    migrated = 3  # it goes on in another engine


class Clocked(Protocol):
    """What counts for a decoding sequence: the decode set that it is in, or its own branches."""

    @property
    def clock(self) -> int:
        """How far it has counted."""
        ...


class Sequence:
    """Tokens known (prompt and answer so far) and tokens computed (their KV stored).

        0            num_computed        num_known
        |-- in KV ---|-- num_uncomputed -|

    The core and the KV pool write these attributes. A decoding sequence advances with the clock of its decode
    set and is not touched itself, so that an iteration costs the same for one sequence as for a thousand.
    Attributes of a feature that most sequences do not use have their defaults in the class: a sequence
    without swaps, loads, adapters and branches does not store them.
    """

    slot: int | None = None
    """Its row in the engine's arrays while it holds KV."""
    admission = 0
    """The number of its last admission: the engine counts them."""
    num_found = 0
    """Tokens whose KV need not be computed at its last admission: a cache or another tier had it."""
    num_dropped = 0
    """Computed tokens whose KV a lossy cache has given up for good."""
    finish_reason: FinishReason | None = None
    """Why it ended; None until then."""
    kv: Any = None
    """What the KV pool remembers of it."""

    num_preemptions = 0
    """How often it lost its KV."""
    num_lost = 0
    """Tokens that it had computed when it was preempted last."""
    displaced_by: int | None = None
    """The request for whose KV it was preempted last (it may be its own); None: a policy wished it."""

    num_transfers = 0
    """Transfers, of KV or of its adapter, that it waits for."""
    num_loading = 0
    """Of its computed tokens, the last ones whose KV is still on its way."""
    num_swapped = 0
    """Computed tokens whose KV lies in host memory or in another engine; 0 unless it came from there."""
    swap_tier = "host"
    """Where that KV lies: "host", or a tier of another engine; see `Transfer`."""
    num_beside = 0
    """While it waits: KV blocks that its adapter would take."""

    branches: Branches | None = None
    """Its branches, from the end of its first prefill on, if it has several answers."""
    branch_ends: tuple[int, ...] = ()
    """Per branch: the output tokens after which it ends."""
    more_slots: tuple[int, ...] = ()
    """The slots of its branches but the first."""
    num_apart = 0
    """Blocks of its branches that the pool does not count as the sequence's; see `BlockPool`."""

    origin = 0
    """While it decodes: num_computed less the clock that it follows."""
    join_number = 0
    """While it decodes: the number of its joining; the decode set counts them."""
    steady_from = 0
    """While it decodes without widening: computed tokens when that began."""
    growth: Growth
    """While it decodes: how its KV grows."""

    def __init__(
        self,
        request: Request,
        clock_source: Clocked,
        end_known: int,
        end_reason: FinishReason,
        max_num_tokens: int,
        predicted: int | None = None,
    ) -> None:
        self.request = request
        """What the client asked for."""
        self.request_id = request.request_id
        """The number of its request."""
        self.state = SequenceState.waiting
        """Where it stands."""
        self.rank: tuple[float, ...] = ()
        """Sort key of the scheduling policy: the smallest is admitted first, the largest preempted first."""
        self.stored_known = request.prompt.num_tokens
        """Known tokens when it last stood still: `num_known`, but stale while it decodes."""
        self.stored_computed = 0
        """Computed tokens when it last stood still: `num_computed`, but stale while it decodes."""
        self.end_known = end_known
        """Known tokens at which it ends, which policies never see."""
        self.end_reason = end_reason
        """Why it will end there."""
        self.max_num_tokens = max_num_tokens
        """Prompt and output tokens at which client, model or KV cache end it at the latest."""
        self.predicted = predicted
        """Output tokens that the engine's length predictor expects; None without a predictor."""
        self.clock_source = clock_source
        """What counts its tokens while it decodes."""
        self.block_ids: list[int] = []
        """Physical ids of its KV blocks, as far as somebody has asked for them."""

    @property
    def slots(self) -> tuple[int, ...]:
        """The rows of its branches while it holds KV: one, its slot, if it has none."""
        return () if self.slot is None else (self.slot, *self.more_slots)

    @property
    def width(self) -> int:
        """Tokens that it gets in an iteration in which it decodes: branches alive, or to be; else 1."""
        if self.branches is not None:
            return self.branches.width
        branching = self.request.branching
        return 1 if branching is None else branching.width

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return self.request.prompt.num_tokens

    @property
    def num_predicted_tokens(self) -> int:
        """Output tokens that the engine's length predictor expects; ValueError without a predictor."""
        if self.predicted is None:
            raise ValueError("the engine has no length predictor: choose one, such as prediction=histogram")
        return self.predicted

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is stored; of branches, what they share is one token, and a copy another."""
        if self.state is SequenceState.decoding:
            return self.origin + self.clock_source.clock
        return self.stored_computed

    @property
    def num_known(self) -> int:
        """Prompt tokens and output tokens so far."""
        if self.state is SequenceState.decoding:
            return self.origin + self.clock_source.clock + 1
        return self.stored_known

    @property
    def num_held(self) -> int:
        """Tokens whose KV it holds: the computed ones, less what a lossy cache has dropped."""
        if self.state is SequenceState.decoding and not self.growth.widens:
            return self.steady_from - self.num_dropped
        return self.num_computed - self.num_dropped

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that still lack KV: what a prefill has left, 1 while decoding (of each branch)."""
        return self.num_known - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far; of the longest branch, if it has several."""
        if self.branches is not None:
            return self.branches.depth
        return self.num_known - self.request.prompt.num_tokens

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens produced so far, by all its branches together."""
        if self.branches is not None:
            return self.branches.num_emitted
        return self.num_output_tokens

    def __repr__(self) -> str:
        progress = f"{self.num_computed} of {self.num_known} known tokens computed"
        return f"Sequence({self.request_id}, {self.state.name}, {progress})"
