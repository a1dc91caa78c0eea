"""Speculative decoding in the simulator: which draft tokens are accepted."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.speculation import Proposer

STREAM = "acceptance"
"""Name of the random stream."""


class Verdicts(NamedTuple):
    """The acceptance of the drafts of a request, by the output position at which they begin."""

    accepted: NDArray[np.uint8]
    """[num_positions]: accepted draft tokens if a pass drafts as many tokens as possible from position p on.

    With k < K draft tokens, or k levels of a tree, min(accepted, k) are accepted.
    """
    proposed: NDArray[np.uint8] | None = None
    """[num_positions]: draft tokens that the proposer finds there, at most K; None: always K."""


class Acceptance(Protocol):
    """Decides which draft tokens are accepted. A frozen dataclass, a choice of configs/acceptance."""

    def check(self, proposer: Proposer) -> None:
        """Raises ValueError if the model lacks data for the drafts of a proposer."""
        ...

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1.

        They depend only on the arguments, and no verdict depends on num_positions: a retried, migrated or
        recovered request has the same verdicts.
        """
        ...
