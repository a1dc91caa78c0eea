"""Claims that were renamed: their old names are accepted for one version, with a note."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

NEW_CLAIMS = {
    "same_again": "run_is_reproducible",
    "everybody_ends": "every_request_ends",
    "unasked_equals_asked": "unasked_decodes_equal_fill",
    "blind_to_the_truth": "independent_of_true_lengths",
    "overtaken_at_most": "starvation_bound_holds",
    "overtaken_within": "starvation_bound_s_holds",
    "answers_none_or_refusal": "returns_none_or_refusal",
    "answers_the_same_again": "admission_is_reproducible",
    "lets_in_when_idle": "admits_when_idle",
    "never_means_never": "permanent_refusals_stay",
    "keeps_its_word": "retry_after_holds",
    "forgets_who_has_ended": "forgets_ended_requests",
    "asks_within_bounds": "target_within_bounds",
    "asks_the_same_again": "target_is_reproducible",
    "honest_about_the_truth": "needs_truth_is_declared",
}
"""Old name -> new name."""

_OLD = re.compile(rf"\b({'|'.join(NEW_CLAIMS)})\b")


def with_new_claims(expression: str) -> tuple[str, list[str]]:
    """Adds the new names of claims to an expression of pytest's -k; returns also one note per old name."""
    old_names = dict.fromkeys(_OLD.findall(expression))
    extended = _OLD.sub(lambda found: f"({found[0]} or {NEW_CLAIMS[found[0]]})", expression)
    return extended, [_note(old) for old in old_names]


def promise_by_old_name(old: str, module: Mapping[str, Any]) -> Any:
    """Returns the promise of a module, given by its attributes, that had an old name.

    Raises AttributeError if no promise of the module had it.
    """
    new = NEW_CLAIMS.get(old)
    if new is None or new not in module:
        raise AttributeError(f"module {module['__name__']!r} has no attribute {old!r}")
    warnings.warn(_note(old), DeprecationWarning, stacklevel=3)
    return module[new]


def _note(old: str) -> str:
    return f"the claim {old} is now called {NEW_CLAIMS[old]}; the old name is accepted for one more version."
