"""Quantiles of Student's t distribution.

Importing `scipy.special` takes a tenth of a second: the quantiles that every run needs are constants here,
and scipy is imported only for others, such as those of a study of several seeds.
"""

from __future__ import annotations

import importlib
from functools import lru_cache

KNOWN = {
    (7, 0.975): 2.364624251592784,
    (15, 0.975): 2.131449545559776,
    (11, 0.999): 4.024701037630738,
}
"""Quantiles by degrees of freedom and probability, for batch means and for the detection of overload."""


@lru_cache(maxsize=256)
def student_t(degrees_of_freedom: int, probability: float) -> float:
    """Returns the quantile: the value that the variable stays below with the given probability."""
    known = KNOWN.get((degrees_of_freedom, probability))
    if known is not None:
        return known
    return float(importlib.import_module("scipy.special").stdtrit(degrees_of_freedom, probability))
