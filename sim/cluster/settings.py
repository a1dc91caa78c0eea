"""Settings of a cluster beside those of its pools, and of how its simulation is run."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from math import inf

from policies.admission import Admission
from policies.admission.none import AdmitAll
from policies.prediction import LengthPredictor
from policies.roles import Roles
from policies.roles.fixed import Fixed
from policies.routing import Routing
from policies.routing.least_outstanding import LeastOutstanding
from sim.cluster.failures import Failures
from sim.cluster.recovery import Recovery
from sim.engine.signals import check_age
from sim.metrics.slo import Slo
from sim.transfer.kv_transfers import KvTransferSettings
from sim.transfer.topology import NetworkSettings
from sim.workload.retries import Retries


@dataclass(frozen=True, kw_only=True, slots=True)
class SimSettings:
    """How the simulation is run."""

    leap: bool = True
    """Run iterations that repeat as one event; false steps through each, with the same result."""
    until_s: float | None = None
    """End at this simulated time, whatever is then unfinished."""
    stop_overloaded: bool = False
    """Stop early once the service is overloaded: see `sim.cluster.overload`. For traffic of a steady rate."""
    stop_missed: bool = False
    """Stop early once the attainment target of the SLO is out of reach: see `sim.cluster.early_stop`."""

    def __post_init__(self) -> None:
        if self.until_s is not None and not 0 < self.until_s < inf:
            raise ValueError(f"until_s={self.until_s}: must be > 0 s; null for no limit")


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """What the replicas of all pools have in common, as objects. Raises ValueError for a wrong setting.

    The class has no slots because `Scenario` inherits it beside `PoolSettings`, which has them.
    """

    routing: Routing
    decode_routing: Routing = LeastOutstanding()
    """Chooses the decode replica when a prefill replica has computed a prompt."""
    prediction: LengthPredictor | None = None
    """Predicts output lengths for routers that ask for them."""
    admission: Admission = field(default_factory=AdmitAll)
    """Decides which requests are let in."""
    retries: Retries = field(default_factory=lambda: Retries(max_attempts=1))
    """What clients do whose requests are refused, or have waited too long."""
    failures: Failures = field(default_factory=Failures)
    """Failures of replicas and links."""
    max_resends: int = 1
    """How often the service sends a request again whose replica has crashed; then its client has to."""
    recovery: Recovery = Recovery()
    """What is kept of a request that is sent again."""
    signal_age_s: float = 0.05
    """Age that the routers' knowledge of the replicas may reach; 0: always fresh. 50 ms is the default of the
    Gateway API."""
    kv_transfer: KvTransferSettings = KvTransferSettings()
    network: NetworkSettings = NetworkSettings()
    """Between replicas."""
    roles: Roles = Fixed()
    """Decides which replicas change between prefill and decode pools."""
    slo: Slo | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be >= 0")
        if self.max_resends < 0:
            raise ValueError(f"max_resends={self.max_resends}: must be >= 0")
        check_age(self.signal_age_s)

    def for_a_run(self) -> ClusterSettings:
        """These settings alone, with policies of their own: a run leaves nothing behind in the original."""
        own = {each.name: deepcopy(getattr(self, each.name)) for each in fields(ClusterSettings)}
        return ClusterSettings(**own)
