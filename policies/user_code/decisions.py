"""Decisions that are not allowed, and checks of what a user's policy returns.

The policies of this project have tests in place of these checks, so only those of a user are wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from policies.user_code.frames import is_of_user

if TYPE_CHECKING:  # commands that only print help start without numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_SHOWN = 60
"""Length at which the text of a returned value is cut."""


class WrongDecisionError(RuntimeError):
    """A policy has returned or decided what is not allowed."""

    def __init__(self, policy: object, method: str, did: str, allowed: str) -> None:
        """Creates the error. did: what the method did, such as `returned 7`. allowed: the rule."""
        super().__init__(f"{type(policy).__name__}: {method} {did}; {allowed}")
        self.policy, self.method, self.did, self.allowed = policy, method, did, allowed


def returned(policy: object, method: str, value: object, allowed: str) -> WrongDecisionError:
    """Returns the error about a returned value. allowed: the rule, `must be a whole number`."""
    return WrongDecisionError(policy, method, f"returned {shown(value)}", f"it {allowed}")


def shown(value: object) -> str:
    """Returns the text of a value, with its type unless that is obvious, cut to `MAX_SHOWN` characters."""
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    if type(value).__name__ in text or isinstance(value, bool | int | float | str | tuple | list | None):
        return text
    return f"{text} ({type(value).__name__})"


def is_whole(value: object) -> bool:
    """Returns whether a value is a whole number, of Python or numpy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_rank(policy: object, method: str = "rank") -> Callable[[Any], tuple[float, ...]]:
    """Returns a scheduling policy's method of that name; that of a user's policy checks each rank."""
    rank: Callable[[Any], tuple[float, ...]] = getattr(policy, method)
    if not is_of_user(type(policy)):
        return rank

    @wraps(rank)
    def checked(seq: Any) -> tuple[float, ...]:
        found: Any = rank(seq)
        if not isinstance(found, tuple) or not all(isinstance(n, Real) and n == n for n in found):  # no NaN
            raise returned(policy, method, found, "must return a tuple of numbers, such as (seq.request_id,)")
        return found

    return checked


def checked_prediction(predictor: object) -> Callable[[Any, int | None], int]:
    """Returns a predictor's method `predict`; that of a user's predictor checks each length."""
    predict: Callable[[Any, int | None], int] = predictor.predict  # type: ignore[attr-defined]
    if not is_of_user(type(predictor)):
        return predict

    @wraps(predict)
    def checked(request: Any, true_num_tokens: int | None) -> int:
        found: Any = predict(request, true_num_tokens)
        most = request.max_tokens
        if not is_whole(found) or found < 1 or (most is not None and found > most):
            limit = "" if most is None else f" and <= {most}, the request's max_tokens"
            rule = f"must return a whole number of tokens >= 1{limit}"
            raise returned(predictor, "predict", found, rule)
        return int(found)

    return checked


def checked_draft_lengths(policy: object) -> Callable[[Any], int | NDArray[np.int64]]:
    """Returns a draft-length policy's method `num_draft_tokens`; a user's policy has its numbers checked."""
    decide: Callable[[Any], int | NDArray[np.int64]] = policy.num_draft_tokens  # type: ignore[attr-defined]
    if not is_of_user(type(policy)):
        return decide

    @wraps(decide)
    def checked(view: Any) -> int | NDArray[np.int64]:
        found: Any = decide(view)
        most, num_seqs = view.max_draft_tokens, len(view.sequences)
        is_array = getattr(found, "shape", None) == (num_seqs,) and found.dtype.kind in "iu"
        numbers = found.tolist() if is_array else [found]
        if not all(is_whole(number) and 0 <= number <= most for number in numbers):
            rule = f"must return a whole number from 0 to {most}, or an array of {num_seqs}, one per sequence"
            raise returned(policy, "num_draft_tokens", found, rule)
        return found.astype("int64") if is_array else int(found)

    return checked
