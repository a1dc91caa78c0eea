"""Counts of the worlds in which a claim was checked, so that a test sees that it was."""

from dataclasses import replace
from functools import wraps

from experiments.conformance.claims import Claim


def num_kept(claim: Claim, num_worlds: int) -> int:
    """Returns the number of random worlds, at most num_worlds, in which the promise was checked and kept.

    Raises BrokenPromise if it is broken in one of them.
    """
    kept = []

    @wraps(claim.promise)  # a broken promise is told by its docstring
    def promise(world):
        claim.promise(world)
        kept.append(world)

    replace(claim, promise=promise).check(num_worlds=num_worlds)
    return len(kept)
