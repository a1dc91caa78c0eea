"""How long the answer to a request will be, before it is generated. One predictor a file."""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.core.request import Request


class LengthPredictor(Protocol):
    """Expects a number of output tokens. Deep copies share nothing: each replica has its own."""

    needs_truth: ClassVar[bool]
    """Whether the predictor needs the true output length, which only a simulator knows."""

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Predicted output tokens, >= 1 and <= request.max_tokens; asked once, at intake.

        true_num_tokens: None if unknown; raises ValueError then if the predictor needs it.
        """
        ...

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """Learns from a request that has finished (not aborted). Called in the order of the ends."""
        ...


def within_limits(request: Request, num_tokens: int) -> int:
    """The next length that the request can have: >= 1 and, where the client set it, <= max_tokens."""
    if request.max_tokens is not None:
        num_tokens = min(num_tokens, request.max_tokens)
    return max(num_tokens, 1)


def require_truth(predictor: LengthPredictor, true_num_tokens: int | None) -> int:
    """Returns the true length. Raises ValueError if it is unknown, as in an engine that serves clients."""
    if true_num_tokens is None:
        raise ValueError(
            f"{type(predictor).__name__} needs the true output length of every request, which only a "
            "simulator knows; use a predictor that learns, such as prediction=histogram"
        )
    return true_num_tokens
