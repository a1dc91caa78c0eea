"""Quantiles of Student's distribution, by scipy.

`scipy.special` takes a tenth of a second to import, and a short run asks for no quantile: it is imported
when the first one is.
"""

from __future__ import annotations

import importlib
from functools import lru_cache


@lru_cache(maxsize=256)
def student_t(degrees_of_freedom: int, probability: float) -> float:
    """What a variable with that distribution stays below with that probability."""
    return float(importlib.import_module("scipy.special").stdtrit(degrees_of_freedom, probability))
