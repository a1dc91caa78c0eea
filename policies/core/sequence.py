"""The record of a sequence in an engine, and its read-only view for policies.

The view has all attributes except the true end of the sequence.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from policies.core.request import Request

if TYPE_CHECKING:
    from policies.caching.block_tables import Branches


class Growth(NamedTuple):
    """Growth of the KV of a decoding sequence, until it has computed `until` tokens.

    takes_blocks: whether it needs another block every block_size tokens; if not, it has all its blocks.
    widens: whether it attends to one more token every iteration; if not, it has reached a window.
    until: computed tokens at which the pool must be asked again; None: never.
    """

    takes_blocks: bool = True
    widens: bool = True
    until: int | None = None


PAGED = Growth()
"""Growth of a paged KV cache: one block every block_size tokens, without a limit."""

AT_LIMIT = Growth(takes_blocks=False, until=0)
"""Growth of a sequence without room for its next token: the pool must be asked before it is computed."""


class SequenceState(Enum):
    """The state of a sequence in its engine."""

    waiting = 0  # holds no slot; also after a preemption
    prefilling = 1  # holds KV for a part of its known tokens
    decoding = 2  # KV for all known tokens but the newest: one token per iteration
    ended = 3
    paused = 4  # as decoding, but stopped by a policy; it keeps slot and KV
    loading = 5  # holds slot and blocks; KV from another tier is being loaded into them
    leaving = 6  # holds slot and blocks until another engine has a copy of its KV
    ending = 7  # its output is complete; it holds slot and blocks until the next commit (endings.py)
    computing = 8  # in a batch in a pipeline (parts.py)


# In Python 3.11, reading a member through its enum's class takes 50 ns, reading a constant of a module 2 ns.
WAITING: Final = SequenceState.waiting
PREFILLING: Final = SequenceState.prefilling
DECODING: Final = SequenceState.decoding
ENDED: Final = SequenceState.ended
PAUSED: Final = SequenceState.paused
LOADING: Final = SequenceState.loading
LEAVING: Final = SequenceState.leaving
ENDING: Final = SequenceState.ending
COMPUTING: Final = SequenceState.computing

ACTIVE_STATES = (PREFILLING, DECODING, PAUSED)
"""States in which a sequence may compute; in the others it waits (for a slot or KV) or has ended."""


class FinishReason(Enum):
    """Reason why a sequence ended."""

    stop = 0  # the output is complete
    length = 1  # max_tokens, the model's context or the KV cache's size was reached
    aborted = 2  # the client aborted the request
    migrated = 3  # it continues in another engine


class Clocked(Protocol):
    """The clock of a decoding sequence: its decode set or its branches."""

    @property
    def clock(self) -> int:
        """Iterations counted so far."""
        ...


class Sequence:
    """A sequence with its known tokens (prompt and output so far) and computed tokens (with stored KV).

        0            num_computed        num_known
        |-- in KV ---|-- num_uncomputed -|

    The core and the KV pool write these attributes. A decoding sequence advances with the clock of its decode
    set and is not changed itself, so that an iteration takes the same time for one sequence as for a
    thousand. Its true end is private to the core: policies get sequences as a `SequenceView`.
    """

    __slots__ = (
        "_branch_ends",
        "_end_known",
        "_end_reason",
        "admission",
        "block_ids",
        "branches",
        "clock_source",
        "displaced_by",
        "dp_rank",
        "finish_reason",
        "growth",
        "join_number",
        "kv",
        "max_num_tokens",
        "more_slots",
        "num_adapter_blocks",
        "num_dropped",
        "num_extra_blocks",
        "num_found",
        "num_loading",
        "num_lost",
        "num_preemptions",
        "num_swapped",
        "num_transfers",
        "num_unread",
        "num_unreserved_blocks",
        "origin",
        "predicted",
        "rank",
        "request",
        "request_id",
        "slot",
        "state",
        "steady_from",
        "stored_computed",
        "stored_known",
        "swap_tier",
    )

    def __init__(
        self,
        request: Request,
        clock_source: Clocked,
        end_known: int,
        end_reason: FinishReason,
        max_num_tokens: int,
    ) -> None:
        self.request = request  # the request of the client
        self.request_id = request.request_id
        self.state = WAITING
        self.rank: tuple[float, ...] = ()  # the smallest is admitted first, the largest preempted first
        self.stored_known = request.prompt.num_tokens  # num_known; not updated while it decodes
        self.stored_computed = 0  # num_computed; not updated while it decodes
        self._end_known = end_known  # known tokens at which it ends
        self._end_reason = end_reason  # reason of that end
        self.max_num_tokens = max_num_tokens  # upper bound by client, model and KV cache
        self.predicted: int | None = None  # output tokens that the length predictor expects
        self.finish_reason: FinishReason | None = None  # reason why it has ended
        self.dp_rank = 0  # rank of data-parallel attention that computes it
        # Valid while it runs.
        self.slot: int | None = None  # its row in the engine's arrays
        self.admission = 0  # sequence number of its last admission
        self.num_found = 0  # its tokens found in a cache or another tier at its last admission
        self.num_dropped = 0  # computed tokens with KV that a lossy cache has dropped
        self.kv: Any = None  # the KV pool's record of this sequence
        self.block_ids: list[int] = []  # physical ids of its KV blocks, as far as assigned
        self.num_unread = 0  # last computed tokens that an asynchronous engine has not read yet
        # Valid while it decodes.
        self.clock_source = clock_source  # the clock that counts its tokens
        self.origin = 0  # num_computed minus that clock
        self.join_number = 0  # number that the decode set gave it when it joined
        self.steady_from = 0  # if its context does not grow: computed tokens when it stopped growing
        self.growth = PAGED  # growth of its KV
        # For sequences that were preempted, or wait for KV or an adapter.
        self.num_preemptions = 0
        self.num_lost = 0  # tokens that it had computed at its last preemption
        self.displaced_by: int | None = None  # request that needed its blocks; None: a policy preempted it
        self.num_transfers = 0  # transfers of KV or of its adapter that it waits for
        self.num_loading = 0  # last computed tokens, with KV that is still being loaded
        self.num_swapped = 0  # computed tokens with KV in another tier or engine
        self.swap_tier = "host"  # the tier that holds that KV; see `Transfer`
        self.num_adapter_blocks = 0  # KV blocks that its adapter needs
        self.num_unreserved_blocks = 0  # KV blocks of its known tokens that need not be free at its admission
        # For sequences with branches.
        self.branches: Branches | None = None  # set at the end of its first prefill
        self._branch_ends: tuple[int, ...] = ()  # per branch, the output tokens after which it ends
        self.more_slots: tuple[int, ...] = ()  # slots of its branches except the first
        self.num_extra_blocks = 0  # blocks of its branches or adapter; see `BlockPool`

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of its branches while it holds KV; only its own slot if it has no branches."""
        return () if self.slot is None else (self.slot, *self.more_slots)

    @property
    def width(self) -> int:
        """Tokens per decode iteration: the number of branches alive (or requested), 1 without branches."""
        if self.branches is not None:
            return self.branches.width
        branching = self.request.branching
        return 1 if branching is None else branching.width

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return self.request.prompt.num_tokens

    @property
    def num_predicted_tokens(self) -> int:
        """Output tokens that the engine's length predictor expects; ValueError without a predictor."""
        if self.predicted is None:
            raise ValueError("the engine has no length predictor: choose one, such as prediction=histogram")
        return self.predicted

    @property
    def num_computed(self) -> int:
        """Tokens with stored KV; with branches, a shared token counts once and each copy counts."""
        if self.state is DECODING:
            return self.origin + self.clock_source.clock
        return self.stored_computed

    @property
    def num_known(self) -> int:
        """Number of prompt tokens plus output tokens so far."""
        if self.state is DECODING:
            return self.origin + self.clock_source.clock + 1
        return self.stored_known

    @property
    def num_held(self) -> int:
        """Number of tokens with KV in the cache: computed tokens minus those dropped by a lossy cache."""
        if self.state is DECODING and not self.growth.widens:
            return self.steady_from - self.num_dropped
        return self.num_computed - self.num_dropped

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV: the rest of a prefill, or 1 while decoding (1 per branch)."""
        return self.num_known - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far; those of the longest branch if there are several."""
        if self.branches is not None:
            return self.branches.depth
        return self.num_known - self.request.prompt.num_tokens

    @property
    def num_emitted_tokens(self) -> int:
        """Number of output tokens so far, summed over its branches."""
        if self.branches is not None:
            return self.branches.num_emitted
        return self.num_output_tokens

    def __repr__(self) -> str:
        progress = f"{self.num_computed} of {self.num_known} known tokens computed"
        return f"Sequence({self.request_id}, {self.state.name}, {progress})"


class SequenceView(Protocol):
    """A `Sequence` as policies see it; its properties can be read and not written.

    A type checker rejects attributes that are not declared here. The true end is also private at run time;
    the conformance suite finds policies whose decisions depend on it (`blind_to_the_truth`).
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
        """Upper bound of its prompt and output tokens, set by client, model and KV cache."""
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
        """Counts the preemptions of the sequence so far."""
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
