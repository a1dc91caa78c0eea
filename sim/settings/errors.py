"""Error messages for wrong settings, with the allowed names and the most similar one."""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """A setting that cannot be used. The command line prints only the message and exits with status 2."""


GONE = {"rate_scale": "use load=2, at the root, for the same requests at twice the rate"}
"""Removed settings, by the last part of their key -> the advice what to use instead."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate that is most similar to `name`, or None if none is similar.

    Dotted keys also match by their last part alone: `leap` finds `sim.leap`.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not close:
        by_leaf = {lower.rpartition(".")[2]: lower for lower in reversed(by_lower)}
        leaves = difflib.get_close_matches(name.lower().rpartition(".")[2], by_leaf, n=1, cutoff=0.75)
        close = [by_leaf[leaf] for leaf in leaves]
    return by_lower[close[0]] if close else None


def suggest(name: str, allowed: Iterable[str], also: Iterable[str] = ()) -> str:
    """Returns `nearest: X; allowed: a, b, c`, the end of an error message about an unknown `name`.

    also: further names that may be the nearest but are too many to list. For a removed setting (`GONE`)
    returns the advice what to use instead.
    """
    if (instead := GONE.get(name.rpartition(".")[2])) is not None:
        return instead
    names = list(allowed)
    parts = []
    if best := nearest(name, [*names, *also]):
        parts.append(f"nearest: {best}")
    parts.append(f"allowed: {', '.join(names)}" if names else "allowed: none")
    return "; ".join(parts)
