"""Limits on fields: each kind refuses what breaks it, with name, value and rule; all classes check theirs."""

import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass, field, is_dataclass
from math import inf, nan
from typing import Annotated, Literal

import pytest

import experiments
import hwmodels
import policies
import sim
from fieldlimits import (
    FINITE,
    Checked,
    Ge,
    Gt,
    MinLen,
    OneOf,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    Unit,
    check,
    limits_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Checked):
    wait_s: Annotated[float | None, Gt(0), FINITE, Unit("s"), "null for no limit"] = 1.0
    size: PositiveInt = 1
    slots: Annotated[int, Ge(1), "as each is in memory"] = 1
    share: Share = 0.5
    part: PositiveShare | None = None
    order: Annotated[str, OneOf(("prompt", "output"))] = "prompt"
    way: Literal["all", "first"] = "all"
    level: Annotated[int | None, OneOf((1, 2))] = None
    names: Annotated[tuple[str, ...], MinLen(1), "for example names=[a]"] = ("a",)
    times_s: tuple[Annotated[float, Gt(0), Unit("s")], ...] = ()
    weights: dict[str, Positive] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrower(Settings):
    size: int = 4
    share: Annotated[float, Ge(0.2)] = 0.5

    def __post_init__(self) -> None:
        check(self)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"wait_s": 0.0}, "wait_s=0.0: must be a finite number > 0 s, or null for no limit"),
        ({"wait_s": inf}, "wait_s=inf: must be a finite number > 0 s, or null for no limit"),
        ({"wait_s": nan}, "wait_s=nan: must be a finite number > 0 s, or null for no limit"),
        ({"size": 0}, "size=0: must be >= 1"),
        ({"size": 1.5}, "size=1.5: must be a whole number >= 1"),
        ({"size": True}, "size=true: must be a whole number >= 1"),
        ({"size": "2"}, "size=2: must be a whole number >= 1"),
        ({"slots": 0}, "slots=0: must be >= 1, as each is in memory"),
        ({"share": 1.5}, "share=1.5: must be a share, >= 0 and <= 1"),
        ({"share": None}, "share=null: must be a share, >= 0 and <= 1"),
        ({"part": 0.0}, "part=0.0: must be a share, > 0 and <= 1, or null"),
        ({"order": "promt"}, "order=promt: must be one of prompt, output; nearest: prompt"),
        ({"way": "last"}, "way=last: must be one of all, first"),
        ({"level": 3}, "level=3: must be one of 1, 2, or null"),
        ({"names": ()}, "names=[]: must not be empty, for example names=[a]"),
        ({"times_s": (1.0, -1.0)}, "times_s[1]=-1.0: must be > 0 s"),
        ({"weights": {"a": 1.0, "b": nan}}, "weights.b=nan: must be a finite number > 0"),
    ],
)
def test_a_value_beyond_a_limit_is_refused_with_name_value_and_rule(given, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        Settings(**given)


def test_values_within_the_limits_are_accepted():
    Settings(wait_s=None, size=7, share=1, part=1.0, order="output", level=2, weights={"a": 0.1})


def test_a_field_declared_again_keeps_its_limits_unless_it_declares_others():
    with pytest.raises(ValueError, match="size=0: must be >= 1"):
        Narrower(size=0)
    with pytest.raises(ValueError, match=r"share=0.1: must be >= 0.2"):
        Narrower(share=0.1)
    assert Narrower(share=1.5).share == 1.5


def test_a_user_class_with_names_of_type_checkers_only_is_accepted():
    @dataclass(kw_only=True)
    class Own(Checked):
        other: "Unknown" = None  # noqa: F821
        size: PositiveInt = 1

    with pytest.raises(ValueError, match="size=0"):
        Own(size=0)
    assert list(limits_of(Own)) == ["size"]


def all_dataclasses():
    for package in (policies, hwmodels, sim, experiments):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.startswith(
                ("experiments.gpu", "experiments.train_draft")
            ):  # need a GPU's libraries
                continue
            if module.name.endswith("__main__") or ".templates" in module.name:
                continue
            for found in vars(importlib.import_module(module.name)).values():
                if isinstance(found, type) and is_dataclass(found) and found.__module__ == module.name:
                    yield found


def declares(cls):
    """Tests whether a class annotates a limit: a choice of literals alone is a type."""
    bounds = [bound for limit in limits_of(cls).values() for bound in limit.bounds]
    return any(not isinstance(bound, OneOf) for bound in bounds) or (
        bounds and "OneOf(" in inspect.getsource(cls)
    )


def test_every_class_with_limits_checks_them():
    """A class with limits is `Checked`; a `__post_init__` of its own calls `check` or that of its base."""
    num_limits = 0
    for cls in all_dataclasses():
        if cls.__name__ == "Reply" or not declares(cls):
            continue
        num_limits += len(limits_of(cls))
        assert issubclass(cls, Checked), cls
        if "__post_init__" in vars(cls):
            source = inspect.getsource(cls.__post_init__)
            assert "check(self)" in source or ".__post_init__(self)" in source, cls
    assert num_limits > 400


def broken(limit):
    """Yields values that no field with these limits may have."""
    for bound in limit.bounds:
        if isinstance(bound, OneOf):
            yield "no such choice"
        elif limit.number is not None:
            yield from (nan, -inf, "text")


def test_every_setting_out_of_range_gives_a_sentence_with_key_and_value():
    """Each limited field of each class with defaults for all fields is set to values that break it."""
    num_refused = 0
    for cls in all_dataclasses():
        try:
            cls()
        except (TypeError, ValueError):
            continue
        for name, limit in limits_of(cls).items() if issubclass(cls, Checked) else ():
            for value in broken(limit):
                with pytest.raises(ValueError, match=rf"^{name}={value}: must be "):
                    cls(**{name: value})
                num_refused += 1
    assert num_refused > 300
