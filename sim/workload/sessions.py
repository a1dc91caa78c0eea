"""Sessions that a closed loop begins, when another one has ended; those that are in progress; conversations.

In a multi-turn conversation each turn's prompt is a shared system prompt and all previous turns.

    turn 0   | system | message 0 |
    turn 1   | system | message 0 | answer 0 | message 1 |
    turn 2   | system | message 0 | answer 0 | message 1 | answer 1 | message 2 |

Every part is a segment with its own content id, answers included, so that a prefix cache can find both the
system prompt, which conversations share, and the tokens that the engine has generated.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from policies.core.request import Prompt, Request, Segment
from sim.workload.arrivals import ArrivalProcess, ClosedLoop
from sim.workload.base import Arrival, Source, SourceAround, WorkloadNotes
from sim.workload.distributions import (
    MAX_TOKENS,
    Distribution,
    FloatArray,
    IntArray,
    require_counts,
    require_not_negative,
    require_positive,
    stream,
    whole_numbers,
    zipf_draws,
)


class SessionPool(SourceAround):
    """The sessions of another source, begun by a closed loop in place of that source's own times.

    Each of the loop's users has one session at a time; a request without a session is one of its own. A
    session has ended when all its requests have, and no more follow. Its requests that do not follow ended
    ones, as recorded calls, keep their times after its first one. The user begins the next session
    think_time_s later, in the order of the source, until there are no more or duration_s has passed.
    """

    def __init__(self, source: Source, loop: ClosedLoop, *, seed: int, duration_s: float | None) -> None:
        """Creates the traffic. source: all sessions; its arrivals come session after session."""
        super().__init__(source)
        self.num_requests = source.num_requests if duration_s is None else None
        self.last_arrival_s = None
        self.is_open_loop = False
        self._loop = loop
        self._rng = stream(seed, "session_pool")
        self._end_s = math.inf if duration_s is None else duration_s
        self._sessions = (list(own) for _, own in groupby(source.arrivals(), lambda one: _key(one.request)))
        self._num_open = Counter[int]()
        """Requests of each session that have not ended."""

    def arrivals(self) -> Iterator[Arrival]:
        firsts_s = self._loop.first_s(num_requests=None, duration_s=self._end_s).tolist()
        return heapq.merge(*map(self._begun, firsts_s), key=lambda arrival: arrival.request.arrival_s)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        following = list(self._source.follow_ups(request, now, num_output_tokens))
        session = _key(request)
        self._num_open[session] += len(following) - 1
        if self._num_open[session]:
            return following
        del self._num_open[session]
        think_s = float(self._loop.think_s(self._rng.standard_normal(1))[0])
        return [*following, *self._begun(now + think_s)]

    def _begun(self, begin_s: float) -> Iterator[Arrival]:
        """Yields the next session, if there is one and it begins in time."""
        session = next(self._sessions, None) if begin_s < self._end_s else None
        if session is not None:
            first = session[0].request
            self._num_open[_key(first)] += len(session)
            for one in session:
                at_s = begin_s + (one.request.arrival_s - first.arrival_s)
                yield one._replace(request=one.request._replace(arrival_s=at_s))


def require_number_in_a_loop(workload: Any, name: str) -> None:
    """Raises ValueError if a closed loop begins the sessions and their number, a field, is not set."""
    if isinstance(workload.arrivals, ClosedLoop) and getattr(workload, name) is None:
        raise ValueError(
            f"{name}=null: must be set with arrivals by a closed loop, as sessions begin when others end"
        )


def begin_s(
    arrivals: ArrivalProcess | ClosedLoop, *, seed: int, num_sessions: int | None, duration_s: float | None
) -> FloatArray:
    """Returns the times at which sessions begin; 0 s for those of a closed loop, which decides them later."""
    if isinstance(arrivals, ClosedLoop):
        assert num_sessions is not None, "checked by require_number_in_a_loop"
        return np.zeros(num_sessions)
    return arrivals.times_s(stream(seed, "arrivals"), num_requests=num_sessions, duration_s=duration_s)


def in_a_loop(
    source: Source, arrivals: ArrivalProcess | ClosedLoop, *, seed: int, duration_s: float | None
) -> Source:
    """Returns the source, whose sessions a closed loop begins if `arrivals` is one."""
    if not isinstance(arrivals, ClosedLoop):
        return source
    return SessionPool(source, arrivals, seed=seed, duration_s=duration_s)


def _key(request: Request) -> int:
    """Returns a number of the session of a request, or a negative one of a request without a session."""
    return -1 - request.request_id if request.session_id is None else request.session_id


class OpenSessions(SourceAround):
    """The requests of another source, of which it keeps the sessions as long as `after` may ask for them."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._session_of: dict[int, int] = {}  # by request id

    def after(self, request_id: int) -> Collection[int]:
        """Returns the sessions with requests behind an id; later calls have the same id or a greater one.

        If the requests up to this id have ended, all requests of the other sessions have ended, and no more
        follow.
        """
        self._session_of = {key: value for key, value in self._session_of.items() if key > request_id}
        return set(self._session_of.values())

    def _changed(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        if request.session_id is not None:
            self._session_of[request.request_id] = request.session_id
        return arrival


MAX_TURNS = 10_000
"""Limit per conversation; the turns are drawn in advance and take memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Conversations that start by `arrivals` and end after their turns or when the context is full.

    num_conversations and duration_s (for first turns) both limit the traffic; at least one must be set. In a
    closed loop each user has one conversation at a time, and num_conversations must be set.
    A conversation draws one of num_system_prompts system prompts, the k-th most popular with weight
    k^-system_prompt_skew (0: all equally popular; 1: Zipf); 0 system prompts: none. A turn is sent
    think_time_s after the previous answer, if its prompt and its answer together fit the model's context.
    A conversation ends when a turn gets no token (it was rejected); after an aborted answer it continues with
    the tokens that were generated.
    """

    task: ClassVar[str] = "chat"
    """Task of the requests, for published rates of drafts."""

    arrivals: ArrivalProcess | ClosedLoop
    turns: Distribution
    message_tokens: Distribution
    answer_tokens: Distribution
    think_time_s: Distribution
    system_prompt_tokens: Distribution
    num_system_prompts: int = 1
    pins_system_prompt: bool = False
    """Whether clients pay for keeping the KV of the system prompt in the cache (`Prompt.num_pinned`)."""
    system_prompt_skew: float = 1.0
    num_conversations: int | None = None
    duration_s: float | None = None
    patience_s: float | None = None

    def __post_init__(self) -> None:
        require_positive(self, "num_conversations", "duration_s", "patience_s")
        require_not_negative(self, "num_system_prompts", "system_prompt_skew")
        require_counts(self, MAX_TURNS, "turns", "turns")
        require_counts(self, MAX_TOKENS, "tokens", "message_tokens", "answer_tokens", "system_prompt_tokens")
        if self.num_conversations is None and self.duration_s is None:
            raise ValueError("num_conversations=null, duration_s=null: at least one must be set")
        require_number_in_a_loop(self, "num_conversations")

    def source(self, *, seed: int, max_model_len: int) -> Source:
        first_s = begin_s(
            self.arrivals, seed=seed, num_sessions=self.num_conversations, duration_s=self.duration_s
        )
        if not len(first_s):
            raise ValueError(
                f"duration_s={self.duration_s}: must be longer; no conversation starts in this time"
            )
        num_turns = whole_numbers(self.turns, stream(seed, "turns").standard_normal(len(first_s)), MAX_TURNS)
        z_T3 = stream(seed, "said").standard_normal((int(num_turns.sum()), 3))
        conversations = ConversationSource(
            first_s=first_s,
            num_turns=num_turns,
            message_tokens=whole_numbers(self.message_tokens, z_T3[:, 0]),
            answer_tokens=whole_numbers(self.answer_tokens, z_T3[:, 1]),
            think_s=self.think_time_s.from_normal(z_T3[:, 2]),
            system_prompts=self._system_prompts(seed),
            system_prompt_of=zipf_draws(
                stream(seed, "system_prompt_of"),
                self.num_system_prompts,
                self.system_prompt_skew,
                len(first_s),
            ),
            max_model_len=max_model_len,
            patience_s=self.patience_s,
            pins_system_prompt=self.pins_system_prompt,
        )
        return in_a_loop(conversations, self.arrivals, seed=seed, duration_s=self.duration_s)

    def _system_prompts(self, seed: int) -> list[Segment]:
        z = stream(seed, "system_prompts").standard_normal(self.num_system_prompts)
        tokens = whole_numbers(self.system_prompt_tokens, z).tolist()
        return [Segment(content_id, num_tokens) for content_id, num_tokens in enumerate(tokens)]


class ConversationSource:
    """The turns of conversations; `session_id` is the conversation.

    All messages and answers are drawn in advance into tables of turns [T], conversation after conversation,
    so that they depend on the conversation and the turn alone and not on the order in which the engine
    finishes. The history of a conversation is read from the segments of its last request.
    """

    def __init__(
        self,
        *,
        first_s: FloatArray,
        num_turns: IntArray,
        message_tokens: IntArray,
        answer_tokens: IntArray,
        think_s: FloatArray,
        system_prompts: list[Segment],
        system_prompt_of: IntArray,
        max_model_len: int,
        patience_s: float | None,
        pins_system_prompt: bool = False,
    ):
        """Creates the traffic.

        first_s, num_turns, system_prompt_of: one per conversation; tables of turns: [T].
        """
        self.patience_s = patience_s
        self.last_begin_s = float(first_s[-1])
        self.notes = WorkloadNotes()
        self._first_s = first_s
        self._num_turns = num_turns
        self._first_turn = np.cumsum(num_turns) - num_turns  # [conversation] -> row of turn 0 in the tables
        self._message_tokens = message_tokens
        self._answer_tokens = answer_tokens
        self._think_s = think_s
        self._system_prompts = system_prompts
        self._system_prompt_of = system_prompt_of
        self._max_model_len = max_model_len
        self._pins_system_prompt = pins_system_prompt
        self._num_created = 0
        self.last_arrival_s: float | None = None
        self.num_requests: int | None = self._num_turns_that_fit()
        if not self.num_requests:
            raise ValueError(
                f"max_model_len={max_model_len}: must be larger; the first turn of no conversation fits"
            )

    def arrivals(self) -> Iterator[Arrival]:
        for conversation, arrival_s in enumerate(self._first_s.tolist()):
            history: tuple[Segment, ...] = ()
            if self._system_prompts:
                history = (self._system_prompts[self._system_prompt_of[conversation]],)
            num_history = sum(segment.num_tokens for segment in history)
            arrival = self._turn(conversation, 0, arrival_s, history, num_history)
            if arrival is None:
                self.notes.skip("conversations with a first turn longer than the context")
            else:
                yield arrival

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        conversation = request.session_id
        assert conversation is not None, "every request of a conversation carries its number"
        history = request.prompt.segments
        turn = (len(history) - len(self._system_prompts[:1])) // 2
        if num_output_tokens == 0 or turn + 1 >= self._num_turns[conversation]:
            return ()
        row = int(self._first_turn[conversation]) + turn
        assert request.answer_id is not None
        answer = Segment(request.answer_id, num_output_tokens)
        num_history = request.prompt.num_tokens + num_output_tokens
        next_s = now + float(self._think_s[row + 1])
        arrival = self._turn(conversation, turn + 1, next_s, (*history, answer), num_history)
        if arrival is None:
            self.notes.num_conversations_cut += 1
            return ()
        return (arrival,)

    def _turn(
        self, conversation: int, turn: int, arrival_s: float, history: tuple[Segment, ...], num_history: int
    ) -> Arrival | None:
        """Creates the request of a turn; None if prompt and answer together do not fit the context."""
        row = int(self._first_turn[conversation]) + turn
        message = Segment(self._content_id(row), int(self._message_tokens[row]))
        segments, num_tokens = (*history, message), num_history + message.num_tokens
        num_output_tokens = int(self._answer_tokens[row])
        if num_tokens + num_output_tokens > self._max_model_len:
            return None
        pins = self._pins_system_prompt and bool(self._system_prompts)
        prompt = Prompt(num_tokens, segments, segments[0].num_tokens if pins else 0)
        answer_id = self._content_id(row) + 1
        request = Request(self._num_created, arrival_s, prompt, session_id=conversation, answer_id=answer_id)
        self._num_created += 1
        return Arrival(request, num_output_tokens)

    def _content_id(self, row: int) -> int:
        """Returns the content id of the message in a row of the tables; its answer has the next id."""
        return len(self._system_prompts) + 2 * row

    def _num_turns_that_fit(self) -> int:
        """Counts the turns that are sent if no answer is cut short."""
        tokens_T = self._message_tokens + self._answer_tokens
        sum_T = np.cumsum(tokens_T)
        before_T = np.repeat(sum_T[self._first_turn] - tokens_T[self._first_turn], self._num_turns)
        total_T = sum_T - before_T
        if self._system_prompts:
            system_tokens = np.array([segment.num_tokens for segment in self._system_prompts])
            total_T += np.repeat(system_tokens[self._system_prompt_of], self._num_turns)
        return int(np.count_nonzero(total_T <= self._max_model_len))
