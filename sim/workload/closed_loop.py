"""Closed-loop traffic: each user sends the next request after the previous one has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from policies.core.request import Prompt, Request
from sim.workload.arrivals import ClosedLoop
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.chunks import due_s
from sim.workload.distributions import FloatArray, IntArray
from sim.workload.lengths import BoolArray
from sim.workload.streams import stream

TURNS_PER_BLOCK = 16  # turns of every user drawn at once; a change of this number changes the traffic

TokensOf = Callable[[FloatArray], tuple[IntArray, IntArray, BoolArray]]
"""Maps scores [N, 2] to prompt tokens, output tokens, and which were clipped to the context; each [N]."""


class Turns(NamedTuple):
    """TURNS_PER_BLOCK turns of every user; all arrays are [user, turn]."""

    prompt_tokens: IntArray
    output_tokens: IntArray
    clipped: BoolArray
    think_s: FloatArray  # the pause before the turn


class ClosedLoopSource:
    """Users that wait for their output, think, and send the next request; `session_id` is the user.

    Request k of user u is a function of (seed, u, k) alone, so that two policies get the same requests even
    if they finish them in different orders.
    """

    def __init__(
        self,
        *,
        loop: ClosedLoop,
        tokens_of: TokensOf,
        seed: int,
        num_requests: int | None,
        duration_s: float | None,
        priorities: IntArray,
        max_tokens: int | Literal["exact"] | None = None,
        deadlines_s: tuple[float | None, ...] = (),
        patience_s: float | None = None,
    ):
        """Creates the traffic; num_requests and duration_s are limits for all users together.

        priorities: one per user. max_tokens, deadlines_s: as in `sim.workload.synthetic.Synthetic`.
        """
        self.num_requests = num_requests
        self.last_arrival_s: float | None = None
        self.patience_s = patience_s
        self.notes = WorkloadNotes()
        self._loop = loop
        self._tokens_of = tokens_of
        self._seed = seed
        self._max_requests = math.inf if num_requests is None else num_requests
        self._end_s = math.inf if duration_s is None else duration_s
        self._first_s = loop.first_s(num_requests=num_requests, duration_s=duration_s)
        self._priorities = priorities
        self._max_tokens = max_tokens
        self._deadlines_s = deadlines_s
        self._num_created = 0
        self._num_sent = [0] * loop.num_users
        self._blocks: list[Turns] = []

    def arrivals(self) -> Iterator[Arrival]:
        for user, arrival_s in enumerate(self._first_s.tolist()):
            if self._num_created < self._max_requests:  # other users may have sent several requests before
                turns, turn = self._next_turn(user)
                yield self._send(user, arrival_s, turns, turn)

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        user = request.session_id
        assert user is not None, "every request of a closed loop carries its user"
        turns, turn = self._next_turn(user)
        arrival_s = now + float(turns.think_s[user, turn])
        if self._num_created >= self._max_requests or arrival_s >= self._end_s:
            return ()
        return (self._send(user, arrival_s, turns, turn),)

    def _send(self, user: int, arrival_s: float, turns: Turns, turn: int) -> Arrival:
        num_output_tokens = int(turns.output_tokens[user, turn])
        priority = int(self._priorities[user])
        request = Request(
            self._num_created,
            arrival_s,
            Prompt(int(turns.prompt_tokens[user, turn])),
            num_output_tokens if self._max_tokens == "exact" else self._max_tokens,
            priority,
            session_id=user,
            deadline_s=due_s(arrival_s, priority, self._deadlines_s),
        )
        self._num_created += 1
        self._num_sent[user] += 1
        self.notes.num_clipped += int(turns.clipped[user, turn])
        return Arrival(request, num_output_tokens)

    def _next_turn(self, user: int) -> tuple[Turns, int]:
        """Returns the block that holds the user's next turn, and its column in the block."""
        number, turn = divmod(self._num_sent[user], TURNS_PER_BLOCK)
        while number >= len(self._blocks):
            self._blocks.append(self._draw(len(self._blocks)))
        return self._blocks[number], turn

    def _draw(self, block: int) -> Turns:
        shape = (self._loop.num_users, TURNS_PER_BLOCK)
        z = stream(self._seed, "closed_loop", block).standard_normal((*shape, 3))
        prompts, outputs, clipped = self._tokens_of(z[..., :2].reshape(-1, 2))
        think_s = self._loop.think_s(z[..., 2])
        return Turns(prompts.reshape(shape), outputs.reshape(shape), clipped.reshape(shape), think_s)
