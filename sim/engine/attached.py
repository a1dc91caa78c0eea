"""What may be attached to a replica: KV handed over between replicas, KV copied elsewhere, and a network.

`Replica` knows these interfaces only; `sim.transfer` implements them. R is the replica itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeVar

from policies.core.plan import Migrant
from policies.core.sequence import Sequence

R = TypeVar("R", contravariant=True)


class KvHandovers(Protocol[R]):
    """Moves the requests of prefill replicas on to decode replicas."""

    def begin(self, source: R, migrant: Migrant, prefill_s: float, now: float) -> None:
        """A prompt has been computed, and its first token; prefill_s: its share of the iterations' time."""
        ...

    def departed(self, source: R, seq: Sequence) -> None:
        """A prefill replica has freed what it held."""
        ...

    def fetch(self, request_id: int, num_tokens: int, *, had_room_at_once: bool) -> None:
        """A decode replica has slot and blocks for a sequence: copy the KV of so many of its tokens."""
        ...

    def found(self, request_id: int) -> None:
        """A decode replica goes on with a sequence all of whose KV was in its cache."""
        ...


class KvMirrors(Protocol[R]):
    """Copies KV to other hosts, and restores it after a crash."""

    every_tokens: int
    """Iterations between two copies."""

    def copy(self, replica: R, computed: Mapping[int, int]) -> None:
        """Send what is new. computed: tokens of each sequence that holds KV, by request id."""
        ...

    def fetch(self, request_id: int, num_tokens: int) -> bool:
        """A replica has slot and blocks for so many tokens; False: it has them in its own host's memory."""
        ...

    def fetched(self, request_id: int) -> bool:
        """KV has come to where it was wanted; whether it still is."""
        ...

    def admitted(self, request_id: int) -> None:
        """Work on a request goes on: it has its KV, perhaps all from a cache."""
        ...


class ReplicaLinks(Protocol):
    """The links between replicas, by their index."""

    def slow_links(self, replica: int, factor: float) -> None:
        """What goes to a replica, or leaves it, takes `factor` times as long."""
        ...
