"""Notes on settings that a run does not use, as what they belong to is off."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sim.settings.override import Override
from sim.settings.renamed import note

ONLY_WITH_SPECULATION = ("draft_length", "acceptance")
"""Groups that are built only if a proposer drafts tokens."""


def note_unused(cfg: Mapping[Any, Any], overrides: Sequence[str], replaced: Collection[str] = ()) -> None:
    """Prints a note for each override of a group that is not built. cfg: the composed config.

    It is no error, so that one command line can compare runs with and without speculation. replaced: root
    keys that an object replaces.
    """
    nodes = (cfg, *(cfg.get("pools") or {}).values())
    speculates = "speculation" in replaced or any(node.get("speculation") for node in nodes)
    for override in map(Override.parse, overrides):
        if override.root in ONLY_WITH_SPECULATION and "speculation" in cfg and not speculates:
            note(f"{override.text} is not used with speculation=none.")
