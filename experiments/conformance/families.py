"""Families of policies, and the family of an object."""

from __future__ import annotations

from typing import Any, NamedTuple

from policies.adapters import AdapterServing
from policies.caching.pool import Caching
from policies.scheduling import Scheduling


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
