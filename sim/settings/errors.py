"""Error messages for wrong settings, with the allowed names and the most similar ones; names of root keys."""

import difflib
import re
from collections.abc import Collection, Iterable


class ConfigError(Exception):
    """A setting that cannot be used. The command line prints only the message and exits with status 2."""


GONE = {"rate_scale": "use load=2, at the root, for the same requests at twice the rate"}
"""Removed settings, by the last part of their key -> what to use instead."""

FEW = 8
"""Number of allowed names up to which a message lists all of them although a command can list them."""

NUM_NEAREST = 3


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Returns the candidate that is most similar to `name`, or None if none is similar."""
    return next(iter(nearest_names(name, candidates)), None)


def nearest_names(name: str, candidates: Iterable[str], usual: Collection[str] = ()) -> list[str]:
    """Returns at most `NUM_NEAREST` candidates that are similar to `name`, the most similar one first.

    Candidates that begin with the name come first, shorter ones before longer ones: `a100` finds
    `a100_pcie`, which other measures of similarity rank below `a10g`. Case and punctuation do not count.
    Dotted keys also match by their last part alone: `leap` finds `sim.leap`. usual: candidates that come
    before others that begin with the name as well.
    """
    names = list(dict.fromkeys(candidates))
    has_keys = any("." in candidate for candidate in names)
    typed, typed_leaf = _letters(name), _letters(_leaf(name) if has_keys else name)
    whole = {candidate: _letters(candidate) for candidate in names}
    leaves = {candidate: _letters(_leaf(candidate)) for candidate in names} if has_keys else {}
    found = [candidate for candidate in names if typed and whole[candidate] == typed]
    found += [candidate for candidate in leaves if leaves[candidate] == typed_leaf]
    if len(typed) > 1:
        longer = [c for c in names if whole[c].startswith(typed)]
        found += sorted(longer, key=lambda c: (c not in usual, len(c)))
        shorter = [c for c in names if len(whole[c]) > 2 and typed.startswith(whole[c])]
        found += sorted(
            (c for c in shorter if not name.startswith((f"{c}.", f"{c}/"))), key=len, reverse=True
        )
    found += _close(name.lower(), {candidate.lower(): candidate for candidate in names}, cutoff=0.6)
    by_leaf = {_leaf(candidate).lower(): candidate for candidate in reversed(names)}
    found += _close(_leaf(name).lower(), by_leaf, cutoff=0.75)
    if len(typed) > 2:
        found += [candidate for candidate in names if typed in whole[candidate]]
    return list(dict.fromkeys(found))[:NUM_NEAREST]


def _close(name: str, candidates: dict[str, str], cutoff: float) -> list[str]:
    close = difflib.get_close_matches(name, candidates, n=NUM_NEAREST, cutoff=cutoff)
    return [candidates[key] for key in close]


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _letters(text: str) -> str:
    """Returns the letters and digits of a text, in lower case."""
    return re.sub(r"[\W_]", "", text).lower()


def suggest(
    name: str,
    allowed: Iterable[str],
    also: Iterable[str] = (),
    *,
    listed_by: str = "",
    usual: Collection[str] = (),
) -> str:
    """Returns `nearest: X; allowed: a, b, c`, the end of an error message about an unknown `name`.

    also: further names that may be the nearest but are too many to list. listed_by: a command that prints all
    allowed names; with it, more than `FEW` names are not listed: `nearest: X, Y, Z; all: windtunnel list`.
    usual: see `nearest_names`. For a removed setting (`GONE`) returns what to use instead.
    """
    if (instead := GONE.get(_leaf(name))) is not None:
        return instead
    names = list(allowed)
    is_short = not listed_by or len(names) <= FEW
    best = nearest_names(name, [*names, *also], usual)[: 1 if is_short else NUM_NEAREST]
    parts = [f"nearest: {', '.join(best)}"] if best else []
    if is_short:
        parts.append(f"allowed: {', '.join(names)}" if names else "allowed: none")
    else:
        parts.append(f"all: {listed_by}")
    return "; ".join(parts)


NOT_OF_A_SCENARIO = ("hydra", "output", "launcher")
"""Root keys that do not belong to the scenario."""

OPTIONAL = ("slo", "prediction", "adapters", "tariff", "scaling", "speculation")
"""Groups with a choice `none` that is an empty node."""

ONLY_WITH_SPECULATION = ("draft_length", "acceptance")
"""Groups that are built only if a proposer drafts tokens."""
