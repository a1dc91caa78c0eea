"""Each LoRA adapter has its replica: a model an adapter, as before adapters could share one.

The adapters are dealt out in the order of their first requests, one replica after the other; requests without
an adapter are another one's. With as many replicas as adapters, and weights that adapters are merged into
(`adapters=merged`), no replica ever switches; with fewer, some do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class Dedicated:
    """Reads no replica."""

    _owner: dict[str | None, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The adapter's replica."""
        return self._owner.setdefault(request.adapter, len(self._owner) % len(replicas))
