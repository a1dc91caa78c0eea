"""Live migrations: running requests move to other replicas, and keep decoding while their KV is copied.

    decision  boundary                     boundary            boundary
       |---------|--- copy of full blocks ----|--- copy of rest --|  decodes on the target
    source: decodes ..........................| stopped           |
    target:        slot and blocks reserved   | more blocks       |

The state of the sequence on the source is read at the end of an iteration (`Replica.at_boundary`). The target
then reserves a slot and blocks in its next plan, as for any sequence whose KV is in another engine, and the
full blocks are copied. Tokens written meanwhile form the next stage, whose blocks are reserved at once, and
so on, until a stage is short enough for the sequence to stop. It keeps slot and blocks on the source until
the last byte has arrived. A migration ends without effect, and the request stays on the source, for the
reasons in `sim.records.run.Outcome`. Blocks are copied whole or, in the last stage, as far as they are
filled. A copy does not slow iterations down: Llumnix's authors measured at most 1 %.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, isnan, nan, nextafter

from simpy.events import ProcessGenerator

from policies.core.engine import EngineCore
from policies.core.limits import RejectedError
from policies.core.plan import Migrant
from policies.core.request import Request
from policies.core.sequence import DECODING, LEAVING, Sequence
from policies.migration import Migration, Move, checked_interval_s, checked_moves
from sim.cluster.autoscaler import PoolCounts
from sim.cluster.fleet import Member, State
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock, Moment, Phase
from sim.engine.replica import Replica
from sim.migration.load_view import LoadView
from sim.migration.target_side import TargetSide
from sim.records.requests import RequestLog
from sim.records.run import MigrationRecord, Outcome
from sim.transfer.kv_transfers import kv_copy
from sim.transfer.network import Flow, Interconnect

BEFORE_COMMITS = -1
"""Phase of the decisions: before all other events of their time, when every replica is in a step or idle,
whether it leaps or steps.
"""


@dataclass(slots=True, eq=False)
class LiveMigration:
    """A migration in progress. admission: number of the admission of the sequence on the source."""

    request: Request
    source: Replica
    target: Replica
    admission: int
    began_s: float
    is_reserved: Moment
    """The event that the target has reserved slot and blocks."""
    stage: int = 0
    num_copied: int = 0
    """Tokens with KV on the target."""
    num_bytes: float = 0.0
    stopped_s: float = nan
    flow: Flow | None = None
    is_over: bool = False

    @property
    def has_stopped(self) -> bool:
        """True in the last stage."""
        return not isnan(self.stopped_s)


class LiveMigrations(GatewayAttachment):
    """All live migrations of a run. message_bytes: see `KvTransferSettings`."""

    def __init__(
        self,
        policy: Migration,
        *,
        gateway: Gateway,
        interconnect: Interconnect,
        pool_counts: PoolCounts,
        requests: RequestLog,
        clock: Clock,
        message_bytes: float,
        requests_remain: Callable[[], bool],
    ) -> None:
        self._records: list[MigrationRecord] = []
        self._policy = policy
        self._gateway = gateway
        self._interconnect = interconnect
        self._pool_counts = pool_counts
        self._requests = requests
        self._clock = clock
        self._message_bytes = message_bytes
        self._requests_remain = requests_remain
        self._in_progress: dict[int, LiveMigration] = {}  # by request id
        self._moved: dict[int, MigrationRecord] = {}  # by request id, until it resumes
        self._busy: set[int] = set()  # indices of replicas with a migration
        self._sides: dict[int, TargetSide] = {}  # by replica index
        gateway.attach(self)
        for replica in gateway.fleet.replicas:
            self.attach_to(replica)
        clock.begin(self._decide_in_turn())

    def attach_to(self, replica: Replica) -> None:
        """Attaches the receiving side to a new replica."""
        side = self._sides[replica.index] = TargetSide(replica, self)
        replica.attach(side)

    def all_records(self) -> tuple[MigrationRecord, ...]:
        """Returns the records of ended migrations, including requests that have not resumed yet."""
        return (*self._records, *self._moved.values())

    # Decisions.

    def _decide_in_turn(self) -> ProcessGenerator:
        """Decides at the policy's interval while requests remain."""
        while (interval_s := checked_interval_s(self._policy)) is not None:
            yield self._clock.at(self._clock.now + interval_s, BEFORE_COMMITS)
            if not self._requests_remain():
                return
            self._decide()

    def _decide(self) -> None:
        """Begins the migrations chosen by the policy."""
        fleet, now = self._gateway.fleet, self._clock.now
        members = [member for member in fleet.members if member.state in (State.serving, State.draining)]
        replicas = [self._load(member, now) for member in members]
        for move in checked_moves(self._policy, self._policy.moves(replicas, now), replicas):
            self._begin(move, now)

    def _load(self, member: Member, now: float) -> LoadView:
        replica = member.replica
        is_draining, is_migrating = member.state is State.draining, replica.index in self._busy
        return LoadView(replica, member.pool_index, now, is_draining=is_draining, is_migrating=is_migrating)

    def _begin(self, move: Move, now: float) -> None:
        replicas = self._gateway.fleet.replicas
        source, target = replicas[move.source], replicas[move.target]
        seq = source.core.find(move.request_id)
        assert seq is not None
        migration = LiveMigration(seq.request, source, target, seq.admission, now, Moment(self._clock, None))
        self._in_progress[move.request_id] = migration
        self._busy |= {move.source, move.target}
        self._clock.begin(self._migrate(migration))

    # Stages.

    def _migrate(self, migration: LiveMigration) -> ProcessGenerator:
        """Copies a sequence stage by stage.

        The target then continues it, unless the migration is given up.
        """
        while not migration.has_stopped:
            boundary = Moment(self._clock, None)
            migration.source.at_boundary(boundary.happen)
            yield boundary
            if migration.is_over:
                return
            stage = self._begin_stage(migration)
            if stage is None:
                return
            num_known, num_tokens = stage
            if migration.stage == 1:
                migration.target.at_boundary(partial(self._adopt, migration, num_known, num_tokens))
                yield migration.is_reserved
            elif not self._extend(migration, num_known, num_tokens):
                return
            num_bytes = self._send(migration, num_tokens)
            assert migration.flow is not None
            yield migration.flow
            migration.flow = None
            migration.num_copied = num_tokens
            migration.num_bytes += num_bytes
        self._finish(migration)

    def _begin_stage(self, migration: LiveMigration) -> tuple[int, int] | None:
        """Begins the next stage, at the end of an iteration of the source.

        Returns the known tokens of the sequence, and its tokens with KV on the target after the stage; None
        if the migration is given up.
        """
        request_id, core = migration.request.request_id, migration.source.core
        seq = core.find(request_id)
        if seq is None or seq.state is not DECODING or seq.admission != migration.admission:
            self._give_up(migration, Outcome.preempted)
            return None
        migration.stage += 1
        block_size, num_copied = core.block_pool.block_size, migration.num_copied
        num_full = (seq.num_computed - 1) // block_size * block_size
        num_known, num_tokens = seq.num_known, num_full
        if num_full <= num_copied or seq.num_computed - num_copied <= self._policy.last_stage_tokens:
            num_tokens = seq.num_computed
            self._stop(migration, seq)
        elif migration.stage >= self._policy.max_stages:
            self._give_up(migration, Outcome.too_long)
            return None
        return num_known, num_tokens

    def _stop(self, migration: LiveMigration, seq: Sequence) -> None:
        """Stops a sequence on the source; it keeps slot and blocks."""
        recorder, now = migration.source.recorder, self._clock.now
        recorder.tokens.preempted(seq)
        recorder.events.hand_over(seq, now)
        migrant = migration.source.core.begin_kv_transfer(seq.request_id)
        assert migrant is not None, f"{seq!r} cannot be transferred"
        migration.stopped_s = now

    def _adopt(self, migration: LiveMigration, num_known: int, num_tokens: int) -> None:
        """Adds a sequence to the target, whose next plan reserves a slot and blocks: see `fetch`."""
        if migration.is_over:
            return
        request, fleet = migration.request, self._gateway.fleet
        if fleet.members[migration.target.index].state is not State.serving:
            self._give_up(migration, Outcome.no_room)
            return
        stop_after = self._gateway.attempts[request.request_id].stop_after
        try:
            self._sides[migration.target.index].adopt(Migrant(request, num_known, num_tokens), stop_after)
        except RejectedError:
            self._give_up(migration, Outcome.no_room)

    def fetch(self, request_id: int, num_tokens: int, *, had_room_at_once: bool) -> None:
        """Starts the first copy of a sequence for which the target's plan has reserved slot and blocks."""
        self._in_progress[request_id].is_reserved.happen()

    def refused(self, request_id: int, now: float) -> None:
        """Gives a migration up just after the plan that had no slot or blocks for it.

        At the time of the plan it would be too early, because other replicas may still have to plan.
        """
        migration = self._in_progress.get(request_id)
        if migration is not None:
            self._clock.begin(self._give_up_after(migration, now))

    def _give_up_after(self, migration: LiveMigration, now: float) -> ProcessGenerator:
        yield self._clock.at(nextafter(now, inf), Phase.arrive)
        if not migration.is_over:
            self._give_up(migration, Outcome.no_room)

    def _extend(self, migration: LiveMigration, num_known: int, num_tokens: int) -> bool:
        """Reserves the blocks of a later stage, also during an iteration of the target.

        Returns False if the target has no room; the migration is then given up.
        """
        request_id, target = migration.request.request_id, migration.target
        core, step, num_due_blocks = target.core, target.step, 0
        if step is not None and (num_ended := bisect_left(step.ends_s, self._clock.now)):
            num_due_blocks = core.blocks_of_repeats(step.plan, num_ended)
        if _has_room(core, request_id, num_tokens, num_due_blocks):
            target.at_boundary(partial(_extend_load, core, request_id, num_known, num_tokens))
            return True
        self._give_up(migration, Outcome.no_room)
        return False

    def _send(self, migration: LiveMigration, num_tokens: int) -> float:
        """Begins the copy of the first num_tokens tokens, except those that the target already has.

        Returns the number of bytes.
        """
        copy = kv_copy(
            self._interconnect,
            migration.source,
            migration.target,
            num_tokens - migration.num_copied,
            self._message_bytes,
        )
        network = self._interconnect.network
        migration.flow = network.send(copy.route, copy.num_bytes + copy.overhead_bytes)
        return copy.num_bytes

    def _finish(self, migration: LiveMigration) -> None:
        """Makes the target continue a sequence whose KV is complete there; frees it on the source."""
        migration.is_over = True
        request, source, target = migration.request, migration.source, migration.target
        request_id = request.request_id
        del self._in_progress[request_id]
        self._moved[request_id] = self._record(migration, Outcome.moved)
        attempt = self._gateway.attempts[request_id]
        self._gateway.notify_router(attempt)
        attempt.replica = target
        self._requests.replica[request_id] = target.index
        self._pool_counts.sent(target, request)
        stays, moves = source.core.leaving[request_id], target.core.loading[request_id]
        moves.num_preemptions = stays.num_preemptions
        target.recorder.events.has_live(request_id, migration.stopped_s)
        self._sides[target.index].received(request_id)
        target.at_boundary(partial(target.loaded, request_id))  # after the blocks were taken
        source.release_migrated(request_id, partial(self._released, migration))

    def _released(self, migration: LiveMigration, seq: Sequence) -> None:
        """Handles the release of slot and blocks on the source."""
        self._free(migration)
        self._pool_counts.released(migration.source)

    def resumed(self, request_id: int, now: float) -> None:
        """Completes the record of a migration when an iteration with the request begins on the target."""
        self._records.append(self._moved.pop(request_id)._replace(resumed_s=now))

    # Ends without effect.

    def _give_up(self, migration: LiveMigration, outcome: Outcome) -> None:
        """Ends a migration; the request stays on the source."""
        migration.is_over = True
        request_id, target = migration.request.request_id, migration.target
        del self._in_progress[request_id]
        if migration.flow is not None:
            migration.num_bytes += self._interconnect.network.cancel(migration.flow)
        self._records.append(self._record(migration, outcome))
        if migration.has_stopped:
            migration.source.at_boundary(partial(self._take_back, migration))
        if target.core.find(request_id) is None:
            self._free(migration)
        else:
            target.release_migrated(request_id, partial(self._withdrawn, migration))

    def _withdrawn(self, migration: LiveMigration, seq: Sequence) -> None:
        """Handles the release of the slot and blocks that were reserved on the target."""
        target = migration.target
        target.recorder.events.withdraw_live(seq.request_id)
        self._free(migration)
        self._gateway.fleet.leave_if_drained(target, self._clock.now)

    def _take_back(self, migration: LiveMigration) -> None:
        """Lets a stopped sequence continue on the source, unless it has ended."""
        request_id, source = migration.request.request_id, migration.source
        seq = source.core.find(request_id)
        if seq is None or seq.state is not LEAVING:
            return
        source.core.cancel_kv_transfer(request_id)
        source.recorder.tokens.emit(seq, self._requests.last_token_s[request_id])
        source.recorder.events.take_back(seq, self._clock.now)

    def aborts(self, request_id: int) -> None:
        self._end(request_id)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request_id = attempt.arrival.request.request_id
        self._end(request_id)
        if request_id in self._moved:  # aborted before it resumed
            self._records.append(self._moved.pop(request_id))

    def _end(self, request_id: int) -> None:
        """Gives up the migration of a request that ends, if there is one."""
        migration = self._in_progress.get(request_id)
        if migration is not None:
            self._give_up(migration, Outcome.ended)

    def _free(self, migration: LiveMigration) -> None:
        self._busy -= {migration.source.index, migration.target.index}

    def _record(self, migration: LiveMigration, outcome: Outcome) -> MigrationRecord:
        return MigrationRecord(
            migration.request.request_id,
            migration.source.index,
            migration.target.index,
            migration.began_s,
            migration.stopped_s,
            nan,
            self._clock.now,
            migration.stage,
            migration.num_bytes,
            outcome,
        )


def _has_room(core: EngineCore, request_id: int, num_computed: int, num_due_blocks: int) -> bool:
    """Returns whether there are blocks for num_computed tokens of a sequence that loads (tier="live").

    The check is immediate, even while a plan is in flight; the blocks are taken between that plan and the
    next one, before any other sequence takes blocks. num_due_blocks: free blocks that the plan in flight will
    take up to the next commit.
    """
    seq, pool = core.loading[request_id], core.block_pool
    needed = pool.blocks_to_grow(seq, seq.stored_computed, num_computed)
    return needed <= pool.num_free - num_due_blocks


def _extend_load(core: EngineCore, request_id: int, num_known: int, num_computed: int) -> None:
    """Takes the checked blocks between commit and plan, unless the sequence has left.

    num_known, num_computed: its tokens in the other engine; the KV of num_computed tokens is copied or being
    copied.
    """
    seq, pool = core.loading.get(request_id), core.block_pool
    if seq is None:
        return
    num_before = seq.stored_computed
    seq.num_loading += num_computed - num_before
    pool.grow(seq, num_before, num_computed)
    seq.stored_computed = seq.num_found = seq.num_swapped = num_computed
    seq.stored_known = num_known
