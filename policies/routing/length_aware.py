"""Length-aware choice of a decode replica: long outputs are spread evenly (TetriInfer, Hu et al., 2024).

Requests are heavy if their predicted output exceeds heavy_tokens, else light. A heavy request slows down its
batch while it runs, so all replicas should have the same proportion of heavy requests. The choice has three
steps:

    1. the replicas with free memory for the prompt and the predicted output; all replicas if there are none
    2. of these, two drawn at random (power of two choices)
    3. of these, the one with the smaller share of heavy requests, this request included

Free memory is as old as the service's signals; prompts sent since then are subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fieldlimits import Checked, PositiveInt, Unit
from policies.core.request import Request
from policies.prediction import uniform
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class LengthAware(Checked):
    """Smallest share of heavy requests. Ties: fewest outstanding, then drawn first. Reads all replicas."""

    reads_signals: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = True

    heavy_tokens: Annotated[PositiveInt, Unit("output token")] = 128
    """Output tokens above which a request is heavy: ShareGPT's median (TetriInfer, section 2.2.2)."""
    num_choices: Annotated[PositiveInt, Unit("replica")] = 2
    """Number of distinct replicas with enough free memory to compare."""
    seed: int = 0
    """Seed of the draws."""
    _num_heavy: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _num_light: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _predicted: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _sent: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def on_predicted(self, request: Request, num_tokens: int) -> None:
        """Records the output length predicted by the service's predictor; called before `choose`."""
        self._predicted[request.request_id] = num_tokens

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the smallest share of heavy requests among those drawn."""
        num_predicted = self._predicted[request.request_id]
        num_tokens = request.prompt.num_tokens + num_predicted
        with_memory = [
            position
            for position, replica in enumerate(replicas)
            if replica.num_free_kv_tokens - replica.num_unseen_tokens >= num_tokens
        ]
        drawn = self._drawn(request, with_memory or list(range(len(replicas))))
        is_heavy = num_predicted > self.heavy_tokens
        position = min(
            drawn,
            key=lambda i: (self._heavy_share(replicas[i].index, is_heavy), replicas[i].num_outstanding),
        )
        index = replicas[position].index
        counts = self._num_heavy if is_heavy else self._num_light
        counts[index] = counts.get(index, 0) + 1
        self._sent[request.request_id] = index
        return position

    def on_end(self, request: Request, now: float) -> None:
        """Removes a request that has ended from the counts."""
        num_predicted = self._predicted.pop(request.request_id, 0)
        index = self._sent.pop(request.request_id, None)
        if index is not None:
            counts = self._num_heavy if num_predicted > self.heavy_tokens else self._num_light
            counts[index] -= 1

    def _heavy_share(self, index: int, is_heavy: bool) -> float:
        """Returns the share of heavy requests on a replica after adding a heavy or light one."""
        num_heavy = self._num_heavy.get(index, 0) + is_heavy
        return num_heavy / (num_heavy + self._num_light.get(index, 0) + (not is_heavy))

    def _drawn(self, request: Request, positions: list[int]) -> list[int]:
        """Draws num_choices of the positions at random, or returns all if there are fewer."""
        for turn in range(min(self.num_choices, len(positions))):
            draw = uniform(self.seed, f"routing.length_aware.{turn}", request.request_id)
            other = turn + int(draw * (len(positions) - turn))
            positions[turn], positions[other] = positions[other], positions[turn]
        return positions[: self.num_choices]
