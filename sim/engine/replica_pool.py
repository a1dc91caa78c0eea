"""A pool of identical replicas in a run: how a replica is made, and what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hwmodels.devices.device import Device
from hwmodels.iterations.iteration import IterationModel
from policies.core.engine import EngineCore
from policies.scaling import Scaling
from sim.engine.links import Links

ROLES = ("mixed", "prefill", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPool:
    """A pool of identical replicas, of which `replicas` are there when the run begins.

    frontend_s: from a request's arrival until the engine knows it. plans_ahead: the step after the running
    one is planned already (asynchronous scheduling), so what arrives has to wait for both.
    """

    core: Callable[[], EngineCore]
    """Makes a replica's engine, empty."""
    model: IterationModel
    name: str = ""
    serves: str = ""
    """The model, as requests name it."""
    replicas: int = 1
    frontend_s: float = 0.0
    plans_ahead: bool = False
    links: Callable[[], Links] = Links
    """Makes the links between a replica's memory tiers."""
    price_usd_per_hour: float = 0.0
    """USD per hour of one replica."""
    scaling: Scaling | None = None
    """Decides the number of replicas during the run; None: it stays the same."""
    cold_start_s: float = 0.0
    """Seconds until a replica that was ordered takes requests."""

    role: str = "mixed"
    """See `PoolSettings`."""
    device: Device | None = None
    """A replica has num_devices of it; for the network between replicas."""
    num_devices: int = 1
    num_layers: int = 1
    """Layers of the model: KV can be sent layer by layer."""

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ValueError(f"replicas={self.replicas}: must be >= 0")
        check_role(self.role)


def check_role(role: str) -> None:
    """Raises ValueError for an unknown role."""
    if role not in ROLES:
        raise ValueError(f"role={role}: must be one of {', '.join(ROLES)}")
