"""Kernels against their references: at real models' sizes, and by the tests of tests/kernels on the GPU.

While checks at real sizes run, newly allocated memory is filled with NaN.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.measurement import Measurement, Run, UnavailableError

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


def kernel_tests(run: Run) -> list[Measurement]:
    """Returns a row for each file of tests/kernels; all tensors are on the GPU (KERNELS_DEVICE)."""
    files = [file.name for file in sorted(TESTS.glob("test_*.py")) if file.name != "test_ahead.py"]
    names = run.size(files, ["test_norm.py"])
    return [Measurement(name, partial(_tested, name), limit_s=120.0) for name in names]


def _tested(name: str, run: Run, _: None) -> Mapping[str, Any]:
    """Runs the tests of a file, in several processes if pytest-xdist is installed."""
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed here")
    command = [sys.executable, "-m", "pytest", str(TESTS / name), "-q", "-m", "not slow", "--tb=short"]
    if not run.rehearse and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(12, os.cpu_count() or 1))]
    on_gpu = {"KERNELS_DEVICE": "cuda"} if run.device.type == "cuda" else {}
    variables = os.environ | {"HYPOTHESIS_PROFILE": "new"} | on_gpu
    limit_s = max(run.left_s - 1.0, 1.0)
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    }
    return {"ok": done.returncode == 0, "why": done.stdout[-1500:] if done.returncode else "", **counts}
