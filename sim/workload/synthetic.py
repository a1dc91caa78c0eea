"""Generated traffic: independent requests of an arrival process, or of the users of a closed loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from policies.core.request import Prompt, Request
from sim.workload.arrivals import ArrivalProcess, ClosedLoop, arrival_chunks_s
from sim.workload.base import ONE_ANSWER, Answers, Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, Common, OpenLoopSource, due_s
from sim.workload.distributions import (
    MAX_REQUESTS,
    BoolArray,
    FloatArray,
    IntArray,
    Lengths,
    clip_to_context,
    require_positive,
    stream,
)

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

    Request k of user u is a function only of (seed, u, k), so two policies get the same requests even if they
    finish them in different orders.
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
        """Creates the traffic; num_requests and duration_s are limits for all users in total.

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Synthetic:
    """Settings of independent requests.

    num_requests and duration_s both limit the traffic; at least one must be set. max_tokens is every client's
    limit on its output, at which outputs end; exact: the limit is the output length of the request, as in
    benchmarks that ignore the end-of-sequence token. patience_s: a client aborts its request this long after
    its arrival. priority_shares[p] is the share of requests, or of users in a closed loop, with priority p;
    empty: all have priority 0. branching: several samples per prompt; open loop only. deadlines_s[p]:
    deadline of requests of priority p in seconds after their arrival; null: none; empty: none for all.
    """

    arrivals: ArrivalProcess | ClosedLoop
    lengths: Lengths
    num_requests: int | None = None
    duration_s: float | None = None
    max_tokens: int | Literal["exact"] | None = None
    patience_s: float | None = None
    priority_shares: tuple[float, ...] = ()
    deadlines_s: tuple[float | None, ...] = ()
    branching: Answers = ONE_ANSWER

    def __post_init__(self) -> None:
        object.__setattr__(self, "priority_shares", tuple(float(share) for share in self.priority_shares))
        object.__setattr__(self, "deadlines_s", tuple(self.deadlines_s))
        require_positive(self, "num_requests", "duration_s", "patience_s")
        if isinstance(self.max_tokens, str):
            if self.max_tokens != "exact":
                raise ValueError(f"max_tokens={self.max_tokens}: must be a number of tokens, exact, or null")
        else:
            require_positive(self, "max_tokens")
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("num_requests=null, duration_s=null: at least one must be set")
        rate_per_s = getattr(self.arrivals, "rate_per_s", 0.0)
        if self.num_requests is None and rate_per_s * (self.duration_s or 0.0) > MAX_REQUESTS:
            raise ValueError(
                f"duration_s={self.duration_s}, arrivals.rate_per_s={rate_per_s}: must have at most "
                f"{MAX_REQUESTS:,} requests, the product of both; more would be simulated for days"
            )
        if self.num_requests is None and _never_pauses(self.arrivals):
            raise ValueError("num_requests=null: must be set if the think time of users is 0 s")
        shares = self.priority_shares
        if shares and not (min(shares) >= 0 and abs(sum(shares) - 1) < 1e-6):
            raise ValueError(f"priority_shares={list(shares)}: must be >= 0 and sum to 1")
        if self.branching.width > 1 and isinstance(self.arrivals, ClosedLoop):
            raise ValueError(
                f"branching.width={self.branching.width}: must be 1 in a closed loop; several samples need "
                "open-loop arrivals such as workload/arrivals=poisson"
            )
        due = self.deadlines_s
        if not all(deadline_s is None or 0 < deadline_s < inf for deadline_s in due):
            raise ValueError(f"deadlines_s={list(due)}: must be finite and > 0 s, or null for no deadline")
        if due and len(due) != max(1, len(shares)):
            raise ValueError(
                f"deadlines_s={list(due)}: must have one value for each of priority_shares={list(shares)}"
            )

    def source(self, *, seed: int, max_model_len: int) -> Source:
        if isinstance(self.arrivals, ClosedLoop):
            return ClosedLoopSource(
                loop=self.arrivals,
                tokens_of=partial(self.tokens_of, max_model_len=max_model_len),
                seed=seed,
                num_requests=self.num_requests,
                duration_s=self.duration_s,
                priorities=self.priorities(stream(seed, "priorities"), self.arrivals.num_users),
                max_tokens=self.max_tokens,
                deadlines_s=self.deadlines_s,
                patience_s=self.patience_s,
            )
        return SyntheticSource(self, seed=seed, max_model_len=max_model_len)

    def tokens_of(self, z_N2: FloatArray, max_model_len: int) -> tuple[IntArray, IntArray, BoolArray]:
        """Maps scores to prompt tokens, output tokens, and which were clipped to the context; each [N]."""
        prompts, outputs = self.lengths.from_normal(z_N2)
        if isinstance(self.max_tokens, int):
            outputs = np.minimum(outputs, self.max_tokens)
        return clip_to_context(prompts, outputs, max_model_len)

    def priorities(self, rng: np.random.Generator, count: int) -> IntArray:
        """Draws the priorities of the next requests, or of the users."""
        if not self.priority_shares:
            return np.zeros(count, np.int64)
        upper = np.cumsum(self.priority_shares)[:-1]
        return np.searchsorted(upper, rng.random(count), side="right").astype(np.int64)


