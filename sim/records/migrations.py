"""The record of live migrations of a run."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Outcome(IntEnum):
    """The end of a migration; all but the first leave the request where it was."""

    moved = 0
    no_room = 1  # the other replica had no slot or no blocks
    preempted = 2  # the request was preempted while its KV was copied
    ended = 3  # the request ended, or its client aborted it
    too_long = 4  # after the last allowed stage, more KV was left than may be copied in a last stage


class MigrationRecord(NamedTuple):
    """One migration. Times in seconds; NaN for what did not happen."""

    request_id: int
    source: int
    target: int
    began_s: float
    """Time of the decision."""
    stopped_s: float
    """Time at which the request stopped on the source."""
    resumed_s: float
    """Time at which the first iteration with it on the target began."""
    ended_s: float
    """Time at which the last byte had arrived, or at which the migration was given up."""
    num_stages: int
    num_bytes: float
    """Bytes of KV that were copied."""
    outcome: Outcome
