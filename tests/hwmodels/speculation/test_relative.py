"""Drafting beside a measured target: each component is scaled as that of the target with the same rows."""

import numpy as np
import pytest

from hwmodels.assembly.site import Kernels
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Replica
from hwmodels.operators import Calibration
from hwmodels.speculation import decodes_with_drafts
from hwmodels.speculation.draft import HeadDraft, ModelDraft, SkipDraft, drafting_of
from hwmodels.speculation.steps import CHAIN, DraftShape, TargetScale

FACTORS = {"gemm": 2.0, "attention": 5.0, "elementwise": 7.0, "lm_head": 3.0}
QUICK = {"start_s": 0.0, "step_s": 0.0}


class Slower:
    """A target whose components take so many times the roofline's seconds."""

    def __init__(self, model):
        self._model = model

    def breakdown(self, shape):
        parts = self._model.breakdown(shape)
        return {name: part * FACTORS.get(name, 1.0) for name, part in parts.items()}


@pytest.fixture
def replica(models, devices):
    return Replica(
        model=models["llama2_7b"],
        device=devices["h100_sxm"],
        layout=ParallelLayout(),
        calibration=Calibration(),
        host=HostOverhead(iteration_s=0.0, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0),
        cuda_graphs=CudaGraphs(),
        kernels=Kernels(),
    )


@pytest.mark.parametrize("shape", [CHAIN, DraftShape.of_tree((2, 4, 4))], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["model", "layers skipped", "heads"])
def test_each_component_takes_the_target_s_multiple_of_its_modelled_seconds(replica, models, kind, shape):
    draft = {
        "model": ModelDraft(model=models["llama_68m"], **QUICK),
        "layers skipped": SkipDraft(num_layers=8, **QUICK),
        "heads": HeadDraft(start_s=0.0),
    }[kind]
    modelled = replica.roofline(replica.calibration)
    plain = drafting_of(draft, replica, shape)
    scaled = plain.scaled_by(TargetScale(Slower(modelled).breakdown, modelled.breakdown))
    work = decodes_with_drafts(4, 4 * 700, 3)
    before, after = plain.breakdown(work), scaled.breakdown(work)
    assert sum(before.values()) > 0
    for name, seconds in before.items():
        assert after[name] == pytest.approx(seconds * FACTORS.get(name, 1.0)), name
    assert scaled.seconds(work) == pytest.approx(sum(after.values()))
    assert sum(line.seconds for line in scaled.explain(work)) == pytest.approx(sum(after.values()))
    assert scaled.flops(work) == plain.flops(work)
    many = decodes_with_drafts(4, np.array([400, 2800]), 3)
    assert np.broadcast_to(scaled.seconds(many), 2)[1] == pytest.approx(scaled.seconds(work))


def test_a_component_that_the_model_has_not_is_scaled_as_all_operators():
    measured, modelled = (
        {"gemm": 6.0, "attention": 3.0, "host": 1.0},
        {"gemm": 2.0, "attention": 0.0, "host": 9.0},
    )
    target = TargetScale(lambda _: measured, lambda _: modelled)
    found = target.scaled({"gemm": 1.0, "attention": 1.0, "host": 1.0}, None)
    assert found == {"gemm": 3.0, "attention": 4.5, "host": 1.0}
