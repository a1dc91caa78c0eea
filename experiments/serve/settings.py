"""Settings of `windtunnel serve`, apart from those of the scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from experiments.serve.simulated.answers import Text
from experiments.serve.simulated.lengths import OutputLength

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
class ServeSettings:
    """The server and its simulated outputs. Raises ValueError for an invalid setting."""

    text: Text = "random"
    dataset: Path | None = None
    output_length: OutputLength = "workload"
    tool_call_share: float = 0.5
    """Share of the outputs that call a tool, of requests with tools that may be called and need not."""
    image_tokens: int = 576
    """Tokens of the prompt for each image of a message."""
    tokenizer: Path | None = None
    duration_s: float | None = None
    """The server stops after this many seconds; None: on Ctrl-C or SIGTERM."""
    drain_s: float = 30.0
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
    max_waiting: int | None = None
    """Requests that may wait in a replica; further ones get status 503. None: any number."""
    max_record_mib: float = 512.0
    """Memory of the records of requests and iterations; when it is full, nothing more is recorded."""
    kv_lease_duration_s: float = 30.0
    """Simulated seconds for which a prefill replica keeps KV for a request that does not come; vLLM's key."""

    def __post_init__(self) -> None:
        for name in ("served_model_name", "allowed_hosts"):
            names = getattr(self, name)
            if names is not None and not all(names):
                raise ValueError(f"{name}={names}: must be names, none of them empty; null for the default")
        if not 0 <= self.tool_call_share <= 1:
            raise ValueError(f"tool_call_share={self.tool_call_share}: must be from 0 to 1")
        if not 1 <= self.image_tokens < 1 << 20:
            raise ValueError(f"image_tokens={self.image_tokens}: must be >= 1 token and < 2^20")
        if not 0 <= self.max_record_mib < 1 << 20:
            raise ValueError(f"max_record_mib={self.max_record_mib}: must be >= 0 and < 2^20; 0: no records")
        if self.duration_s is not None and not 0 < self.duration_s < inf:
            raise ValueError(f"duration_s={self.duration_s}: must be finite and > 0 s; null for no limit")
        if not 0 <= self.drain_s < inf:
            raise ValueError(f"drain_s={self.drain_s}: must be a finite number >= 0 s")
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting}: must be >= 1 request; null for no limit")
        if not 0 < self.kv_lease_duration_s < inf:
            raise ValueError(f"kv_lease_duration_s={self.kv_lease_duration_s}: must be finite and > 0 s")
        if self.dataset is not None and self.text != "dataset":
            raise ValueError(f"dataset={self.dataset}: is only read with text=dataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackEnd:
    """The kind of back end, and the device of the real engine."""

    backend: Literal["simulated", "engine"] = "simulated"
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where the server listens, and the speed of its clock."""

    host: str = "127.0.0.1"
    port: int = 8000
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port}: must be from 0 to 65535; 0 is any free port")
        if not 1e-3 <= self.time_scale <= 1e6:
            raise ValueError(f"time_scale={self.time_scale}: must be from 0.001 to 1e6; 1 is real time")


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
