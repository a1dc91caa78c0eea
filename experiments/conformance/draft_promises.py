"""Promises of draft-length policies, each a check of one world that raises AssertionError if it is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np

from experiments.conformance.recording_core import RecordingCore
from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.worlds import World
from policies.speculation import DraftView
from sim.records.table import to_pandas


class Bounded:
    """Draft-length policy whose numbers are checked."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def __repr__(self) -> str:
        return repr(self._policy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while deepcopy builds a copy, which has no attributes yet
            raise AttributeError(name)
        return getattr(self._policy, name)

    def num_draft_tokens(self, view: DraftView) -> Any:
        """Returns the policy's numbers; asserts that they are whole, within limits and one per sequence."""
        found = self._policy.num_draft_tokens(view)
        most, num_seqs, numbers = view.max_draft_tokens, len(view.sequences), np.asarray(found)
        is_whole = numbers.dtype.kind in "iu" and numbers.shape in ((), (num_seqs,))
        is_right = is_whole and bool(np.all((numbers >= 0) & (numbers <= most)))
        assert is_right, (
            f"num_draft_tokens() returned {found!r}: must be a whole number from 0 to {most}, or an array of "
            f"{num_seqs}, one per sequence"
        )
        num_repeats = self._policy.num_repeats
        assert num_repeats >= 1, f"num_repeats is {num_repeats!r} after a decision: must be >= 1 step"
        return found


def draft_lengths_within_limits(world: SpeculatingWorld) -> None:
    """Requires whole numbers from 0 to the proposer's limit: one for all sequences, or one for each."""
    bounded: Any = Bounded(world.draft_length)
    replace(world, draft_length=bounded).simulate()


def answers_are_complete(world: SpeculatingWorld) -> None:
    """Requires that every answer has the tokens that it has without drafts: none is lost or doubled."""
    settings: dict[str, Any] = {each.name: getattr(world, each.name) for each in fields(World)}
    without = World(**settings | {"engine": RecordingCore})
    mine, plain = (
        to_pandas(run.simulate().records.requests).set_index("request_id") for run in (world, without)
    )
    if world.num_users is not None:  # which request of the loop comes next depends on the times
        lengths = [Counter(zip(one.prompt_tokens, one.output_tokens, strict=True)) for one in (mine, plain)]
        are_finished = all((one.status == "finished").all() for one in (mine, plain))
        assert not are_finished or lengths[0] == lengths[1], (
            f"(prompt, output) tokens of the requests: {lengths[0]}, and {lengths[1]} without drafts"
        )
        return
    for request_id in mine.index[(mine.status == "finished") & (plain.status == "finished")]:
        num_tokens, num_wanted = mine.output_tokens[request_id], plain.output_tokens[request_id]
        assert num_tokens == num_wanted, (
            f"the answer of request {request_id} has {num_tokens} tokens, and {num_wanted} without drafts"
        )
