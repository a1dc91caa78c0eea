"""Length predictors: they predict the number of output tokens of a request."""

from __future__ import annotations

from hashlib import blake2b
from typing import ClassVar, Protocol

from policies.core.request import Request
from policies.user_code import name_of


class LengthPredictor(Protocol):
    """Predicts the number of output tokens. Each replica has its own deep copy; copies share nothing."""

    needs_truth: ClassVar[bool]
    """Whether the predictor needs the true length, which only a simulator knows."""

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Returns the predicted output tokens, >= 1 and <= request.max_tokens.

        It is called once, when the request is added. true_num_tokens: None if unknown, which raises
        ValueError if the predictor needs it.
        """
        ...

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Learns from a finished (not aborted) request; called in the order in which requests finish."""
        ...


def within_limits(request: Request, num_tokens: int) -> int:
    """Clamps num_tokens to possible lengths of the request: >= 1 and, if set, <= max_tokens."""
    if request.max_tokens is not None:
        num_tokens = min(num_tokens, request.max_tokens)
    return max(num_tokens, 1)


def require_truth(predictor: LengthPredictor, true_num_tokens: int | None) -> int:
    """Returns the true length. Raises ValueError if it is unknown, as in an engine that serves clients."""
    if true_num_tokens is None:
        raise ValueError(
            f"prediction={name_of(predictor)}: needs the true output length of every request, which only a "
            "simulator knows; use a predictor that learns, such as prediction=histogram"
        )
    return true_num_tokens


_BITS = 52  # one bit less than the 53 of a float, so adding 0.5 is exact


def uniform(seed: int, stream: str, request_id: int) -> float:
    """Returns a number > 0 and < 1 that depends only on the arguments, equal on every machine."""
    digest = blake2b(f"{seed}/{stream}/{request_id}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> (64 - _BITS)) + 0.5) / (1 << _BITS)
