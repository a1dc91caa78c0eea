"""A small model that is measured, on a machine of any pace."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.calibrate.engine import pace
from experiments.calibrate.engine.served import Served, architecture_of, serve
from tests.experiments.calibrate.engine.tiny import TINY, spec


@pytest.fixture(scope="module")
def served() -> Served:
    return serve(
        spec(),
        architecture_of(TINY),
        torch.device("cpu"),
        max_num_seqs=4,
        max_model_len=128,
        block_size=16,
    )


@pytest.fixture(autouse=True, scope="module")
def _any_pace():
    """Accepts every pace: the machine that runs the tests may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MOST_VARIATION", math.inf)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.0)
        yield
