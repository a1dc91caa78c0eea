"""Replicas of a small target, and the same with drafting."""

import pytest

from hwmodels.assembly.site import Kernels
from hwmodels.host import CudaGraphs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Replica
from hwmodels.operators import Calibration
from hwmodels.speculation import SpeculativeModel
from hwmodels.speculation.steps import CHAIN
from tests.hwmodels.speculation.drafting import IDLE


@pytest.fixture(scope="module")
def replica_of(models, devices):
    """Makes a Replica of a model preset on H100s."""

    def make(name, host=IDLE, **layout):
        return Replica(
            model=models[name],
            device=devices["h100_sxm"],
            layout=ParallelLayout(**layout),
            calibration=Calibration(),
            host=host,
            cuda_graphs=CudaGraphs(),
            kernels=Kernels(),
        )

    return make


@pytest.fixture(scope="module")
def model_of(replica_of):
    """Makes a SpeculativeModel of a model preset on H100s."""

    def make(name, draft, host=IDLE, shape=CHAIN, draft_host=None, **layout):
        replica = replica_of(name, host, **layout)
        base = replica.roofline(Calibration())
        return SpeculativeModel(base, draft, replica, shape=shape, host=draft_host)

    return make
