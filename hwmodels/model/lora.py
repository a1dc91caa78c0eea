"""LoRA adapters that are the same in every batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt
from hwmodels.model.matrices import Matrix, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora(Checked):
    """Low-rank adapters on every matrix of attention and dense MLPs (S-LoRA, Punica: segmented kernels)."""

    rank: PositiveInt
    num_active: PositiveInt = 1
    """Different adapters in a batch; each of them is read once. They are all kept in memory."""

    def elements(self, matrices: Iterable[Matrix]) -> float:
        """Returns the number of weights of all active adapters: rank (p k + n) for every dense matrix.

        p: number of projections that the matrix fuses, such as 3 for q, k and v; each has its own k x rank.
        """
        dense = (matrix for matrix in matrices if matrix.role is Role.dense)
        sides = sum((max(1, len(m.slices)) * m.k + m.n) * m.count for m in dense)
        return self.num_active * self.rank * sides
