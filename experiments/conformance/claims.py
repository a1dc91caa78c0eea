"""Claims of the conformance suite: a policy keeps every promise of its family in many random worlds.

The suite runs with `pytest --policy path.to.Policy`, or from a test of one's own:

    @pytest.mark.parametrize("claim", claims_of(MyPolicy()), ids=str)
    def test_my_policy_keeps_its_promises(claim):
        claim.check()
"""

from __future__ import annotations

import linecache
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.admission_promises import (
    admission_is_reproducible,
    admits_when_idle,
    forgets_ended_requests,
    permanent_refusals_stay,
    retry_after_holds,
    returns_none_or_refusal,
)
from experiments.conformance.days import draw_days
from experiments.conformance.draft_draws import draw_speculating_worlds
from experiments.conformance.draft_promises import answers_are_complete, draft_lengths_within_limits
from experiments.conformance.draws import draw_worlds_with
from experiments.conformance.promises import (
    Promise,
    budget_respected,
    choices_need_no_replica,
    chooses_a_replica,
    copies_share_nothing,
    every_request_ends,
    independent_of_true_lengths,
    leap_equals_step,
    needs_truth_is_declared,
    no_leaked_blocks,
    predicts_within_limits,
    run_is_reproducible,
    starvation_bound_holds,
    starvation_bound_s_holds,
    target_is_reproducible,
    target_within_bounds,
    unasked_decodes_equal_fill,
)
from experiments.conformance.words import in_words
from policies.adapters import AdapterServing
from policies.batching import DecodesUnasked, supports_mixed_role
from policies.caching.pool import Caching
from policies.routing import reads_replicas
from policies.scheduling import Scheduling, StarvationTraits
from policies.user_code import PolicyError, failure, traits_of, with_quote
from sim.settings.build import build, policies_of

NUM_WORLDS = 100
"""Number of random worlds in which each promise is checked by default."""

_EVERY: tuple[Promise, ...] = (leap_equals_step, run_is_reproducible, every_request_ends)
_IN_ENGINE = (*_EVERY, no_leaked_blocks, budget_respected, independent_of_true_lengths)
PROMISES: Mapping[str, tuple[Promise, ...]] = {
    "batching": (*_IN_ENGINE, unasked_decodes_equal_fill),
    "scheduling": _IN_ENGINE,
    "caching": _IN_ENGINE,
    "routing": (chooses_a_replica, choices_need_no_replica, *_EVERY, independent_of_true_lengths),
    "admission": (
        returns_none_or_refusal,
        admission_is_reproducible,
        admits_when_idle,
        permanent_refusals_stay,
        retry_after_holds,
        forgets_ended_requests,
    ),
    "scaling": (target_within_bounds, target_is_reproducible),
    "adapters": (*_EVERY, no_leaked_blocks, independent_of_true_lengths),
    "draft_length": (draft_lengths_within_limits, answers_are_complete, *_IN_ENGINE),
    "prediction": (predicts_within_limits, copies_share_nothing, needs_truth_is_declared, *_EVERY),
}
"""Family -> its promises; the name of a promise's function is the name of the claim."""

MAX_SHRINKING_S = 20.0
"""Time for which a smaller world is searched once a promise was found broken, in seconds."""


class Family(NamedTuple):
    """Config group of policies, with the methods and the base class that its members must have."""

    name: str
    methods: tuple[str, ...]
    base: type | None = None


FAMILIES = (
    Family("batching", ("fill",)),
    Family("scheduling", ("rank",), Scheduling),
    Family("caching", ("pool",), Caching),
    Family("routing", ("choose",)),
    Family("admission", ("refusal",)),
    Family("scaling", ("target",)),
    Family("prediction", ("predict", "observe")),
    Family("adapters", ("residents",), AdapterServing),
    Family("draft_length", ("num_draft_tokens",)),
)


def family_of(policy: Any) -> str:
    """Returns the family of a policy, by its methods. Raises ValueError if no family or several match."""
    found = [family for family in FAMILIES if all(callable(getattr(policy, m, None)) for m in family.methods)]
    name = type(policy).__name__
    if len(found) != 1:
        wanted = "; ".join(f"{family.name}: {', '.join(family.methods)}" for family in FAMILIES)
        has = f"those of {' and '.join(family.name for family in found)}" if found else "those of none"
        raise ValueError(f"{name}: must have the methods of one family, but has {has} ({wanted})")
    (family,) = found
    if family.base is not None and not isinstance(policy, family.base):
        base = f"{family.base.__module__}.{family.base.__name__}"
        raise ValueError(f"{name}: a policy of the family {family.name} must inherit from {base}")
    return family.name


class _Enough(BaseException):
    """Raised to end hypothesis' search, which treats it as an interrupt."""


