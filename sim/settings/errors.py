"""Error messages for a wrong setting: what is allowed, and what was probably meant."""

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """A setting that cannot be used. The command line prints the message alone and exits 2."""


GONE = {"rate_scale": "load=2, at the root, lets the same requests arrive in half the time"}
"""Settings that there were, by their last part, and what does the same."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` was probably meant to be, or None if nothing comes close.

    Dotted keys also match by their last part alone, so that `leap` finds `sim.leap`.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    if not close:
        by_leaf = {lower.rpartition(".")[2]: lower for lower in reversed(by_lower)}
        leaves = difflib.get_close_matches(name.lower().rpartition(".")[2], by_leaf, n=1, cutoff=0.75)
        close = [by_leaf[leaf] for leaf in leaves]
    return by_lower[close[0]] if close else None


def suggest(name: str, allowed: Iterable[str], also: Iterable[str] = ()) -> str:
    """`nearest: X; allowed: a, b, c`, the tail of an error about an unknown `name`.

    `also` are names that may be proposed as the nearest but are too many to list. Of a name that is `GONE`:
    what does the same.
    """
    if (instead := GONE.get(name.rpartition(".")[2])) is not None:
        return instead
    names = list(allowed)
    parts = []
    if best := nearest(name, [*names, *also]):
        parts.append(f"nearest: {best}")
    parts.append(f"allowed: {', '.join(names)}" if names else "allowed: none")
    return "; ".join(parts)
