"""A verified pass of the target, as the drafter and the host get it."""

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
