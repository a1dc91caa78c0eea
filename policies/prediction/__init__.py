"""How long the answer to a request will be, before it is generated. One predictor a file."""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.core.request import Request


class LengthPredictor(Protocol):
    """Expects a number of output tokens. Deep copies share nothing: each replica has its own."""

    needs_truth: ClassVar[bool]
    """Whether it is a stand-in for a model: it must be told the true length, and so needs a simulator."""

    def predict(self, request: Request, true_num_tokens: int | None) -> int:
        """Predicted output tokens, >= 1 and <= request.max_tokens; asked once, at intake.

        true_num_tokens: None where nobody knows; then ValueError if the predictor needs it.
        """
        ...

    def observe(self, request: Request, num_output_tokens: int) -> None:
        """A request has ended, not by an abort, with so many tokens. Told in the order of the ends."""
        ...


def within_limits(request: Request, num_tokens: int) -> int:
    """The next length that the request can have: >= 1 and, where the client set it, <= max_tokens."""
    if request.max_tokens is not None:
        num_tokens = min(num_tokens, request.max_tokens)
    return max(num_tokens, 1)


def require_truth(predictor: LengthPredictor, true_num_tokens: int | None) -> int:
    """The true length; ValueError if it is not known, as in an engine that serves clients."""
    if true_num_tokens is None:
        raise ValueError(
            f"{type(predictor).__name__} is told the true length of every answer, which only a simulator "
            "knows; take a predictor that learns, such as prediction=histogram"
        )
    return true_num_tokens
