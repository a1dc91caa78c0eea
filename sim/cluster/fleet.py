"""All replicas of a run: which of them take requests, which come, and which go.

starting --ready--> serving --drain--> draining --last request ended--> gone
                       |  ^
                   crash  restore
                       v  |
                       down
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from math import inf

from policies.core.request import Request
from sim.cluster.loads import Loads
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.records.run import PoolRecord, ReplicaRecord
from sim.transfer.interconnect import Interconnect
from sim.transfer.kv_replication import KvReplication


class State(Enum):
    """What a replica is doing."""

    starting = auto()
    serving = auto()
    draining = auto()
    down = auto()
    gone = auto()


class Member:
    """A replica, and where it stands."""

    __slots__ = (
        "down",
        "drain_s",
        "end_s",
        "is_reached",
        "pool_index",
        "ready_s",
        "replica",
        "start_s",
        "state",
    )

    def __init__(self, replica: Replica, pool_index: int, start_s: float, state: State) -> None:
        self.replica = replica
        self.pool_index = pool_index
        self.start_s = start_s  # paid for from then on
        self.ready_s = start_s if state is State.serving else None
        self.drain_s: float | None = None
        self.end_s: float | None = None
        self.down: list[list[float]] = []  # from when until when
        self.state = state
        self.is_reached = True  # else its link is down: it goes on with what it has


class ServingModel(dict[str | None, list[Replica]]):
    """Replicas that take requests, by the model that they serve; None: all."""

    def __missing__(self, model: str | None) -> list[Replica]:
        replicas = self[model] = [replica for replica in self[None] if replica.pool.serves == model]
        return replicas


class Fleet:
    """Members by index, which is never used again. Lists of replicas are new ones whenever they change.

    serving      take requests from clients: those of prefill pools, and mixed ones
    prefilling   of these, those that go first: all, or with prefill pools, theirs
    decoding     go on with what prefill replicas have computed: those of decode pools
    decoding_all these and mixed ones

    attach is called with every new replica, for what joins it. on_change is called when a replica begins to
    take requests after the beginning of the run, and when one that was on its way does not come; on_gone with
    every one that has gone.
    """

    def __init__(
        self,
        pools: Sequence[ReplicaPool],
        context: RunContext,
        on_change: Callable[[], None],
        *,
        attach: Callable[[Replica], None],
        interconnect: Interconnect | None = None,
        kv_replication: KvReplication | None = None,
    ) -> None:
        self.pools = pools
        self.members: list[Member] = []
        self.on_call: dict[int, Callable[[], bool]] = {}
        """By pool that may have no replica: order one, if it has none; whether it did."""
        self.serving: list[Replica] = []
        self.prefilling: list[Replica] = []
        self.decoding: list[Replica] = []
        self.decoding_all: list[Replica] = []
        self._there: list[list[Member]] = [[] for _ in pools]  # by pool, all but those that have gone
        self.serving_model = ServingModel()
        """The replicas of `serving` that serve a model, by the model's name."""
        self.on_gone: Callable[[Member], None] | None = None
        self._loads = Loads()
        self._context = context
        self._attach = attach
        self._interconnect = interconnect
        self._kv_replication = kv_replication
        self._on_change = on_change
        for index, pool in enumerate(pools):
            for _ in range(pool.replicas):
                self._append(index, 0.0, State.serving)
        self._list_serving()

    @property
    def replicas(self) -> list[Replica]:
        """All that there ever were, by index."""
        return [member.replica for member in self.members]

    def is_growing(self, model: str | None) -> bool:
        """Whether a replica (None: of any model) is on its way to taking requests."""
        starting = (m.replica.pool for m in self.members if m.state is State.starting)
        return any(pool.role != "decode" and model in (None, pool.serves) for pool in starting)

    def calls_for(self, model: str | None) -> bool:
        """The same; if none is, it is ordered where a pool that may have none has none."""
        if self.is_growing(model):
            return True
        calls = (call for index, call in self.on_call.items() if model in (None, self.pools[index].serves))
        return any(call() for call in calls)

    def for_prompt(self, overflow_tokens: int) -> list[Replica]:
        """The replicas that the router chooses from for a new request.

        Mixed replicas are among them if the others all have overflow_tokens queued.
        """
        first = self.prefilling
        if len(first) < len(self.serving):
            if any(replica.num_queued_tokens < overflow_tokens for replica in first):
                return first
            return self.serving
        return first

    def for_decode(self, request: Request) -> list[Replica]:
        """The replicas that the router chooses from for a request whose prompt is computed.

        Mixed replicas are among them if the others all have no room for the prompt.
        """
        first = self.decoding
        if len(first) < len(self.decoding_all):
            num_tokens = request.prompt.num_tokens
            if any(replica.num_free_kv_tokens - replica.num_unseen_tokens >= num_tokens for replica in first):
                return first
            return self.decoding_all
        return first

    def of_pool(self, pool_index: int, *states: State) -> list[Member]:
        """Members of a pool that are there, in any of these states, by index."""
        return [member for member in self._there[pool_index] if member.state in states]

    def start(self, pool_index: int, now: float, instead_of: Member | None = None) -> Member:
        """A replica more, paid for from now on; `ready` lets it take requests.

        instead_of: on the devices of one that has gone.
        """
        return self._append(pool_index, now, State.starting, instead_of)

    def ready(self, member: Member, now: float) -> None:
        """A start is over."""
        if member.state is State.starting:
            member.ready_s = now
            self._begin_to_serve(member)

    def drain(self, member: Member, now: float) -> None:
        """Send it no more; it goes when its last request has ended. One that does not serve goes at once."""
        if member.state in (State.starting, State.serving, State.down):
            member.drain_s = now
        if member.state in (State.starting, State.down):
            self._leave(member, now)
            self._on_change()
        elif member.state is State.serving:
            member.state = State.draining
            self._list_serving()
            self._leave_if_done(member, now)

    def leave_if_done(self, replica: Replica, now: float) -> None:
        """A request has ended on a replica: it goes, if it was only waiting for that."""
        self._leave_if_done(self.members[replica.index], now)

    def _leave_if_done(self, member: Member, now: float) -> None:
        if member.state is State.draining and not member.replica.num_outstanding:
            self._leave(member, now)

    def crash(self, member: Member, now: float) -> list[int]:
        """Lose what a replica was doing: the requests, by id. One that was draining is gone for good."""
        was = member.state
        if was not in (State.serving, State.draining):
            return []
        member.state = State.down
        member.down.append([now, inf])
        lost = member.replica.crash()
        if self._kv_replication is not None:
            self._kv_replication.crashed(member.replica, lost)
        if was is State.draining:
            self._leave(member, now)
        else:
            self._list_serving()
        return lost

    def restore(self, member: Member, now: float) -> None:
        """A replica that was down takes requests again."""
        if member.state is State.down:
            member.down[-1][1] = now
            self._begin_to_serve(member)

    def reach(self, member: Member, *, is_reached: bool) -> None:
        """The link to a replica is lost, or there again."""
        if member.is_reached != is_reached:
            member.is_reached = is_reached
            if self._interconnect is not None:
                self._interconnect.reach(member.replica.index, is_reached=is_reached)
            if member.state is State.serving:
                self._list_serving()
                if is_reached:
                    self._on_change()

    def slow_links(self, member: Member, factor: float) -> None:
        """Copies of a replica take `factor` times as long: those between memory tiers from now on."""
        member.replica.copies.links.slowdown = factor
        if self._interconnect is not None:
            self._interconnect.slow_links(member.replica.index, factor)

    def records(self, end_s: float) -> tuple[tuple[PoolRecord, ...], tuple[ReplicaRecord, ...]]:
        """Pools and replicas for the records of a run that ends at end_s."""
        pools = []
        for index, pool in enumerate(self.pools):
            own = next((m.replica for m in self.members if m.pool_index == index), None)
            kv = pool.core().block_pool if own is None else own.core.block_pool
            bytes_per_token = pool.links().bytes_per_token
            pools.append(PoolRecord(kv.num_blocks, kv.block_size, bytes_per_token, pool.name))
        return tuple(pools), tuple(_record(member, end_s) for member in self.members)

    def next_serving(self, replica: Replica) -> Replica | None:
        """The next one by index that serves and can be reached; None: there is no other."""
        for place in range(1, len(self.members)):
            other = self.members[(replica.index + place) % len(self.members)]
            if other.state is State.serving and other.is_reached:
                return other.replica
        return None

    def is_reached(self, replica: Replica) -> bool:
        """Whether the link to a replica is up."""
        return self.members[replica.index].is_reached

    def _begin_to_serve(self, member: Member) -> None:
        member.state = State.serving
        self._list_serving()
        self._on_change()

    def _append(self, pool_index: int, now: float, state: State, instead_of: Member | None = None) -> Member:
        pool = self.pools[pool_index]
        replica = Replica(len(self.members), pool, self._context)
        self._attach(replica)
        self._loads.add(replica)
        interconnect = self._interconnect
        if interconnect is not None:
            if pool.device is None:
                raise ValueError(f"device=None: pool {pool.name} sends KV, so its network must be known")
            site = None if instead_of is None else instead_of.replica.index
            host_bytes_per_s = pool.links().host_bytes_per_s
            interconnect.place(replica.index, pool.device, pool.num_devices, host_bytes_per_s, site)
        member = Member(replica, pool_index, now, state)
        self.members.append(member)
        self._there[pool_index].append(member)
        return member

    def _leave(self, member: Member, now: float) -> None:
        member.state = State.gone
        self._there[member.pool_index].remove(member)
        member.end_s = now
        if self.on_gone is not None:
            self.on_gone(member)
        if self._kv_replication is not None:
            self._kv_replication.gone(member.replica)
        if self._interconnect is not None:
            self._interconnect.remove(member.replica.index)

    def _list_serving(self) -> None:
        replicas = [m.replica for m in self.members if m.state is State.serving and m.is_reached]
        listed = self._loads.listed
        self.serving = listed([replica for replica in replicas if replica.pool.role != "decode"])
        self.serving_model = ServingModel({None: self.serving})
        prefilling = listed([replica for replica in replicas if replica.pool.role == "prefill"])
        self.prefilling = prefilling or self.serving
        self.decoding = listed([replica for replica in replicas if replica.pool.role == "decode"])
        self.decoding_all = listed([replica for replica in replicas if replica.pool.role != "prefill"])


def _record(member: Member, end_s: float) -> ReplicaRecord:
    """Of a replica in a run that ends at end_s."""
    gone_s = end_s if member.end_s is None else member.end_s
    ready_s = member.ready_s
    return ReplicaRecord(
        member.pool_index,
        min(member.start_s, end_s),
        gone_s,
        None if ready_s is None or ready_s > end_s else ready_s,
        member.drain_s,
        tuple((down_s, min(up_s, gone_s)) for down_s, up_s in member.down),
    )
