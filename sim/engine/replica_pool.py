"""A pool of identical replicas in a run: the factory of their engines, their price, and shared settings.

The replicas of a pool divide a model's KV over their ranks in the same way; all replicas of a run share its
context. `Links` connect the memory tiers of a replica; `Copies` of KV use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from fieldlimits import Checked, NonNegativeInt, OneOf
from hwmodels.device import Device
from hwmodels.iterations import IterationModel, Jitter, UnknownIterationError
from policies.core.engine import EngineCore
from policies.core.plan import AdapterLoad, Transfer
from policies.core.sequence import Sequence
from policies.scaling import Scaling
from sim.engine.clock import Clock
from sim.engine.frontend import TOKENS, Frontend, FrontendQueue, Intake, Pending
from sim.engine.iteration_times import BatchTimes
from sim.records.requests import RequestLog

if TYPE_CHECKING:
    from sim.speculation.passes import Passes


@dataclass(kw_only=True, slots=True)
class Links:
    """Bandwidths of one replica's links, and the time at which each direction becomes free.

    In each direction there is one copy at a time. It begins when the direction is free, and takes latency +
    bytes / bandwidth. Host and GPU can send to each other at the same time (PCIe is full duplex); data from
    disk streams through host memory, at the lower of the two bandwidths.
    """

    bytes_per_token: float = 0.0
    """Bytes of KV per token, over all devices of the replica."""
    host_bytes_per_s: float = float("inf")
    """Bandwidth between GPUs and host in each direction, over all devices of the replica."""
    disk_bytes_per_s: float = float("inf")
    """Bandwidth between host and disk."""
    latency_s: float = 0.0
    overlapped: bool = True
    """Whether a step may run while KV is still being copied out of its blocks (through a staging buffer)."""
    slowdown: float = 1.0
    """Factor on the duration of copies that begin now; > 1 during a failure."""
    merge_s: float = 0.0
    """Seconds to merge an adapter into the weights in place of another, once it is in GPU memory."""
    _busy_until_s: dict[tuple[str, str], float] = field(default_factory=dict, init=False)

    def begin(self, transfer: Transfer, now: float) -> float:
        """Starts a copy of KV; returns the time at which it will be complete, s."""
        num_bytes = transfer.num_tokens * self.bytes_per_token
        return self._copied_s(transfer.source, transfer.target, num_bytes, now)

    def load(self, load: AdapterLoad, now: float) -> float:
        """Starts loading an adapter into GPU memory; returns the time at which it can be used, s."""
        copied_s = self._copied_s(load.source, "gpu", load.num_bytes, now) if load.num_bytes else now
        return copied_s + self.merge_s if load.merges else copied_s

    def _copied_s(self, source: str, target: str, num_bytes: float, now: float) -> float:
        direction = (source, target)
        bandwidth = self.host_bytes_per_s
        if "disk" in direction:
            bandwidth = (
                self.disk_bytes_per_s if "host" in direction else min(bandwidth, self.disk_bytes_per_s)
            )
        start_s = max(now, self._busy_until_s.get(direction, now))
        done_s = start_s + self.slowdown * (self.latency_s + num_bytes / bandwidth)
        self._busy_until_s[direction] = done_s
        return done_s


class Copies:
    """Begins the transfers of one replica's plans.

    links: the links between its own memory tiers. sources: the functions that begin copies from other
    sources, by `Transfer.source`. on_done(request_id, done_s) is called for every load over the links for
    which a sequence waits.
    """

    def __init__(self, links: Links, on_done: Callable[[int, float], None]) -> None:
        self.links = links
        self.sources: dict[str, Callable[[Transfer], None]] = {}
        self._on_done = on_done

    def begin(self, transfers: list[Transfer], now: float) -> float:
        """Begins transfers in order.

        Returns the seconds by which the step is delayed because blocks that it writes to are still being
        read.
        """
        delay_s = 0.0
        for transfer in transfers:
            begin_copy = self.sources.get(transfer.source)
            if begin_copy is not None:
                begin_copy(transfer)
                continue
            done_s = self.links.begin(transfer, now)
            if transfer.seq is not None:
                self._on_done(transfer.seq.request_id, done_s)
            elif not self.links.overlapped:
                delay_s = max(delay_s, done_s - now)
        return delay_s


class KvLayout(NamedTuple):
    """The KV heads and layers of each rank."""

    num_kv_heads: int = 1
    """KV heads of a layer; 1 for a latent vector that all query heads share."""
    num_layers: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: equal numbers."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which a sequence is divided."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def heads(self, rank: int) -> range:
        """Returns the KV heads of a tensor parallel rank."""
        num_heads, size = self.num_kv_heads, self.tensor_parallel_size
        if size >= num_heads:
            head = rank * num_heads // size
            return range(head, head + 1)
        return range(rank * num_heads // size, (rank + 1) * num_heads // size)

    def layers(self, stage: int) -> range:
        """Returns the layers of a pipeline stage; the first stages have one more if there is a remainder."""
        if self.pp_layer_partition is not None:
            first = sum(self.pp_layer_partition[:stage])
            return range(first, first + self.pp_layer_partition[stage])
        each, more = divmod(self.num_layers, self.pipeline_parallel_size)
        first = stage * each + min(stage, more)
        return range(first, first + each + (stage < more))


ONE_RANK = KvLayout()
"""The layout of a single GPU, for models with only the KV size known."""


ROLES = ("mixed", "prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPool(Checked):
    """A pool of identical replicas; `replicas` of them run when the run begins.

    frontend_s: seconds from a request's arrival at the replica until it reaches the engine, in addition to
    the work of `frontend`, for whose processes requests wait; None: there is no work.
    plans_ahead: the step after the running one is already planned (asynchronous scheduling), so a new request
    waits for both. recv_interval: the engine checks for new requests at every n-th decode iteration.
    """

    core: Callable[[], EngineCore]
    """Makes the empty engine of a replica."""
    model: IterationModel
    jitter: Jitter | None = None
    """Random scatter of the iteration times; None: exactly the model's times."""
    name: str = ""
    make_replica: Callable[..., Any] | None = None
    """Makes a replica from its index, this pool and the context of the run; None: a plain one."""
    new_passes: Callable[[IterationModel, int, int], Passes] | None = None
    """Creates the passes of a replica from its model, its slots and a seed; None: it does not speculate."""
    serves: str = ""
    """Name of the served model, as in requests."""
    replicas: NonNegativeInt = 1
    frontend_s: float = 0.0
    frontend: Frontend | None = None
    plans_ahead: bool = False
    recv_interval: int = 1
    waits_for_ranks: bool = False
    """Whether an iteration takes as long as the slowest rank of data-parallel attention; False: ranks are
    priced with equal work, or there is one rank.
    """
    batches_in_flight: int = 1
    """Batches in a pipeline; 1: there is no pipeline, or its iterations are priced as one."""
    links: Callable[[], Links] = Links
    """Makes the links between a replica's memory tiers."""
    price_usd_per_hour: float = 0.0
    """Price of one replica, USD per hour."""
    scaling: Scaling | None = None
    """Scaling policy, which decides the number of replicas during the run; None: the number is fixed."""
    cold_start_s: float = 0.0
    """Seconds from the start of a replica until it accepts requests."""

    sleep_s: float = 0.0
    """Seconds to move its weights off the GPUs when its turn ends; see `sim.cluster.autoscaler`."""
    wake_s: float = 0.0
    """Seconds to load its weights back to the GPUs when its turn begins."""

    role: Annotated[str, OneOf(ROLES)] = "mixed"
    """One of `ROLES`; see `PoolSettings`."""
    device: Device | None = None
    """The device type (num_devices per replica), for the network between replicas."""
    num_devices: int = 1
    num_layers: int = 1
    """Layers of the model; KV can be transferred layer by layer."""
    embedding_bytes: float = 0.0
    """Bytes of the embedding of a token: hidden size x bytes per element."""
    kv_layout: KvLayout = ONE_RANK
    """How the KV of a sequence is divided over the devices."""

    def frontend_queue(self) -> FrontendQueue | None:
        """Returns the idle front end of a replica; None: requests never wait for a front end."""
        settings = self.frontend
        if settings is None or not settings.works:
            return None
        return FrontendQueue(settings, settings.servers or 1, self.frontend_s, self._token_gap_s)

    def idle_frontend_s(self, prompt_tokens: int) -> float:
        """Returns the seconds from an arrival at an idle replica until the engine has the request."""
        settings = self.frontend or Frontend()
        return self.frontend_s + settings.request_s + settings.prompt_token_s * prompt_tokens

    def _token_gap_s(self) -> float:
        """Returns the time between two tokens of a single short answer, s; 0 if it has no price.

        With recorded iterations the time comes from their base model, as when they were recorded.
        """
        try:
            return self.model.decode_ends(0.0, 1, TOKENS, 1)[0]
        except UnknownIterationError:
            from hwmodels.levels.recorded import Recorded  # noqa: PLC0415 (it imports what fits prices)

            if not isinstance(self.model, Recorded):
                return 0.0
            return self.model.base.decode_ends(0.0, 1, TOKENS, 1)[0]

    def batch_times(self) -> BatchTimes | None:
        """Returns the times of the batches of an empty pipeline; None: one batch at a time."""
        return BatchTimes(self.model) if self.batches_in_flight > 1 else None

    def intake(self, on_enter: Callable[[Pending], None], num_iterations: Callable[[], int]) -> Intake:
        """Returns the empty intake of a replica that has committed num_iterations() iterations."""
        return Intake(self.plans_ahead, on_enter, self.recv_interval, num_iterations)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The clock, the records and the settings of a run that its replicas share.

    on_end is called with every sequence that ends. leap=False runs iteration by iteration. seed: for the
    random draws of the replicas, such as the parents of branches.
    """

    clock: Clock
    requests: RequestLog
    on_end: Callable[[Sequence], None]
    leap: bool = True
    seed: int = 0
