"""The checks of all kernels that a GPU runs at real models' sizes, here at small ones."""

from __future__ import annotations

import pytest
import torch

from experiments.gpu.measurement import UnavailableError
from tests.kernels.real_sizes import Random, checks, compared, relative_error

CHECKS = dict(checks(Random(torch.device("cpu"), quick=True)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "_attention/" in name else []) for name in CHECKS]
)
def test_kernels_equal_their_references(name):
    torch.manual_seed(0)
    try:
        row = CHECKS[name]()
    except UnavailableError as error:
        pytest.skip(str(error))
    assert row["ok"], row["why"]


def test_relative_error_is_a_ratio_of_norms_and_nan_never_passes():
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert not compared({"x": (torch.tensor([torch.nan]), lambda: torch.ones(1))}, torch.float32)["ok"]
    assert compared({"x": (torch.ones(1), torch.ones(1))}, torch.float32)["ok"]
