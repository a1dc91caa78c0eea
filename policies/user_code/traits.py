"""The traits of a policy: what it says about itself, with defaults for what it leaves out.

A policy need not inherit from a class of this project. So each family lists in a frozen dataclass what its
policies may have beside the methods of their protocol, and `traits_of` reads it:

    traits_of(routing, RoutingTraits).reads_signals
"""

from __future__ import annotations

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
