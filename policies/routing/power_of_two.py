"""Power of two choices: the least loaded of a few replicas drawn at random.

Mitzenmacher (IEEE TPDS 2001), Vvedenskaya et al. (1996): two choices shorten the longest queue exponentially
compared with one; more choices add little. Envoy's least request and SGLang's router offer it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, OneOf, PositiveInt, Unit
from policies.core.request import Request
from policies.prediction import uniform
from policies.routing import COUNTS, ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerOfTwo(Checked):
    """Least loaded of num_choices random replicas. Ties go to the replica drawn first. Reads only these."""

    num_choices: Annotated[PositiveInt, Unit("replica")] = 2
    """Number of distinct replicas that are compared; if fewer accept requests, all of them are."""
    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """The load that is compared: outstanding requests, or tokens (of their prompts)."""
    seed: int = 0
    """Seed of the draws."""

    def check(self, num_replicas: int) -> None:
        """Raises ValueError if there are fewer replicas than choices."""
        if self.num_choices > num_replicas:
            raise ValueError(
                f"num_choices={self.num_choices}: must be <= {num_replicas}, the number of replicas"
            )

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the least loaded of the drawn replicas."""
        name = COUNTS[self.count]
        return min(self._drawn(request, len(replicas)), key=lambda index: getattr(replicas[index], name))

    def _drawn(self, request: Request, num_replicas: int) -> list[int]:
        """Draws num_choices distinct replicas; every set is equally likely (Floyd's algorithm)."""
        drawn: list[int] = []
        for last in range(max(0, num_replicas - self.num_choices), num_replicas):
            stream = f"routing.power_of_two.{last - num_replicas}"
            index = int(uniform(self.seed, stream, request.request_id) * (last + 1))
            drawn.append(last if index in drawn else index)
        return drawn
