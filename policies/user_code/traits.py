"""The traits and the name of a policy: what it says about itself, with defaults for what it leaves out.

A policy need not inherit from a class of this project. So each family lists in a frozen dataclass what its
policies may have beside the methods of their protocol, and `traits_of` reads it:

    traits_of(routing, RoutingTraits).reads_signals

Messages name policies as users write them.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, ClassVar, Final, Protocol, TypeVar


class _Traits(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Traits = TypeVar("Traits", bound=_Traits)

_LEFT_OUT: Final = object()


def traits_of(policy: object, family: type[Traits]) -> Traits:
    """Returns what a policy says of the traits of its family; what it leaves out has the default."""
    said = {each.name: getattr(policy, each.name, _LEFT_OUT) for each in fields(family)}
    return family(**{name: value for name, value in said.items() if value is not _LEFT_OUT})


OTHERWISE_NAMED = {
    "AdmitAll": "none",
    "BestFitDecreasing": "best_fit",
    "BucketClassifier": "buckets",
    "EarliestDeadlineFirst": "edf",
    "FastGen": "fastgen",
    "FirstFitDecreasing": "first_fit",
    "InFlight": "inflight",
    "NoDrafts": "none",
    "OracleWithNoise": "oracle",
    "PrefixCaching": "prefix",
    "PromptLengthRegression": "regression",
    "RunningHistogram": "histogram",
    "SnapKv": "snapkv",
    "SplitFuse": "splitfuse",
    "Stay": "none",
}
"""Classes with a choice of another name in configs/ -> the choice."""

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_of(policy: object) -> str:
    """Returns the choice that a policy's class is, by its name: LongestPrefix -> longest_prefix."""
    return name_of_class(type(policy))


def name_of_class(cls: type) -> str:
    """Returns the choice that a class is, by its name."""
    name = cls.__name__
    return OTHERWISE_NAMED.get(name) or _WORD.sub("_", name).lower()
