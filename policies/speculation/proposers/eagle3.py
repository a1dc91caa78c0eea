"""A layer on hidden states of three depths of the target drafts from a reduced vocabulary.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
NeurIPS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.speculation.proposers.eagle import Eagle


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3(Eagle):
    """Drafts as `Eagle` does, with another layer."""

    method: ClassVar[str] = "eagle3"
