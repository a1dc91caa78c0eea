"""Errors of the user's policies as errors of settings: a sentence, and the place in the user's own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from policies.user_code.decisions import PACKAGES, is_of_user, package_of
from policies.user_code.failure import Policy, PolicyError, failure
from policies.user_code.traits import name_of_class
from sim.settings.errors import ConfigError


class PolicyFailedError(ConfigError, PolicyError):
    """A policy has failed; the command line prints the sentence and the place, and exits with status 2."""


def wrong_class(key: str, cls: type, message: str, quote: str) -> PolicyFailedError:
    """Returns the error about a user's class that lacks what its place in the config needs."""
    policy = Policy(key, name_of_class(cls), cls)
    message = message.removeprefix(f"{cls.__name__} ")
    return PolicyFailedError(f"{policy}: {message}", quote, "", (key, policy.choice, policy.path))


@contextmanager
def policy_errors(settings: Any, key: str = "") -> Iterator[None]:
    """Raises PolicyFailedError in place of errors inside the context that a policy has caused.

    settings: an object or a mapping with all policies, at any depth. key: its place in the config.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        raise_if_of_policy(error, settings, key)
        raise


def raise_if_of_policy(error: BaseException, settings: Any, key: str = "") -> None:
    """Raises PolicyFailedError if a policy has caused the error."""
    if isinstance(error, ConfigError):
        return
    found = failure(error, policies_of(settings, key))
    if found is not None:
        raise PolicyFailedError(*found.args) from error


def policies_of(value: Any, key: str = "") -> Iterator[Policy]:
    """Yields the objects of the user, and our policies, in settings at any depth, with their keys."""
    cls = type(value)
    if is_of_user(cls) or (key and package_of(cls) in PACKAGES):
        yield Policy(key, name_of_class(cls), cls, value)
    if isinstance(value, Mapping):
        named = [(str(name), item) for name, item in value.items()]
    elif is_dataclass(value):
        named = [(each.name, getattr(value, each.name, None)) for each in fields(value)]
    else:
        return
    for name, item in named:
        if not isinstance(item, str | int | float | None):
            yield from policies_of(item, f"{key}.{name}" if key else name)
