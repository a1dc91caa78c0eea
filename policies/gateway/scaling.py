"""Turns the decision of a scaling policy into replicas that start, and replicas that are drained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")


class Present(NamedTuple, Generic[M]):
    """A replica that counts for the target of a scaling policy: it serves, starts, or is down for a while."""

    member: M
    is_serving: bool
    num_outstanding: int
    number: int


class Change(NamedTuple, Generic[M]):
    """The number of replicas to start, and those to drain, in this order."""

    num_starts: int
    drained: list[M]


def change_to(target: int, present: Sequence[Present[M]]) -> Change[M]:
    """Returns what leads to `target` replicas.

    Drained first are replicas that do not serve, then those with the fewest outstanding requests, then the
    newest.
    """
    ranked = sorted(
        present,
        key=lambda each: (not each.is_serving, -each.num_outstanding, each.number),
        reverse=True,
    )
    num_drained = max(0, len(present) - target)
    return Change(max(0, target - len(present)), [each.member for each in ranked[:num_drained]])
