"""Batching policies: which sequences share an iteration. One policy per file."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from policies.core.step import StepBuilder
from policies.core.view import StepView


class Batching(Protocol):
    """Fills one step: reads the view and acts through the builder."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Decides what the next iteration computes. `now`: seconds on the caller's clock."""
        ...


@runtime_checkable
class DecodesUnasked(Protocol):
    """A batching policy that has nothing to decide while all sequences of the engine decode."""

    @property
    def max_unasked_decodes(self) -> int:
        """Number of sequences up to which the engine steps without a call of `fill`, if all sequences decode.

        The policy promises that `fill` would give each of them its next token, and would promise to repeat
        this without a limit (`decode_all`, `repeat`). With `Scheduling.before_step` the promise is void and
        `fill` is called. A subclass with methods of its own, or a wrapper, has to declare the number again:
        see `declares_itself`.
        """
        ...


def max_unasked_of(batching: Batching) -> int:
    """Number of decodes up to which a policy need not be asked; 0 without a declaration that fits its `fill`.

    Raises ValueError if the declared value is no whole number >= 0.
    """
    if not isinstance(batching, DecodesUnasked) or not declares_itself(batching):
        return 0
    limit: object = batching.max_unasked_decodes
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        name = type(batching).__name__
        raise ValueError(f"{name}.max_unasked_decodes={limit!r}: must be a whole number >= 0")
    return limit


@runtime_checkable
class FillsInOrder(Protocol):
    """A batching policy that serves sequences in order, with few calls."""

    @property
    def fills_in_order(self) -> bool:
        """Whether `fill` calls only budget, decode_all, prefill, admit and repeat, in this order.

        It prefills in the order of the view's `prefilling`, and admits in that of `waiting` until a sequence
        is refused; of a sequence it reads num_uncomputed only. The simulator then needs no whole engine
        (policies/core/lane.py). A subclass with methods of its own has to declare it again.
        """
        ...


def fills_in_order(batching: Batching) -> bool:
    """Returns whether a policy declares `fills_in_order` for its own methods."""
    if not isinstance(batching, FillsInOrder) or not declares_itself(batching, "fills_in_order"):
        return False
    return batching.fills_in_order is True


def declares_itself(batching: object, name: str = "max_unasked_decodes") -> bool:
    """Whether a policy declares something for its own methods, not for methods that it replaces."""
    for each in type(batching).__mro__:
        if name in vars(each):
            return True
        own = vars(each)
        if "fill" in own or any(callable(own[name]) for name in own if not name.startswith("__")):
            return False
    return name in getattr(batching, "__dict__", {})


def supports_mixed_role(policy: object) -> bool:
    """Whether a policy can serve requests from arrival to end in a pool of role mixed, without another pool.

    A policy of one role declares `supports_mixed_role = False`; its old name `serves_alone` is read for one
    version.
    """
    return bool(getattr(policy, "supports_mixed_role", getattr(policy, "serves_alone", True)))
