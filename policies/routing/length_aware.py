"""Length-aware choice of a decode replica: long answers are spread evenly (TetriInfer, Hu et al., 2024).

Answers are predicted to be heavy, above heavy_tokens, or light. A heavy one slows down its batch, for as long
as it runs, so replicas should have heavy ones in the same proportion:

    1. replicas with room for the prompt and the predicted answer; all replicas, if there are none
    2. of these, two drawn at random (power of two choices)
    3. of these, the one on which the share of heavy answers, this one included, is smaller

Free memory is as old as the service's signals are; what was sent since is subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.request import Request
from policies.prediction.draws import uniform
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class LengthAware:
    """Ties go to the fewest outstanding requests, then to the replica drawn first. Reads all replicas."""

    reads_signals: ClassVar[bool] = True
    needs_predictor: ClassVar[bool] = True

    heavy_tokens: int = 128
    """Output tokens above which an answer is heavy: the median of ShareGPT's (TetriInfer, section 2.2.2)."""
    num_choices: int = 2
    """Number of distinct replicas with room that are compared."""
    seed: int = 0
    """Seed of the draws."""
    _num_heavy: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _num_light: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _predicted: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    _sent: dict[int, int] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.heavy_tokens < 1:
            raise ValueError(f"heavy_tokens={self.heavy_tokens}: must be >= 1 output token")
        if self.num_choices < 1:
            raise ValueError(f"num_choices={self.num_choices}: must be >= 1 replica")

    def on_predicted(self, request: Request, num_tokens: int) -> None:
        """Records the answer length that the service's predictor expects; called before `choose`."""
        self._predicted[request.request_id] = num_tokens

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Among the drawn replicas, the one that keeps heavy answers most evenly spread."""
        num_predicted = self._predicted[request.request_id]
        num_tokens = request.prompt.num_tokens + num_predicted
        roomy = [
            place
            for place, replica in enumerate(replicas)
            if replica.num_free_kv_tokens - replica.num_unseen_tokens >= num_tokens
        ]
        drawn = self._drawn(request, roomy or list(range(len(replicas))))
        is_heavy = num_predicted > self.heavy_tokens
        place = min(
            drawn,
            key=lambda i: (self._heavy_share(replicas[i].index, is_heavy), replicas[i].num_outstanding),
        )
        index = replicas[place].index
        counts = self._num_heavy if is_heavy else self._num_light
        counts[index] = counts.get(index, 0) + 1
        self._sent[request.request_id] = index
        return place

    def on_end(self, request: Request, now: float) -> None:
        """Forgets a request that has ended."""
        num_predicted = self._predicted.pop(request.request_id, 0)
        index = self._sent.pop(request.request_id, None)
        if index is not None:
            counts = self._num_heavy if num_predicted > self.heavy_tokens else self._num_light
            counts[index] -= 1

    def _heavy_share(self, index: int, is_heavy: bool) -> float:
        """Share of heavy answers on a replica, this answer included."""
        num_heavy = self._num_heavy.get(index, 0) + is_heavy
        return num_heavy / (num_heavy + self._num_light.get(index, 0) + (not is_heavy))

    def _drawn(self, request: Request, places: list[int]) -> list[int]:
        """num_choices of the places drawn at random, or all if there are fewer."""
        for turn in range(min(self.num_choices, len(places))):
            draw = uniform(self.seed, f"routing.length_aware.{turn}", request.request_id)
            other = turn + int(draw * (len(places) - turn))
            places[turn], places[other] = places[other], places[turn]
        return places[: self.num_choices]
