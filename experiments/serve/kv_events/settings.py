"""Settings of the KV events."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, OneOf, PositiveInt, Unit, check

PACKAGES = ("msgspec", "zmq")
"""Modules that the events need; they are in the extra `serve`."""
NOTHING_TO_REPORT = (
    "serve.kv_events.enable_kv_cache_events=true: there is no prefix cache whose contents could be reported; "
    "choose caching=prefix, radix or tiered"
)
MAX_PORT = 65535
_TCP = re.compile(r"tcp://(\*|[^:/\s\[\]]+|\[[^\]\s]+\]):(\d{1,5})")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvEventsSettings(Checked):
    """Settings of the KV events, with the names of vLLM's `KVEventsConfig`. Raises ValueError."""

    enable_kv_cache_events: bool = False
    publisher: Annotated[str | None, OneOf(("zmq",))] = "zmq"
    """zmq; None: events are not published."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Address of the PUB socket of replica 0; replica i has the port + i."""
    connect: bool = False
    """Connect to the endpoint, where a subscriber listens, in place of listening there."""
    replay_endpoint: str | None = None
    """Address of the ROUTER socket that repeats past batches, with ports as those of `endpoint`."""
    buffer_steps: Annotated[PositiveInt, Unit("batch")] = 10_000
    """Batches that can be repeated, the last ones."""
    hwm: Annotated[PositiveInt, Unit("batch")] = 100_000
    """Batches that wait for a slow subscriber; further ones are dropped for it."""
    topic: str = ""
    """First frame of each message; {replica}, {port} and {model} stand for those of the replica."""

    def __post_init__(self) -> None:
        check(self)
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None:
                _check_endpoint(name, value)
        if self.connect and "*" in self.endpoint:
            raise ValueError(f"endpoint={self.endpoint}: must name a host with connect=true")
        if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":0"):
            raise ValueError(f"replay_endpoint={self.replay_endpoint}: must differ from endpoint")

    def topic_of(self, replica: int, port: int, model: str) -> str:
        """Returns the topic of a replica, which serves a model at an HTTP port."""
        topic = self.topic
        for name, value in (("replica", replica), ("port", port), ("model", model)):
            topic = topic.replace(f"{{{name}}}", str(value))
        return topic

    @property
    def publishes(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


def _check_endpoint(name: str, endpoint: str) -> None:
    found = _TCP.fullmatch(endpoint)
    if found is None or int(found[2]) > MAX_PORT:
        raise ValueError(
            f"{name}={endpoint}: must be tcp://HOST:PORT, such as tcp://127.0.0.1:5557, or tcp://*:5557 for "
            "all addresses of this machine"
        )


def endpoint_of(endpoint: str, replica: int) -> str:
    """Returns the endpoint of a replica: its port is higher by its index; port 0 is any free port.

    Raises ValueError if there is no such port.
    """
    base, _, port = endpoint.rpartition(":")
    number = int(port) and int(port) + replica
    if number > MAX_PORT:
        raise ValueError(
            f"endpoint={endpoint}: replica {replica} would have port {number}, and the last one is {MAX_PORT}"
        )
    return f"{base}:{number}"
