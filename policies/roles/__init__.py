"""Role policies: they decide which replicas prefill and which decode, if disaggregated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, NamedTuple, Protocol

from fieldlimits import Checked, NonNegative, OneOf, Unit, check

ROLES = ("prefill", "decode")


class ReplicaLoad(NamedTuple):
    """Load of a replica: the service's own counts are current; the others are as old as its signals."""

    name: int  # number of the replica
    role: str  # current role, or the new role while the replica drains: one of ROLES
    is_changing: bool  # whether the replica drains in order to change its role
    num_outstanding: int  # requests sent to the replica that have not left it
    num_queued_tokens: int  # prompt tokens of the outstanding requests without a first token
    kv_use_share: float  # share of the replica's KV memory in use


class Switch(NamedTuple):
    """A replica that changes its role, with the new role."""

    name: int
    role: str


class Roles(Protocol):
    """Decides every interval_s whether a replica changes its role."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None: never called."""
        ...

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """Returns the replica to change now, or None. At least one replica of each role must remain."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Never changes a role: every replica keeps the role of its pool, as in DistServe (OSDI 2024)."""

    @property
    def interval_s(self) -> float | None:
        """Seconds between two calls; None, because `switch` is never called."""
        return None

    def switch(self, loads: Sequence[ReplicaLoad], now: float) -> Switch | None:
        """Returns None: no replica changes its role."""
        return None


LEVELS = (None, 1, 2)
DEFAULT_TURN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns(Checked):
    """Settings of turns, and the decision about the next turn.

    Models take turns on the same GPUs: one is awake; the weights of the others are off the GPUs.

    vLLM's sleep mode: level 1 copies the weights to host memory and drops the KV cache, level 2 drops both;
    the process, its compiled code and its CUDA graphs remain. A model sleeps after its last request has
    ended. Its turn ends when another model has requests and it either has none or has been awake for
    min_turn_s; from then on it gets no new requests. The model with the longest-waiting request is next.
    """

    sleep_level: Annotated[int | None, OneOf(LEVELS)] = None
    """vLLM's level: 1, weights in host memory; 2, weights on disk. None: every model has its own GPUs."""
    min_turn_s: Annotated[NonNegative, Unit("s")] = DEFAULT_TURN_S
    """Seconds after which a turn ends although the model has requests, if another model also has some."""

    def __post_init__(self) -> None:
        check(self)
        if self.sleep_level is None and self.min_turn_s != DEFAULT_TURN_S:
            raise ValueError(
                f"min_turn_s={self.min_turn_s:g}, sleep_level=null: no model takes turns; set "
                f"sleep_level to 1 or 2, or min_turn_s={DEFAULT_TURN_S:g}"
            )

    def ends_s(self, waiting_since_s: Mapping[int, float], is_busy: bool, began_s: float) -> float:
        """Returns the earliest time at which the current turn may end, in seconds; inf: no other model waits.

        waiting_since_s: arrival of the first request of each waiting model, by model number. is_busy: whether
        the awake model has requests. began_s: beginning of its turn.
        """
        if not waiting_since_s:
            return inf
        return began_s + self.min_turn_s if is_busy else began_s

    def next_model(self, waiting_since_s: Mapping[int, float]) -> int:
        """Returns the number of the model with the longest-waiting request."""
        return min(waiting_since_s, key=lambda number: (waiting_since_s[number], number))
