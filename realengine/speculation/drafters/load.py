"""Loads the drafter of a proposer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from policies.speculation import Proposer
from policies.speculation.proposers import Ngram
from realengine.speculation.drafter import DrafterContext, LoadedDraft
from realengine.speculation.host import drafter_of
from realengine.speculation.settings import SpeculationSettings


def load_draft(settings: SpeculationSettings, context: DrafterContext) -> LoadedDraft | None:
    """Loads the drafter of a proposer with its weights; None: the proposer drafts on the host.

    The module of the proposer's method has a function `load` with the same arguments.
    """
    if settings.host is not None or drafter_of(settings.proposer) is not None:
        _check_reference(settings.proposer, context.architecture.vocab_size)
        return None
    module = import_module(f"realengine.speculation.drafters.{settings.proposer.method}")
    load: Callable[[SpeculationSettings, DrafterContext], LoadedDraft] = module.load
    return load(settings, context)


def _check_reference(proposer: Proposer, vocab_size: int) -> None:
    """Raises ValueError for a reference text with a token that the target does not have."""
    most = max(proposer.reference, default=0) if isinstance(proposer, Ngram) else 0
    if most >= vocab_size:
        raise ValueError(
            f"speculative_config: reference: token {most} must be < {vocab_size}, the target's vocabulary"
        )
