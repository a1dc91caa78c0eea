"""All replicas of a run and their states.

starting --ready--> serving --drain--> draining --last request ended--> gone
                       |  ^
                   crash  restore
                       v  |
                       down

For policies that compare all replicas, the fleet keeps each load count in one array.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from math import inf

import numpy as np
from numpy.typing import NDArray
from simpy import Interrupt, Process
from simpy.events import ProcessGenerator

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment
from sim.engine.clock import Phase
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.records.run import PoolRecord, ReplicaRecord
from sim.transfer.kv_replication import KvReplication
from sim.transfer.network import Interconnect


class State(Enum):
    """State of a replica; see the diagram of the module."""

    starting = auto()
    serving = auto()
    draining = auto()
    down = auto()
    gone = auto()


class Member:
    """A replica of the fleet, its state, and the times of its state changes in seconds."""

    __slots__ = (
        "cold_start",
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
        self.start_s = start_s  # the replica is paid for from here on
        self.ready_s = start_s if state is State.serving else None
        self.drain_s: float | None = None
        self.end_s: float | None = None
        self.down: list[list[float]] = []  # [start, end] of each downtime, s
        self.state = state
        self.cold_start: Process | None = None  # while it lasts
        self.is_reached = True  # False: its link is down, so it only continues its current requests


class ServingModel(dict[str | None, list[Replica]]):
    """Replicas that accept requests, by the name of the model that they serve; None: all of them."""

    def __init__(self, serving: list[Replica], loads: Loads) -> None:
        super().__init__({None: serving})
        self._loads = loads

    def __missing__(self, model: str | None) -> list[Replica]:
        replicas = [replica for replica in self[None] if replica.pool.serves == model]
        self[model] = listed = self._loads.listed(replicas)
        return listed


class Fleet:
    """The replicas of a run by index; an index is never reused.

    Lists are replaced when they change, never modified.

    serving       accept requests from clients: replicas of prefill and mixed pools
    prefilling    preferred among these: the replicas of prefill pools if there are any, else all
    decoding      continue requests that prefill replicas have computed: replicas of decode pools
    decoding_all  replicas of decode and mixed pools

    attach is called with every new replica. on_change is called when a replica begins to accept requests
    during the run, and when a starting replica is stopped; on_gone is called with every replica that has
    stopped.
    """

    def __init__(
        self,
        pools: SequenceOf[ReplicaPool],
        context: RunContext,
        on_change: Callable[[], None],
        *,
        attach: Callable[[Replica], None],
        interconnect: Interconnect | None = None,
        kv_replication: KvReplication | None = None,
    ) -> None:
        self.pools = pools
        self.members: list[Member] = []
        self.start_from_zero: dict[int, Callable[[], bool]] = {}
        """Functions that start a replica in an empty pool that scales to zero and return whether they did, by
        pool index.
        """
        self.serving: list[Replica] = []
        self.prefilling: list[Replica] = []
        self.decoding: list[Replica] = []
        self.decoding_all: list[Replica] = []
        self._present: list[list[Member]] = [[] for _ in pools]  # by pool, without stopped ones
        self._loads = Loads()
        self.serving_model = ServingModel(self.serving, self._loads)
        """The replicas of `serving`, by the name of their model."""
        self.on_gone: Callable[[Member], None] | None = None
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
        """All replicas of the run, including stopped ones, by index."""
        return [member.replica for member in self.members]

    def is_starting(self, model: str | None) -> bool:
        """Returns whether a replica that will serve a model (None: any model) is starting."""
        starting = (m.replica.pool for m in self.members if m.state is State.starting)
        return any(pool.role != "decode" and model in (None, pool.serves) for pool in starting)

    def will_serve(self, model: str | None) -> bool:
        """Returns whether a replica for a model is starting, after starting one in a pool scaled to zero."""
        if self.is_starting(model):
            return True
        items = self.start_from_zero.items()
        starts = (start for index, start in items if model in (None, self.pools[index].serves))
        return any(start() for start in starts)

    def for_prompt(self, overflow_tokens: int) -> list[Replica]:
        """Returns the replicas from which the router chooses for a new request.

        Mixed replicas are among them if all prefill replicas have overflow_tokens queued.
        """
        first = self.prefilling
        if len(first) < len(self.serving):
            if any(replica.num_queued_tokens < overflow_tokens for replica in first):
                return first
            return self.serving
        return first

    def for_decode(self, request: Request) -> list[Replica]:
        """Returns the replicas from which the router chooses for a request with a complete prefill.

        Mixed replicas are among them if no decode replica has room for the KV of the prompt.
        """
        first = self.decoding
        if len(first) < len(self.decoding_all):
            num_tokens = request.prompt.num_tokens
            if any(replica.num_free_kv_tokens - replica.num_unseen_tokens >= num_tokens for replica in first):
                return first
            return self.decoding_all
        return first

    def of_pool(self, pool_index: int, *states: State) -> list[Member]:
        """Returns the members of a pool in any of these states, by index; never stopped ones."""
        return [member for member in self._present[pool_index] if member.state in states]

    def start(self, pool_index: int, now: float, instead_of: Member | None = None) -> Member:
        """Starts a replica, which is paid for from now on; `ready` makes it accept requests.

        instead_of: a stopped replica whose devices it takes over.
        """
        return self._append(pool_index, now, State.starting, instead_of)

    def start_again(self, member: Member, now: float) -> None:
        """Makes a serving replica without requests start; `ready` makes it accept requests."""
        if member.state is State.serving:
            member.state, member.start_s, member.ready_s = State.starting, now, None
            self._list_serving()

    def serve_after(self, member: Member, cold_start_s: float) -> None:
        """Begins the cold start of a starting replica, at the end of which it accepts requests."""
        member.cold_start = self._context.clock.begin(self._start_cold(member, cold_start_s))

    def _start_cold(self, member: Member, cold_start_s: float) -> ProcessGenerator:
        clock = self._context.clock
        try:
            yield clock.at(clock.now + cold_start_s, Phase.control)
        except Interrupt:  # the replica is no longer needed
            return
        member.cold_start = None
        self.ready(member, clock.now)

    def ready(self, member: Member, now: float) -> None:
        """Makes a replica accept requests at the end of its start."""
        if member.state is State.starting:
            member.ready_s = now
            self._begin_to_serve(member)

    def drain(self, member: Member, now: float) -> None:
        """Stops sending requests to a replica, which is removed after its last request has ended.

        A replica that does not serve is removed at once.
        """
        if member.state in (State.starting, State.serving, State.down):
            member.drain_s = now
        if member.cold_start is not None:
            member.cold_start.interrupt()
            member.cold_start = None
        if member.state in (State.starting, State.down):
            self._leave(member, now)
            self._on_change()
        elif member.state is State.serving:
            member.state = State.draining
            self._list_serving()
            self._leave_if_drained(member, now)

    def leave_if_drained(self, replica: Replica, now: float) -> None:
        """Removes a draining replica after its last request has ended."""
        self._leave_if_drained(self.members[replica.index], now)

    def _leave_if_drained(self, member: Member, now: float) -> None:
        if member.state is State.draining and not member.replica.num_outstanding:
            self._leave(member, now)

    def crash(self, member: Member, now: float) -> list[int]:
        """Crashes a replica; returns the ids of the lost requests. A draining replica does not restart."""
        state_before = member.state
        if state_before not in (State.serving, State.draining):
            return []
        member.state = State.down
        member.down.append([now, inf])
        lost = member.replica.crash()
        if self._kv_replication is not None:
            self._kv_replication.crashed(member.replica, lost)
        if state_before is State.draining:
            self._leave(member, now)
        else:
            self._list_serving()
        return lost

    def restore(self, member: Member, now: float) -> None:
        """Makes a replica that was down accept requests again."""
        if member.state is State.down:
            member.down[-1][1] = now
            self._begin_to_serve(member)

    def set_reached(self, member: Member, *, is_reached: bool) -> None:
        """Sets whether the link to a replica is up."""
        if member.is_reached != is_reached:
            member.is_reached = is_reached
            if self._interconnect is not None:
                self._interconnect.set_reached(member.replica.index, is_reached=is_reached)
            if member.state is State.serving:
                self._list_serving()
                if is_reached:
                    self._on_change()

    def slow_links(self, member: Member, factor: float) -> None:
        """Multiplies the duration of the copies of a replica by `factor`; 1: normal speed.

        Copies between its memory tiers that are in progress keep their duration.
        """
        member.replica.copies.links.slowdown = factor
        if self._interconnect is not None:
            self._interconnect.slow_links(member.replica.index, factor)

    def records(self, end_s: float) -> tuple[tuple[PoolRecord, ...], tuple[ReplicaRecord, ...]]:
        """Returns the records of pools and replicas for a run that ends at end_s."""
        pools = []
        for index, pool in enumerate(self.pools):
            own = next((m.replica for m in self.members if m.pool_index == index), None)
            kv = pool.core().block_pool if own is None else own.core.block_pool
            bytes_per_token = pool.links().bytes_per_token
            pools.append(PoolRecord(kv.num_blocks, kv.block_size, bytes_per_token, pool.name))
        return tuple(pools), tuple(_record(member, end_s) for member in self.members)

    def next_serving(self, replica: Replica) -> Replica | None:
        """Returns the next serving and reachable replica by index; None: there is no other."""
        for place in range(1, len(self.members)):
            other = self.members[(replica.index + place) % len(self.members)]
            if other.state is State.serving and other.is_reached:
                return other.replica
        return None

    def is_reached(self, replica: Replica) -> bool:
        """Returns whether the link to a replica is up."""
        return self.members[replica.index].is_reached

    def _begin_to_serve(self, member: Member) -> None:
        member.state = State.serving
        self._list_serving()
        self._on_change()

    def _append(self, pool_index: int, now: float, state: State, instead_of: Member | None = None) -> Member:
        pool = self.pools[pool_index]
        replica = new_replica(len(self.members), pool, self._context)
        self._attach(replica)
        self._loads.add(replica)
        interconnect = self._interconnect
        if interconnect is not None:
            if pool.device is None:
                raise ValueError(
                    f"device=None: must be set, as pool {pool.name} transfers KV over the network"
                )
            site = None if instead_of is None else instead_of.replica.index
            host_bytes_per_s = pool.links().host_bytes_per_s
            interconnect.place(replica.index, pool.device, pool.num_devices, host_bytes_per_s, site)
        member = Member(replica, pool_index, now, state)
        self.members.append(member)
        self._present[pool_index].append(member)
        return member

    def _leave(self, member: Member, now: float) -> None:
        member.state = State.gone
        self._present[member.pool_index].remove(member)
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
        self.serving_model = ServingModel(self.serving, self._loads)
        prefilling = listed([replica for replica in replicas if replica.pool.role == "prefill"])
        self.prefilling = prefilling or self.serving
        self.decoding = listed([replica for replica in replicas if replica.pool.role == "decode"])
        self.decoding_all = listed([replica for replica in replicas if replica.pool.role != "prefill"])


def new_replica(index: int, pool: ReplicaPool, context: RunContext) -> Replica:
    """Returns a new replica of a pool."""
    if pool.make_replica is not None:
        made: Replica = pool.make_replica(index, pool, context)
        return made
    return Replica(index, pool, context)


def _record(member: Member, end_s: float) -> ReplicaRecord:
    """Returns the record of a replica in a run that ends at end_s."""
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


FEW = 16
"""Number of replicas up to which reading each count takes no longer than updating an array."""


class Loads:
    """The counts of all replicas of a fleet, by index. columns: the counts that policies read, by name."""

    def __init__(self) -> None:
        self.columns: dict[str, NDArray[np.int64]] = {}
        self._replicas: list[Replica] = []

    def add(self, replica: Replica) -> None:
        """Adds a new replica of the fleet, which has the next index."""
        self._replicas.append(replica)
        for name, column in self.columns.items():
            self.columns[name] = np.append(column, getattr(replica, name))
        if self.columns:
            replica.attach(LoadWatch(replica, self))

    def listed(self, replicas: list[Replica]) -> list[Replica]:
        """Returns a list of replicas, ordered by index, from which policies can read counts as arrays."""
        return replicas if len(replicas) <= FEW else CountedReplicas(replicas, self)

    def column(self, name: str) -> NDArray[np.int64]:
        """Returns one count of all replicas, by index, with shape [N]."""
        if not self.columns:
            for replica in self._replicas:
                replica.attach(LoadWatch(replica, self))
        if name not in self.columns:
            self.columns[name] = np.array([getattr(replica, name) for replica in self._replicas], np.int64)
        return self.columns[name]


class CountedReplicas(list[Replica]):
    """A list of replicas with their counts: a `policies.routing.load_balancing.Counted`."""

    def __init__(self, replicas: SequenceOf[Replica], loads: Loads) -> None:
        super().__init__(replicas)
        self._loads = loads
        self._indices = np.array([replica.index for replica in replicas], np.int64)
        are_first = not replicas or replicas[-1].index == len(replicas) - 1
        self._num_first = len(replicas) if are_first else None

    def counts(self, name: str) -> NDArray[np.int64]:
        """Returns one count of the replicas of the list, read-only, with shape [N]."""
        column = self._loads.columns.get(name)
        if column is None:
            column = self._loads.column(name)
        counts = column[self._indices] if self._num_first is None else column[: self._num_first]
        counts.flags.writeable = False  # a view of the array of the fleet
        return counts


class LoadWatch(Attachment):
    """Updates the counts of a replica in the arrays whenever they change."""

    def __init__(self, replica: Replica, loads: Loads) -> None:
        self._replica = replica
        self._index = replica.index
        self._loads = loads

    def sent(self, request: Request) -> None:
        self._update()

    def left(self, seq: Sequence) -> None:
        self._update()

    def crashed(self, now: float) -> None:
        self._update()

    def _update(self) -> None:
        for name, column in self._loads.columns.items():
            column[self._index] = getattr(self._replica, name)
