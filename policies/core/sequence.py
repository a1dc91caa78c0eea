"""A sequence of tokens under way in an engine: what policies may read, and what only the core may change."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Protocol

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

    Policies read what is public; the underscored fields belong to EngineCore. A decoding sequence
    advances with its decode set's clock and is not touched itself, so that an iteration costs the same for
    one sequence as for a thousand.
    """

    __slots__ = (
        "_admission",
        "_block_ids",
        "_branches",
        "_computed",
        "_decodes",
        "_displaced_by",
        "_dropped",
        "_end_known",
        "_end_reason",
        "_ends",
        "_finish_reason",
        "_growth",
        "_join",
        "_known",
        "_kv",
        "_max_known",
        "_more_slots",
        "_num_apart",
        "_num_beside",
        "_num_found",
        "_num_loading",
        "_num_lost",
        "_num_preemptions",
        "_num_transfers",
        "_origin",
        "_predicted",
        "_rank",
        "_request",
        "_slot",
        "_state",
        "_steady_from",
        "_swap_tier",
        "_swapped",
        "request_id",
    )

    def __init__(
        self,
        request: Request,
        decodes: Clocked,
        end_known: int,
        end_reason: FinishReason,
        max_known: int,
        predicted: int | None = None,
    ) -> None:
        self._request = request
        self.request_id: Final = request.request_id
        """The request's number; an attribute, as nothing is read more often."""
        self._rank: tuple[float, ...] = ()  # given by the scheduling policy
        self._state = SequenceState.waiting
        self._slot: int | None = None
        self._admission = 0  # number of its last admission
        self._num_preemptions = 0
        self._num_found = 0
        self._num_lost = 0
        self._displaced_by: int | None = None
        self._num_transfers = 0  # which it waits for
        self._num_loading = 0  # the last of its computed tokens whose KV is still on its way
        self._finish_reason: FinishReason | None = None
        self._known = request.prompt.num_tokens  # stale while decoding, like _computed: see num_computed
        self._computed = 0
        self._end_known = end_known  # known tokens at which it ends, and why; policies never see it
        self._end_reason = end_reason
        self._max_known = max_known
        self._predicted = predicted
        self._decodes: Clocked = decodes  # while decoding: whose clock it follows
        self._origin = 0  # while decoding: num_computed - clock of the decode set
        self._dropped = 0  # computed tokens whose KV was given up for good
        self._swapped = 0  # while waiting: computed tokens whose KV lies elsewhere ...
        self._swap_tier = "host"  # ... in host memory, or where Transfer says: "remote", "mirror"
        self._kv: Any = None  # what the KV pool remembers of it
        self._join = 0  # number of its last joining of the decode set
        self._growth: Growth  # while decoding: how its KV grows
        self._steady_from = 0  # while decoding without widening: computed tokens when that began
        self._block_ids: list[int] = []
        self._branches: Branches | None = None  # from the end of its first prefill on, if it branches
        self._ends: tuple[int, ...] = ()  # of its branches: the output tokens after which each ends
        self._more_slots: list[int] = []  # of its other branches
        self._num_apart = 0  # branches' blocks that the pool does not count as the sequence's; see BlockPool
        self._num_beside = 0  # while waiting: blocks that its adapter would take; see EngineCore.can_admit

    @property
    def request(self) -> Request:
        """What the client asked for."""
        return self._request

    @property
    def state(self) -> SequenceState:
        """Where it stands."""
        return self._state

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key: the smallest is admitted first, the largest is preempted first."""
        return self._rank

    @property
    def slot(self) -> int | None:
        """Its row in the engine's arrays while it holds KV."""
        return self._slot

    @property
    def slots(self) -> tuple[int, ...]:
        """The rows of its branches while it holds KV: one, its slot, if it has none."""
        return () if self._slot is None else (self._slot, *self._more_slots)

    @property
    def width(self) -> int:
        """Tokens that it gets in an iteration in which it decodes: branches alive, or to be; else 1."""
        if self._branches is not None:
            return self._branches.width
        branching = self._request.branching
        return 1 if branching is None else branching.width

    @property
    def num_preemptions(self) -> int:
        """How often it lost its KV."""
        return self._num_preemptions

    @property
    def num_lost(self) -> int:
        """Tokens that it had computed when it was preempted last."""
        return self._num_lost

    @property
    def displaced_by(self) -> int | None:
        """The request for whose KV it was preempted last (it may be its own); None: a policy wished it."""
        return self._displaced_by

    @property
    def num_found(self) -> int:
        """Tokens whose KV need not be computed at its last admission: a cache or another tier had it."""
        return self._num_found

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None until then."""
        return self._finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return self._request.prompt.num_tokens

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output tokens at which client, model or KV cache end it at the latest."""
        return self._max_known

    @property
    def num_predicted_tokens(self) -> int:
        """Output tokens that the engine's length predictor expects; ValueError without a predictor."""
        if self._predicted is None:
            raise ValueError("the engine has no length predictor: choose one, such as prediction=histogram")
        return self._predicted

    @property
    def num_swapped(self) -> int:
        """Computed tokens whose KV lies in host memory or in another engine; 0 unless it came from there."""
        return self._swapped

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is stored; of branches, what they share is one token, and a copy another."""
        if self._state is SequenceState.decoding:
            return self._origin + self._decodes.clock
        return self._computed

    @property
    def num_known(self) -> int:
        """Prompt tokens and output tokens so far."""
        if self._state is SequenceState.decoding:
            return self._origin + self._decodes.clock + 1
        return self._known

    @property
    def num_held(self) -> int:
        """Tokens whose KV it holds: the computed ones, less what a lossy cache has dropped."""
        if self._state is SequenceState.decoding and not self._growth.widens:
            return self._steady_from - self._dropped
        return self.num_computed - self._dropped

    @property
    def num_uncomputed(self) -> int:
        """Known tokens that still lack KV: what a prefill has left, 1 while decoding (of each branch)."""
        return self.num_known - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far; of the longest branch, if it has several."""
        if self._branches is not None:
            return self._branches.depth
        return self.num_known - self._request.prompt.num_tokens

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens produced so far, by all its branches together."""
        if self._branches is not None:
            return self._branches.num_emitted
        return self.num_output_tokens

    def __repr__(self) -> str:
        progress = f"{self.num_computed} of {self.num_known} known tokens computed"
        return f"Sequence({self.request_id}, {self._state.name}, {progress})"
