"""Checks of kernels against float64, at real models' sizes on a GPU and at small ones in the interpreter.

`experiments.gpu.kernels_correct` runs them on a GPU, which puts this folder's parent on the path.
"""

from __future__ import annotations

from .attention_checks import attention_checks
from .comparison import Check, Random, compared, relative_error
from .dense_checks import dense_checks

__all__ = ["Check", "Random", "checks", "compared", "relative_error"]


def checks(random: Random) -> list[Check]:
    """Returns all checks, the most used kernels first."""
    return [*attention_checks(random), *dense_checks(random)]
