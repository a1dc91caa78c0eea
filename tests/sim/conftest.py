"""Worlds small enough to go through everything: toy hardware, listed traffic, engines that keep a diary.

Test modules get these through fixtures; a hypothesis test draws a `World` from the `worlds` strategy.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from hwmodels.iteration import COMPONENTS
from policies.batching.chunked import Chunked
from policies.batching.prefill_first import PrefillFirst
from policies.batching.static import Static
from policies.caching.paged import KvMemory, Paged
from policies.caching.prefix import PrefixCaching, PrefixPool
from policies.engine import EngineCore
from policies.request import Prompt, Request, Segment
from policies.routing.least_outstanding import LeastOutstanding
from policies.routing.round_robin import RoundRobin
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.priority import Priority
from sim.records import RunRecords
from sim.simulation import Simulation
from sim.workload.base import Arrival, WorkloadNotes

TICK_S = 0.125
"""A binary fraction: sums of ticks are exact, so arrivals and iteration boundaries really coincide."""
UNEVEN_S = 0.1 / np.pi
"""Sums are rounded, and depend on the order in which they are formed."""


class ToyModel:
    """An `IterationModel` of whole ticks: one, one more for 4 tokens, and one more for 32 tokens of context.

    `flat` takes away both: every iteration takes one tick.
    """

    peak_flops_per_s = 1.0
    peak_bytes_per_s = 1.0

    def __init__(self, tick_s=TICK_S, flat=False):
        self.tick_s = tick_s
        self.flat = flat

    def seconds(self, shape):
        num_tokens = shape.decode_seqs + shape.prefill_tokens
        num_context = shape.decode_context_tokens + shape.prefill_context_tokens
        return self.tick_s * (1 + (0 if self.flat else 1) * (num_tokens // 4 + num_context // 32))

    def decode_seconds(self, num_seqs, num_context_tokens, num_iterations):
        growth = range(num_context_tokens, num_context_tokens + num_seqs * num_iterations, num_seqs)
        more = 0 if self.flat else 1
        return [self.tick_s * (1 + more * (num_seqs // 4 + num_context // 32)) for num_context in growth]

    def breakdown(self, shape):
        return dict.fromkeys(COMPONENTS, 0.0) | {"gemm": self.seconds(shape)}

    def flops(self, shape):
        return shape.decode_seqs + shape.prefill_tokens

    def bytes_moved(self, shape):
        return shape.decode_context_tokens + shape.prefill_context_tokens


class Ask(NamedTuple):
    """One request to come and the truth about it."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    max_tokens: int | None = None
    contents: tuple[tuple[int, int], ...] = ()
    """(content id, tokens) of what the prompt begins with."""
    answer_id: int | None = None


class Traffic:
    """A source that sends the listed requests, ids counting from 0.

    Closed loop: num_users of them at their arrival_s, and each end brings the next, think_s later.
    """

    def __init__(self, asks, *, num_users=None, think_s=0.0, patience_s=None, on_end=None):
        self.num_requests = len(asks)
        self.last_arrival_s = None
        self.patience_s = patience_s
        self.notes = WorkloadNotes()
        self.ends = []  # (request id, now, output tokens) as the simulation tells them
        self._think_s = think_s
        self._on_end = on_end
        first = list(asks[:num_users])
        self._first = sorted(first, key=lambda ask: ask.arrival_s)
        self._later = list(asks[len(first) :])
        self._num_made = 0

    def arrivals(self):
        for ask in self._first:
            yield self._make(ask, ask.arrival_s)

    def follow_up(self, request, now, num_output_tokens):
        self.ends.append((request.request_id, now, num_output_tokens))
        if self._on_end is not None:
            self._on_end(len(self.ends))
        return self._make(self._later.pop(0), now + self._think_s) if self._later else None

    def _make(self, ask, arrival_s):
        segments = tuple(Segment(*content) for content in ask.contents)
        request = Request(
            self._num_made,
            arrival_s,
            Prompt(ask.num_prompt_tokens, segments),
            ask.max_tokens,
            ask.priority,
            answer_id=ask.answer_id,
        )
        self._num_made += 1
        return Arrival(request, ask.num_output_tokens)


