"""Settings of `windtunnel serve`, apart from those of the scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from experiments.serve.kv_events.settings import KvEventsSettings
from experiments.serve.simulated.answers import OutputLength, Text
from fieldlimits import Checked, Ge, Le, Lt, NonNegative, Positive, PositiveInt, Share, Unit, check

Expose = Literal["fleet", "replicas"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
KEY_VARIABLE = "WINDTUNNEL_API_KEY"
"""Environment variable with the key that requests must have; --api-key sets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """The files that are written at the end."""

    report: bool = True
    tables: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings(Checked):
    """The server and its simulated outputs. Raises ValueError for an invalid setting."""

    text: Text = "random"
    dataset: Path | None = None
    output_length: OutputLength = "workload"
    tool_call_share: Share = 0.5
    """Share of the outputs that call a tool, of requests with tools that may be called and need not."""
    image_tokens: Annotated[int, Ge(1), Lt(1 << 20), Unit("token")] = 576
    """Tokens of the prompt for each image of a message."""
    tokenizer: Path | None = None
    duration_s: Annotated[Positive | None, Unit("s"), "null for no limit"] = None
    """The server stops after this many seconds; None: on Ctrl-C or SIGTERM."""
    drain_s: Annotated[NonNegative, Unit("s")] = 30.0
    """On a stop, seconds to wait for requests in progress."""
    cold_start: bool = False
    """The replicas start with the server, each with the cold start of its pool."""
    faults: bool = False
    """Requests may ask for faults in the header X-Fault."""
    served_model_name: list[str] | None = None
    """Names of the model for clients, the first that of answers; None: its own. vLLM's key."""
    allowed_hosts: list[str] | None = None
    """Names under which clients reach the server; None: on a loopback address its own, else any."""
    expose: Expose = "fleet"
    """replicas: each replica listens on a port of its own, too."""
    max_waiting: Annotated[PositiveInt | None, Unit("request"), "null for no limit"] = None
    """Requests that may wait in a replica; further ones get status 503. None: any number."""
    max_record_mib: Annotated[float, Ge(0), Lt(1 << 20), "0 for no records"] = 512.0
    """Memory of the records of requests and iterations; when it is full, nothing more is recorded."""
    kv_lease_duration_s: Annotated[Positive, Unit("s")] = 30.0
    """Simulated seconds for which a prefill replica keeps KV for a request that does not come; vLLM's key."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("served_model_name", "allowed_hosts"):
            names = getattr(self, name)
            if names is not None and not all(names):
                raise ValueError(f"{name}={names}: must be names, none of them empty; null for the default")
        if self.dataset is not None and self.text != "dataset":
            raise ValueError(f"dataset={self.dataset}: is only read with text=dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackEnd:
    """The kind of back end, and the device of the real engine."""

    backend: Literal["simulated", "engine"] = "simulated"
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Address(Checked):
    """Where the server listens, and the speed of its clock."""

    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), "0 is any free port"] = 8000
    time_scale: Annotated[float, Ge(0.001), Le(1e6), "1 is real time"] = 1.0


class ServerSetup(NamedTuple):
    """The settings of a server, whatever its back end. config: all of them, as in the run folder."""

    config: dict[str, Any]
    address: Address
    settings: ServeSettings
    kv_events: KvEventsSettings
    output: OutputSettings

    @property
    def hosts(self) -> frozenset[str] | None:
        """The names by which requests may reach the server; None: any."""
        return hosts_of(self.address.host, self.settings.allowed_hosts)


def hosts_of(host: str, allowed: Sequence[str] | None) -> frozenset[str] | None:
    """Returns the names by which requests may reach a server that listens on host; None: by any.

    A page of another site can have a name of its own that leads to this machine (DNS rebinding), so on a
    loopback address the default is its names. allowed: further names; with "*" any name.
    """
    own = {host.lower(), *LOOPBACK_NAMES}
    if allowed is None:
        return frozenset(own) if host.lower() in LOOPBACK_NAMES or host.startswith("127.") else None
    return None if "*" in allowed else frozenset(own | {name.lower() for name in allowed})


def full_note(full_s: float) -> str:
    """Returns the note about records that end full_s seconds after the start."""
    return (
        f"The memory for records was full after {full_s:,.0f} s; what came later is missing. Raise "
        "serve.max_record_mib."
    )
