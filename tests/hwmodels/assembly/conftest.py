"""Sites on a toy device."""

import pytest

from hwmodels.assembly.site import Site
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.operators import Calibration
from tests.hwmodels.assembly.listed import BALANCED, make_model


@pytest.fixture
def site(toy_device):
    """Makes a Site; what is not given: the small model on one toy device, balanced routing."""

    def make(model=None, kernels=BALANCED, device=toy_device, peer_wait_s=0.0, **layout):
        return Site(
            model=model or make_model(),
            device=device,
            layout=ParallelLayout(**layout),
            calibration=Calibration(peer_wait_s=peer_wait_s),
            kernels=kernels,
        )

    return make