class SyntheticSource(OpenLoopSource):
    """Independent requests at the times of an arrival process; the number of a request is its id.

    They are drawn chunk by chunk from their random streams whenever they are read, so any number of requests
    takes the same memory.
    """

    def __init__(self, settings: Synthetic, *, seed: int, max_model_len: int) -> None:
        """Counts the requests. Raises ValueError if there are none."""
        self.num_requests: int | None = 0
        self.last_arrival_s: float | None = None
        self.patience_s = settings.patience_s
        self._settings = settings
        self._seed = seed
        self._max_model_len = max_model_len
        for times_s in self._times_s():
            self.num_requests += len(times_s)
            self.last_arrival_s = float(times_s[-1])
        if not self.num_requests:
            raise ValueError(
                f"duration_s={settings.duration_s}: must be longer; no request arrives in this time"
            )

    @cached_property
    def notes(self) -> WorkloadNotes:
        """Notes on all requests, which are drawn once more for this."""
        return WorkloadNotes(num_clipped=sum(num_clipped for _, num_clipped in self._drawn()))

    def chunks(self) -> Iterator[Chunk]:
        """Yields the requests as columns."""
        return (chunk for chunk, _ in self._drawn())

    def _times_s(self) -> Iterator[FloatArray]:
        """Draws the arrival times in batches."""
        settings = self._settings
        assert not isinstance(settings.arrivals, ClosedLoop)
        drawn = arrival_chunks_s(
            settings.arrivals,
            stream(self._seed, "arrivals"),
            num_requests=settings.num_requests,
            duration_s=settings.duration_s,
        )
        return (times_s for times_s in drawn if len(times_s))

    def _drawn(self) -> Iterator[tuple[Chunk, int]]:
        """Draws the requests from the beginning; yields chunks, each with the number of clipped requests."""
        settings, first = self._settings, 0
        lengths, samples, priorities = (
            stream(self._seed, name) for name in ("lengths", "samples", "priorities")
        )
        common = Common(settings.max_tokens, settings.deadlines_s, settings.branching.branching)
        for times_s in self._times_s():
            count = len(times_s)
            z_N2 = lengths.standard_normal((count, 2))
            prompts, outputs, clipped = settings.tokens_of(z_N2, self._max_model_len)
            samples_NW = self._samples(samples, z_N2)
            if samples_NW is not None:
                longest = samples_NW.max(axis=1)
                prompts, outputs, clipped = clip_to_context(prompts, longest, self._max_model_len)
            chunk = Chunk(
                request_id=np.arange(first, first + count),
                at_s=times_s,
                prompt_tokens=prompts,
                output_tokens=outputs,
                priority=settings.priorities(priorities, count),
                samples_NW=samples_NW,
                common=common,
            )
            first += count
            yield chunk, int(np.count_nonzero(clipped))

    def _samples(self, rng: np.random.Generator, z_N2: FloatArray) -> IntArray | None:
        """Draws the output tokens [N, width] of independent samples; None if requests have one sample.

        The first sample has the same length as without the others.
        """
        settings = self._settings
        width = settings.branching.width
        if width == 1 or settings.branching.every is not None:
            return None
        z_NW = rng.standard_normal((len(z_N2), width))
        z_NW[:, 0] = z_N2[:, 1]
        columns = [settings.lengths.from_normal(np.stack([z_N2[:, 0], z_N], axis=1))[1] for z_N in z_NW.T]
        limit = self._max_model_len - 1
        if isinstance(settings.max_tokens, int):
            limit = min(limit, settings.max_tokens)
        return np.minimum(np.stack(columns, axis=1), limit)


def _never_pauses(arrivals: ArrivalProcess | ClosedLoop) -> bool:
    """Returns whether rejected requests could follow each other endlessly at the same time."""
    return isinstance(arrivals, ClosedLoop) and not arrivals.think_s(np.array([8.0])).any()
