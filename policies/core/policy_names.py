"""Names of policies as users write them, for messages."""

from __future__ import annotations

import re


def name_of(policy: object) -> str:
    """Returns the class's name as the choices of a group are written: LongestPrefix -> longest_prefix."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(policy).__name__).lower()
