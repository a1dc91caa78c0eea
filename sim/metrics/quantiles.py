"""Quantiles of Student's distribution.

`scipy.special` takes a tenth of a second to import: the quantiles that every run asks for are written here,
and scipy is imported where a study of several seeds asks for another one.
"""

from __future__ import annotations

import importlib
from functools import lru_cache

KNOWN = {
    (7, 0.975): 2.364624251592784,
    (15, 0.975): 2.131449545559776,
    (11, 0.999): 4.024701037630738,
}
"""By degrees of freedom and probability: those of the batches of a run and of an overload's parts."""


@lru_cache(maxsize=256)
def student_t(degrees_of_freedom: int, probability: float) -> float:
    """What a variable with that distribution stays below with that probability."""
    known = KNOWN.get((degrees_of_freedom, probability))
    if known is not None:
        return known
    return float(importlib.import_module("scipy.special").stdtrit(degrees_of_freedom, probability))