class Decision(NamedTuple):
    """A committed plan: what it was when it was made, and for how many iterations it was run."""

    index: int
    digest: str
    tokens_by_request: dict[int, int]
    admitted: list[int]
    preempted: list[int]
    num_iterations: int


class DiaryCore(EngineCore):
    """Writes every committed plan down, and checks after every plan and commit that no block went astray."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.decisions = []

    def plan(self, now):
        plan = super().plan(now)
        if plan is not None:
            self._planned = Decision(
                plan.index,
                plan.digest(),
                plan.tokens_by_request,
                [seq.request_id for seq in plan.admitted],
                [seq.request_id for seq in plan.preempted],
                0,
            )
            self._check_block_ids(plan)
        return plan

    def commit(self, plan, outcome, now):
        self.decisions.append(self._planned._replace(num_iterations=outcome.iterations))
        progress = super().commit(plan, outcome, now)
        self.check_integrity()
        return progress

    def _check_block_ids(self, plan):
        tokens = plan.tokens_by_request
        owners = Counter()
        for seq in self.running.values():
            num_tokens = seq.num_computed + tokens.get(seq.request_id, 0)
            ids = self.block_ids(seq, num_tokens)
            assert len(ids) == -(-num_tokens // self.pool.block_size)
            owners.update(ids)
        assert set(owners) <= set(range(1, self.pool.num_blocks + 1))
        shares = isinstance(self.pool, PrefixPool)
        assert shares or all(count == 1 for count in owners.values()), "a block is owned twice"
        assert len(owners) == self.pool.num_used, "a block is leaked"


class Flown(NamedTuple):
    """A run and what it left in the engines."""

    records: RunRecords
    cores: list[DiaryCore]
    source: Traffic


@dataclass(frozen=True, kw_only=True)
class World:
    """All that makes a run. `fly` may be called any number of times: each run starts afresh."""

    asks: tuple[Ask, ...]
    batching: Any = field(default_factory=Chunked)
    scheduling: Any = field(default_factory=Fcfs)
    paged: Any = field(default_factory=lambda: Paged(block_size=4))
    num_blocks: int = 1000
    max_num_seqs: int = 8
    max_model_len: int = 4096
    num_replicas: int = 1
    routing: Callable[[], Any] = RoundRobin
    model: Any = field(default_factory=lambda: ToyModel(flat=True))
    num_users: int | None = None
    think_s: float = 0.0
    patience_s: float | None = None
    until_s: float | None = None
    frontend_s: float = 0.0
    plans_ahead: bool = False
    on_end: Callable[[int], None] | None = None
    """Called with the number of requests that have ended, whenever one more has."""

    def fly(self, leap=True, report=None):
        """Run to the end."""
        cores = [
            DiaryCore(
                batching=self.batching,
                scheduling=self.scheduling,
                pool=self.paged.pool(KvMemory(self.num_blocks)),
                max_num_seqs=self.max_num_seqs,
                max_model_len=self.max_model_len,
            )
            for _ in range(self.num_replicas)
        ]
        source = Traffic(
            self.asks,
            num_users=self.num_users,
            think_s=self.think_s,
            patience_s=self.patience_s,
            on_end=self.on_end,
        )
        simulation = Simulation(
            source=source,
            cores=cores,
            model=self.model,
            routing=self.routing(),
            leap=leap,
            until_s=self.until_s,
            frontend_s=self.frontend_s,
            plans_ahead=self.plans_ahead,
        )
        return Flown(simulation.run(report), cores, source)


def gaps_of(records):
    """Every gap between two tokens of a sequence as (seconds, end), sorted."""
    gaps = zip(records.gap_s.tolist(), records.gap_end_s.tolist(), records.gap_count.tolist(), strict=True)
    return sorted((gap_s, end_s) for gap_s, end_s, count in gaps for _ in range(count))


def assert_same_records(one, other):
    """Bit for bit: every request, every iteration, every gap."""
    assert_same_table(one.requests, other.requests)
    assert_same_table(one.iterations, other.iterations)
    assert gaps_of(one) == gaps_of(other)
    assert one.end_s == other.end_s


def assert_same_table(one, other):
    if not one.equals(other):
        assert list(one.columns) == list(other.columns)
        assert one.dtypes.equals(other.dtypes)
        assert len(one) == len(other)
        differ = [name for name in one.columns if not one[name].equals(other[name])]
        raise AssertionError(f"{differ} differ:\n{one[differ].compare(other[differ])}")


@st.composite
def draw_worlds(draw):
    """Small engines under pressure: tiny caches, budgets and contexts, coinciding arrivals, givers-up.

    Half of them are storms: many answers that outgrow a cache which had room for their prompts.
    """
    storm = draw(st.booleans())
    tick_s = draw(st.sampled_from([TICK_S, UNEVEN_S]))
    half_ticks = draw(st.sampled_from([0, 40, 200]))
    ask = st.builds(
        Ask,
        st.integers(0, half_ticks).map(lambda n: n * tick_s / 2),
        st.integers(1, 9) if storm else st.integers(1, 9) | st.integers(1, 80),
        st.integers(8, 60) if storm else st.integers(1, 9) | st.integers(1, 60),
        st.integers(0, 2),
        st.none() if storm else st.none() | st.none() | st.integers(1, 60),
        st.lists(st.tuples(st.integers(0, 1), st.sampled_from([4, 8, 8, 13, 32])), max_size=3).map(tuple),
        st.none() | st.integers(0, 1),
    )
    num_asks = draw(st.sampled_from([6, 10] if storm else [1, 6]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    num_blocks = draw(st.integers(5, max(5, 64 // block_size)) if storm else st.integers(5, 40))
    batching = st.one_of(
        st.integers(1, 64).map(lambda n: Chunked(max_num_batched_tokens=n)),
        st.integers(1, 64).map(lambda n: PrefillFirst(max_num_batched_tokens=n)),
        st.integers(1, 8).map(lambda n: Static(batch_size=n)),
    )
    return World(
        asks=tuple(draw(st.lists(ask, min_size=num_asks, max_size=14))),
        batching=draw(batching),
        scheduling=draw(st.sampled_from([Fcfs(), Priority()])),
        paged=draw(
            st.builds(
                Paged,
                block_size=st.just(block_size),
                watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
                presume_cached=st.sampled_from([False, False, True]),
            )
            | st.builds(
                PrefixCaching, block_size=st.just(block_size), watermark=st.sampled_from([0.0, 0.0, 0.1, 0.3])
            )
        ),
        num_blocks=num_blocks,
        max_num_seqs=draw(st.integers(2 if storm else 1, 8)),
        max_model_len=draw(st.sampled_from([4096, 4096, 90, 30])),
        num_replicas=draw(st.sampled_from([1, 1, 1, 2] if storm else [1, 2, 3])),
        routing=draw(st.sampled_from([RoundRobin, LeastOutstanding])),
        model=ToyModel(tick_s, flat=draw(st.booleans())),
        num_users=draw(st.none() | st.integers(1, 6)),
        think_s=draw(st.integers(0, 8)) * tick_s / 2,
        patience_s=draw(st.none() | st.none() | st.integers(1, 60).map(lambda n: n * tick_s / 2)),
        until_s=draw(st.none() | st.none() | st.integers(1, 300).map(lambda n: n * tick_s / 2)),
        frontend_s=draw(st.just(0.0) | st.integers(0, 5).map(lambda n: n * tick_s / 2)),
        plans_ahead=draw(st.booleans()),
    )


@pytest.fixture(scope="session")
def worlds():
    """Strategy: any `World`."""
    return draw_worlds()


@pytest.fixture(scope="session")
def ask():
    """`Ask(arrival_s, num_prompt_tokens, num_output_tokens, priority=0, max_tokens=None)`."""
    return Ask


@pytest.fixture(scope="session")
def make_world():
    """`World`, one tick of 0.125 s an iteration and room for everything unless it says otherwise."""

    def make(*asks, **settings):
        return World(asks=asks, **settings)

    return make


@pytest.fixture(scope="session")
def toy_model():
    """`ToyModel(tick_s, flat)`."""
    return ToyModel


@pytest.fixture(scope="session")
def same_records():
    """Asserts that two runs left the same records, bit for bit."""
    return assert_same_records


@pytest.fixture(scope="session")
def list_gaps():
    """Every gap of a run's records as (seconds, end), sorted."""
    return gaps_of