class BrokenPromise(AssertionError):
    """Raised with the broken promise, the smallest world found in which it is broken, and the failure."""


@dataclass(frozen=True)
class Claim:
    """Claim that a policy keeps one promise."""

    name: str
    promise: Promise
    worlds: st.SearchStrategy[Any]

    def __str__(self) -> str:
        return self.name

    def check(self, num_worlds: int = NUM_WORLDS) -> None:
        """Checks the promise in random worlds, which are the same in every call.

        Raises BrokenPromise with the smallest world found in which it is broken.
        """
        __tracebackhide__ = True

        smallest: BrokenPromise | None = None
        first_s = 0.0

        @settings(
            max_examples=num_worlds,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
        )
        @given(self.worlds)
        def in_every_world(world: Any) -> None:
            nonlocal smallest, first_s
            if smallest is not None and monotonic() - first_s > MAX_SHRINKING_S:
                raise _Enough
            try:
                self.check_in(world)
            except BrokenPromise as broken:
                if smallest is None:
                    first_s = monotonic()
                smallest = broken
                raise

        try:
            in_every_world()
        except (BrokenPromise, _Enough):
            broken = smallest
            assert broken is not None
            is_bug = not isinstance(broken.__cause__, AssertionError | PolicyError)  # it keeps its traceback
            raise BrokenPromise(str(broken)) from (broken.__cause__ if is_bug else None)

    def check_in(self, world: Any) -> None:
        """Checks the promise in one world. Raises BrokenPromise."""
        try:
            self.promise(world)
        except Exception as raised:
            error = failure(raised, policies_of(world)) or raised
            what = (self.promise.__doc__ or "").splitlines()[0]
            raise BrokenPromise(
                f"{self.name}: {what}\nBroken in this world:\n\n{in_words(world)}\n\n{_describe(error)}"
            ) from error


def claims_of(policy: Any, fixed: Collection[str] = ()) -> list[Claim]:
    """Returns the claims of a policy, an object with its settings.

    The worlds vary its settings max_num_batched_tokens, preemption_mode, block_size, max_outstanding and
    burst, if it has them, except those named in `fixed`. Raises ValueError if it is of no family.
    """
    family = family_of(policy)
    promises = {promise.__name__: promise for promise in PROMISES[family]}
    if family == "scaling":  # a scaling policy sees a pool and no engine, so its worlds are days of traffic
        return [Claim(name, promise, draw_days(policy)) for name, promise in promises.items()]
    if family == "adapters":
        return [Claim(name, promise, draw_adapter_worlds(policy)) for name, promise in promises.items()]
    if family == "draft_length":
        return [Claim(name, promise, draw_speculating_worlds(policy)) for name, promise in promises.items()]
    worlds = draw_worlds_with(family, policy, fixed)
    if not supports_mixed_role(policy):
        del promises[every_request_ends.__name__]
    if family == "batching" and not isinstance(policy, DecodesUnasked):
        del promises[unasked_decodes_equal_fill.__name__]
    if family == "routing" and reads_replicas(policy):
        del promises[choices_need_no_replica.__name__]
    claims = [Claim(name, promise, worlds) for name, promise in promises.items()]
    in_order = draw_worlds_with(family, policy, fixed, others_in_order=True)
    bounds = traits_of(policy, StarvationTraits)
    bound, bound_s = bounds.starvation_bound, bounds.starvation_bound_s
    if bound is not None:
        promise = partial(starvation_bound_holds, bound=bound)
        promise.__doc__ = f"Requires that at most {bound} later requests are admitted before a request."
        claims.append(Claim(starvation_bound_holds.__name__, promise, in_order))
    if bound_s is not None:
        promise = partial(starvation_bound_s_holds, bound_s=bound_s)
        promise.__doc__ = (
            f"Requires that no request is admitted before one that arrived more than {bound_s} s earlier."
        )
        claims.append(Claim(starvation_bound_s_holds.__name__, promise, in_order))
    return claims


def claims_by_name(path: str, given_settings: Mapping[str, Any]) -> list[Claim]:
    """Returns the claims of the policy class at a dotted path.

    Raises ConfigError if it cannot be built with these settings, and ValueError if it is of no family.
    """
    policy = build({"_target_": path, **given_settings}, "policy")
    return claims_of(policy, fixed=given_settings.keys())


def _describe(error: Exception) -> str:
    """Describes an error; an assertion without a message is described by its source line."""
    message = with_quote(error)
    if isinstance(error, PolicyError):
        return message
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {message}"
    if message or error.__traceback__ is None:
        return message
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    file = last.tb_frame.f_code.co_filename
    return f"{file}:{last.tb_lineno}: {linecache.getline(file, last.tb_lineno).strip()}"
