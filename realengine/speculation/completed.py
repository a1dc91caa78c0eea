"""What a pass of the target leaves to the drafter and to the host."""

from __future__ import annotations

from typing import NamedTuple

from realengine.model.decoder import States
from realengine.runner.batch import Batch
from realengine.speculation.verification import Verified


class CompletedPass(NamedTuple):
    """A pass that has been verified."""

    found: Verified
    batch: Batch | None
    """The rows; None: nothing reads them any more."""
    states: States | None
    """The target's hidden states of the rows; None: nothing reads them."""
