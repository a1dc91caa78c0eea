"""A sequence of tokens under way in an engine: what policies may read, and what only the core may change."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from policies.request import Request

if TYPE_CHECKING:
    from policies.decode_set import DecodeSet


class SequenceState(Enum):
    """Where a sequence stands in its engine."""

    waiting = 0  # holds no KV; also after a preemption
    prefilling = 1  # holds KV for a part of its known tokens
    decoding = 2  # KV for all known tokens but the newest: one token an iteration
    ended = 3


class FinishReason(Enum):
    """Why a sequence ended."""

    stop = 0  # the answer was complete
    length = 1  # max_tokens, the model's context or the KV cache's size was reached
    aborted = 2  # the client gave up


class Sequence:
    """Tokens known (prompt and answer so far) and tokens computed (their KV stored).

        0            num_computed        num_known
        |-- in KV ---|-- num_uncomputed -|

    Policies read the public properties; the underscored fields belong to EngineCore. A decoding sequence
    advances with its DecodeSet's clock and is not touched itself, so that an iteration costs the same for
    one sequence as for a thousand.
    """

    __slots__ = (
        "_block_ids",
        "_computed",
        "_decodes",
        "_end_known",
        "_end_reason",
        "_finish_reason",
        "_join",
        "_known",
        "_num_preemptions",
        "_origin",
        "_rank",
        "_request",
        "_slot",
        "_state",
    )

    def __init__(
        self,
        request: Request,
        rank: tuple[float, ...],
        decodes: DecodeSet,
        end_known: int,
        end_reason: FinishReason,
    ) -> None:
        self._request = request
        self._rank = rank
        self._state = SequenceState.waiting
        self._slot: int | None = None
        self._num_preemptions = 0
        self._finish_reason: FinishReason | None = None
        self._known = request.prompt.num_tokens  # stale while decoding, like _computed: see num_computed
        self._computed = 0
        self._end_known = end_known  # known tokens at which it ends, and why; policies never see it
        self._end_reason = end_reason
        self._decodes = decodes
        self._origin = 0  # while decoding: num_computed - clock of the decode set
        self._join = 0  # number of its last joining of the decode set
        self._block_ids: list[int] = []

    @property
    def request(self) -> Request:
        """What the client asked for."""
        return self._request

    @property
    def request_id(self) -> int:
        """The request's number."""
        return self._request.request_id

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
    def num_preemptions(self) -> int:
        """How often it lost its KV."""
        return self._num_preemptions

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None until then."""
        return self._finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that the client sent."""
        return self._request.prompt.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is stored."""
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
    def num_uncomputed(self) -> int:
        """Known tokens that still lack KV: what a prefill has left to do, 1 while decoding."""
        return self.num_known - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return self.num_known - self._request.prompt.num_tokens

    def __repr__(self) -> str:
        progress = f"{self.num_computed} of {self.num_known} known tokens computed"
        return f"Sequence({self.request_id}, {self._state.name}, {progress})"
