"""Settings of a cluster (apart from its pools), and settings of the simulation itself."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from fieldlimits import Checked, NonNegativeInt, Positive, PositiveInt, Unit, check
from policies.admission import Admission, AdmitAll
from policies.gateway.gateway import check_age
from policies.migration import Migration, Stay
from policies.prediction import LengthPredictor
from policies.roles import Fixed, Roles, Turns
from policies.routing import Routing
from policies.routing.load_balancing import LeastOutstanding
from sim.cluster.clients import Retries
from sim.cluster.disaggregation import EncoderSettings
from sim.cluster.failures import Failures, Recovery
from sim.metrics.slo import Slo
from sim.transfer.kv_transfers import KvTransferSettings
from sim.transfer.network import NetworkSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SimSettings(Checked):
    """Settings of the simulation itself."""

    leap: bool = True
    """Runs repeated iterations as one event; false: one event per iteration, with the same result."""
    until_s: Annotated[Positive | None, Unit("s"), "null for no limit"] = None
    """Ends the run at this simulated time, with requests unfinished; null: no limit."""
    stop_overloaded: bool = False
    """Stops early once the service is overloaded, for steady traffic: see `sim.cluster.early_stop`."""
    stop_missed: bool = False
    """Stops early once the attainment target of the SLO is out of reach: see `sim.cluster.early_stop`."""
    shards: int | Literal["auto"] | None = None
    """Number of parts in which replicas are simulated separately, with the same result: see `sim.shards`;
    auto: chosen from cores, replicas and requests; null: the run is not divided.
    """
    thin: Annotated[PositiveInt, "20 simulates one replica in twenty"] = 1
    """Simulates one in `thin` replicas with one in `thin` requests: see `sim.setup.thinning`; 1: all."""

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.shards, int) and self.shards < 1:
            raise ValueError(
                f"shards={self.shards}: must be >= 1, auto, or null for a run that is not divided"
            )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Checked):
    """Settings shared by the replicas of all pools, as objects. Raises ValueError for an invalid setting.

    The class has no slots because `Scenario` also inherits `PoolSettings`, which has them.
    """

    routing: Routing
    decode_routing: Routing = LeastOutstanding()
    """Chooses the decode replica after a prefill."""
    prediction: LengthPredictor | None = None
    """Predicts output lengths for routers that need them; None: no predictor."""
    admission: Admission = field(default_factory=AdmitAll)
    """Decides which requests are admitted."""
    retries: Retries = field(default_factory=lambda: Retries(max_attempts=1))
    """Behaviour of clients after a refusal or a timeout."""
    failures: Failures = field(default_factory=Failures)
    """Failures of replicas and links."""
    max_resends: NonNegativeInt = 1
    """Maximum number of times that the service resends a request after crashes of its replica."""
    recovery: Recovery = Recovery()
    """Recovery of a resent request: the part of its work that is kept."""
    signal_age_s: float = 0.05
    """Maximum age of the load signals that routers read, s; 0: always current. 50 ms is the default of the
    Gateway API."""
    kv_transfer: KvTransferSettings = KvTransferSettings()
    network: NetworkSettings = NetworkSettings()
    """The network between replicas."""
    roles: Roles = Fixed()
    """Decides which replicas change between prefill and decode pools."""
    migration: Migration = Stay()
    """Decides which running requests move to another replica."""
    encoders: EncoderSettings = field(default_factory=EncoderSettings)
    """Images in prompts, and the replicas that encode them."""
    turns: Turns = field(default_factory=Turns)
    """Decides which model is awake, if the pools share GPUs."""
    slo: Slo | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        check(self)
        check_age(self.signal_age_s)

    def for_a_run(self) -> ClusterSettings:
        """Returns a copy with its own policies, so that a run does not change the state of the original."""
        own = {each.name: deepcopy(getattr(self, each.name)) for each in fields(ClusterSettings)}
        return ClusterSettings(**own)
