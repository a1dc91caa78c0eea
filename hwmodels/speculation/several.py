"""Several small models that draft in turn, each one branch of a token tree (SpecInfer: Miao et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fieldlimits import MinLen
from hwmodels.exact import Num
from hwmodels.iterations.iteration import COMPONENTS, Explained, IterationShape
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.rooflines import Replica
from hwmodels.model.model_spec import ModelSpec
from hwmodels.speculation.draft import InTarget, ModelDraft
from hwmodels.speculation.drafting import Drafting, drafting_of
from hwmodels.speculation.relative import TargetScale
from hwmodels.speculation.steps import DraftShape


@dataclass(frozen=True, kw_only=True, slots=True)
class SeveralDrafts(InTarget):
    """Small models of the target's vocabulary on the same devices, by name; all draft in every pass."""

    drafts: Annotated[Mapping[str, ModelDraft], MinLen(1)]

    def check(self, target: ModelSpec, layout: ParallelLayout) -> None:
        """Raises ValueError, with the name of the draft, if the target cannot have one of them."""
        for name, draft in self.drafts.items():
            try:
                draft.check(target, layout)
            except ValueError as error:
                raise ValueError(f"drafts.{name}.{error}") from None

    def weight_bytes(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return sum(draft.weight_bytes(target, layout) for draft in self.drafts.values())

    def kv_bytes_per_token(self, target: ModelSpec, layout: ParallelLayout) -> float:
        return sum(draft.kv_bytes_per_token(target, layout) for draft in self.drafts.values())


class InTurn:
    """Prices drafts that run one after the other."""

    def __init__(self, parts: Sequence[Drafting]) -> None:
        self._parts = parts

    def scaled_by(self, target: TargetScale) -> InTurn:
        """Returns the same drafts on a device whose target is measured."""
        return InTurn([part.scaled_by(target) for part in self._parts])

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the seconds of all drafts."""
        return sum(part.seconds(shape) for part in self._parts)

    def breakdown(self, shape: IterationShape) -> dict[str, Num]:
        """Returns seconds per component of all drafts."""
        found = [part.breakdown(shape) for part in self._parts]
        return {name: sum(one[name] for one in found) for name in COMPONENTS}

    def explain(self, shape: IterationShape) -> list[Explained]:
        """Returns the operators of all drafts, one draft after the other."""
        return [line for part in self._parts for line in part.explain(shape)]

    def flops(self, shape: IterationShape) -> Num:
        """Returns the FLOPs of all drafts."""
        return sum(part.flops(shape) for part in self._parts)

    def bytes_moved(self, shape: IterationShape) -> Num:
        """Returns the bytes of all drafts."""
        return sum(part.bytes_moved(shape) for part in self._parts)


@drafting_of.register
def _(draft: SeveralDrafts, replica: Replica, shape: DraftShape) -> Drafting:
    own = tuple(-(-rows // len(draft.drafts)) for rows in shape.level_rows)  # each drafts a share of a level
    return InTurn(
        [drafting_of(one, replica, shape._replace(level_rows=own)) for one in draft.drafts.values()]
    )
