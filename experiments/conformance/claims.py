"""The conformance suite: every promise that a policy of its family must keep, in many random worlds.

A third party runs it by `pytest --policy path.to.Policy`, or from its own tests:

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
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.admission_promises import (
    answers_none_or_refusal,
    answers_the_same_again,
    forgets_who_has_ended,
    keeps_its_word,
    lets_in_when_idle,
    never_means_never,
)
from experiments.conformance.days import draw_days
from experiments.conformance.draws import draw_worlds_with
from experiments.conformance.families import family_of
from experiments.conformance.promises import (
    Promise,
    asks_the_same_again,
    asks_within_bounds,
    blind_to_the_truth,
    budget_respected,
    chooses_a_replica,
    copies_share_nothing,
    everybody_ends,
    honest_about_the_truth,
    leap_equals_step,
    no_leaked_blocks,
    overtaken_at_most,
    overtaken_within,
    predicts_within_limits,
    same_again,
    unasked_equals_asked,
)
from experiments.conformance.words import in_words
from policies.batching import DecodesUnasked, supports_mixed_role
from sim.settings.build import build

NUM_WORLDS = 100
"""In which each promise is tried, unless somebody wants more or fewer."""

_EVERY: tuple[Promise, ...] = (leap_equals_step, same_again, everybody_ends)
_IN_ENGINE = (*_EVERY, no_leaked_blocks, budget_respected, blind_to_the_truth)
PROMISES: Mapping[str, tuple[Promise, ...]] = {
    "batching": (*_IN_ENGINE, unasked_equals_asked),
    "scheduling": _IN_ENGINE,
    "caching": _IN_ENGINE,
    "routing": (chooses_a_replica, *_EVERY, blind_to_the_truth),
    "admission": (
        answers_none_or_refusal,
        answers_the_same_again,
        lets_in_when_idle,
        never_means_never,
        keeps_its_word,
        forgets_who_has_ended,
    ),
    "scaling": (asks_within_bounds, asks_the_same_again),
    "adapters": (*_EVERY, no_leaked_blocks, blind_to_the_truth),
    "prediction": (predicts_within_limits, copies_share_nothing, honest_about_the_truth, *_EVERY),
}


MAX_SHRINKING_S = 20.0
"""For which a smaller world is looked for once one has been found in which a promise is broken."""


class _Enough(BaseException):
    """Ends hypothesis' search, which takes it for an interrupt."""


class BrokenPromise(AssertionError):
    """What a policy did not keep to, in the smallest world that was found, and what happened there."""


@dataclass(frozen=True)
class Claim:
    """One promise of one policy."""

    name: str
    promise: Promise
    worlds: st.SearchStrategy[Any]

    def __str__(self) -> str:
        return self.name

    def check(self, num_worlds: int = NUM_WORLDS) -> None:
        """Try it in so many random worlds, the same ones every time. Raises BrokenPromise.

        Reports the smallest world found in which it is broken.
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
            is_bug = not isinstance(broken.__cause__, AssertionError)  # then its traceback says where
            raise BrokenPromise(str(broken)) from (broken.__cause__ if is_bug else None)

    def check_in(self, world: Any) -> None:
        """Try it in one world. Raises BrokenPromise."""
        try:
            self.promise(world)
        except Exception as error:
            what = (self.promise.__doc__ or "").splitlines()[0]
            raise BrokenPromise(
                f"{self.name}: {what}\nNot so in this world:\n\n{in_words(world)}\n\n{_describe(error)}"
            ) from error


def claims_of(policy: Any, fixed: Collection[str] = ()) -> list[Claim]:
    """What is to be checked of a policy, an object with its settings.

    The worlds vary its max_num_batched_tokens, preemption_mode, block_size, max_outstanding and burst, where
    it has such a setting, but for those named in `fixed`. Raises ValueError for a policy of no family.
    """
    family = family_of(policy)
    promises = {promise.__name__: promise for promise in PROMISES[family]}
    if family == "scaling":  # it sees a pool, no engine: days of fluid traffic are its worlds
        return [Claim(name, promise, draw_days(policy)) for name, promise in promises.items()]
    if family == "adapters":
        return [Claim(name, promise, draw_adapter_worlds(policy)) for name, promise in promises.items()]
    worlds = draw_worlds_with(family, policy, fixed)
    if not supports_mixed_role(policy):
        del promises[everybody_ends.__name__]
    if family == "batching" and not isinstance(policy, DecodesUnasked):
        del promises[unasked_equals_asked.__name__]
    claims = [Claim(name, promise, worlds) for name, promise in promises.items()]
    in_order = draw_worlds_with(family, policy, fixed, others_in_order=True)
    bound = getattr(policy, "starvation_bound", None)
    if bound is not None:
        promise = partial(overtaken_at_most, bound=bound)
        promise.__doc__ = f"Nobody sees more than {bound} requests admitted that came after it."
        claims.append(Claim(overtaken_at_most.__name__, promise, in_order))
    bound_s = getattr(policy, "starvation_bound_s", None)
    if bound_s is not None:
        promise = partial(overtaken_within, bound_s=bound_s)
        promise.__doc__ = f"Nobody is overtaken by a request that came more than {bound_s} s after it."
        claims.append(Claim(overtaken_within.__name__, promise, in_order))
    return claims


def claims_by_name(path: str, given_settings: Mapping[str, Any]) -> list[Claim]:
    """What is to be checked of the policy at a dotted path. Raises ConfigError, ValueError."""
    policy = build({"_target_": path, **given_settings}, "policy")
    return claims_of(policy, fixed=given_settings.keys())


def _describe(error: Exception) -> str:
    """Describes an error; an assertion without a message by its line."""
    message = str(error)
    if not isinstance(error, AssertionError):
        return f"{type(error).__name__}: {message}"
    if message or error.__traceback__ is None:
        return message
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    file = last.tb_frame.f_code.co_filename
    return f"{file}:{last.tb_lineno}: {linecache.getline(file, last.tb_lineno).strip()}"
