"""Kernels against their references at real models' sizes.

While checks at real sizes run, newly allocated memory is filled with NaN.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.measurement import Measurement, Run

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "kernels"
Check = tuple[str, Callable[[], Mapping[str, Any]]]
"""Name of a check, and the function that returns its row."""


def checks(device: torch.device, *, quick: bool, compiling: bool = False) -> list[Check]:
    """Returns the checks of tests/kernels/real_sizes. compiling: launches are only compiled."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    real_sizes = importlib.import_module(
        "real_sizes"
    )  # tests are no package that could be imported by its name
    found: list[Check] = real_sizes.checks(real_sizes.Random(device, quick, compiling=compiling))
    return found


def table(run: Run) -> list[Measurement]:
    """Returns the table of the checks at real models' sizes."""
    found = checks(run.device, quick=run.rehearse)
    return [Measurement(name, partial(_checked, check), _deterministic, 15.0) for name, check in found]


def _checked(check: Callable[[], Mapping[str, Any]], run: Run, _: None) -> Mapping[str, Any]:
    return check()


@contextmanager
def _deterministic(_: Run) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
