"""Batching policies: they decide which sequences share an iteration, with how many tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Protocol, runtime_checkable

from fieldlimits import Checked, OneOf, PositiveInt
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.user_code import name_of, traits_of


class Batching(Protocol):
    """Decides the tokens of an iteration: reads the view, and calls the builder's methods."""

    def fill(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Fills the step with the tokens of the next iteration. `now`: seconds on the caller's clock."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingTraits:
    """Optional members of a batching policy next to `fill`: declarations, and settings that others read."""

    supports_mixed_role: bool = True
    """Whether it can serve requests from arrival to end; False: it suits only prefill or decode replicas."""
    serves_alone: bool = True
    """The old name of supports_mixed_role, still accepted for one version."""
    until_last: bool = False
    """Whether the outputs of a batch are complete together, with its last member."""
    max_num_batched_tokens: int | None = None
    """Maximum tokens per iteration; None: the policy sets no limit. The same applies to the members below."""
    max_num_scheduled_tokens: int | None = None
    max_prefill_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    n_batch: int | None = None
    long_prefill_token_threshold: int = 0
    """Maximum tokens of one prompt in an iteration; 0: no limit."""
    batch_size: int | None = None
    """Maximum sequences of a batch."""
    n_parallel: int | None = None
    """Maximum sequences of a batch, by the name of this limit in llama.cpp."""
    num_ranks: int | None = None
    """Attention groups for which prompts wait; None: prompts do not wait for groups."""


@runtime_checkable
class DecodesUnasked(Protocol):
    """A batching policy with nothing to decide while all sequences of the engine decode.

    The engine need not call `fill` for such iterations, which saves time.
    """

    @property
    def max_unasked_decodes(self) -> int:
        """Maximum number of sequences for which the engine skips the call of `fill` while all of them decode.

        The policy promises that `fill` would schedule the next token of each of them and would repeat this
        without a limit (`decode_all`, `repeat`). If the scheduling policy has `before_step`, `fill` is always
        called. A subclass with additional methods, or a wrapper, must declare the number again (see
        `declares_itself`).
        """
        ...


def max_unasked_of(batching: Batching) -> int:
    """Returns the policy's max_unasked_decodes; 0 if no declaration applies to its `fill`.

    Raises ValueError if the declared value is not a whole number >= 0.
    """
    if not isinstance(batching, DecodesUnasked) or not declares_itself(batching):
        return 0
    limit: object = batching.max_unasked_decodes
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ValueError(
            f"batching={name_of(batching)}: its max_unasked_decodes={limit!r} must be a whole number >= 0"
        )
    return limit


def declares_itself(batching: object, name: str = "max_unasked_decodes") -> bool:
    """Returns whether attribute `name` is declared, and no subclass of the declaring class adds methods."""
    for each in type(batching).__mro__:
        if name in vars(each):
            return True
        own = vars(each)
        if "fill" in own or any(callable(own[name]) for name in own if not name.startswith("__")):
            return False
    return hasattr(batching, "__dict__") and name in vars(batching)


def supports_mixed_role(policy: object) -> bool:
    """Returns whether a policy can serve requests from arrival to end, in a pool of role mixed.

    A policy for a single role declares `supports_mixed_role = False`; the old name `serves_alone` is still
    accepted for one version.
    """
    traits = traits_of(policy, BatchingTraits)
    return bool(traits.supports_mixed_role and traits.serves_alone)


LOAD_BALANCE_METHODS = ("total_requests", "round_robin")
LIMITS = (
    "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_active_seqs", "batch_size", "n_parallel",
    "n_batch", "max_batch_prefill_tokens", "max_batch_total_tokens",
)  # fmt: skip
"""Settings of batching policies that are divided among the ranks."""


@runtime_checkable
class DividesLimits(Protocol):
    """A batching policy that creates the ranks' policies itself; other policies divide `LIMITS`."""

    def of_rank(self, size: int) -> Batching:
        """Returns a new policy for each of `size` ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallel(Checked):
    """Settings of the ranks of an engine."""

    size: PositiveInt = 1
    load_balance_method: Annotated[str, OneOf(LOAD_BALANCE_METHODS)] = "total_requests"


def of_rank(batching: Batching, size: int) -> Batching:
    """Returns the policy of one of `size` ranks: a copy with its share of the limits."""
    if isinstance(batching, DividesLimits):
        return batching.of_rank(size)
    own = deepcopy(batching)
    for name in LIMITS:
        limit = getattr(own, name, None)
        if isinstance(limit, int):
            object.__setattr__(own, name, max(1, limit // size))  # settings are frozen
    return own
