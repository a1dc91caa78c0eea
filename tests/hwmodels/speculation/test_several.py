"""Several drafts: their memory and seconds add up, and each one must go with the target."""

import pytest

from hwmodels.assembly.site import Kernels
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Replica
from hwmodels.operators import Calibration
from hwmodels.speculation import decodes_with_drafts
from hwmodels.speculation.draft import ModelDraft, SeveralDrafts, drafting_of
from hwmodels.speculation.steps import CHAIN, DraftShape


def both(models, *names):
    return SeveralDrafts(drafts={name: ModelDraft(model=models[name]) for name in names})


def test_memory_adds_up(models):
    target, layout = models["llama2_7b"], ParallelLayout(tensor_parallel_size=2)
    drafts = both(models, "llama_68m", "llama_160m")
    for quantity in ("weight_bytes", "kv_bytes_per_token"):
        parts = [getattr(one, quantity)(target, layout) for one in drafts.drafts.values()]
        assert getattr(drafts, quantity)(target, layout) == sum(parts) > max(parts)


def test_drafts_run_one_after_the_other(models, devices):
    """With two branches each draft has one row per sequence, as if it drafted a chain."""
    replica = Replica(
        model=models["llama2_7b"],
        device=devices["h100_sxm"],
        layout=ParallelLayout(),
        calibration=Calibration(),
        host=HostOverhead(),
        cuda_graphs=CudaGraphs(),
        kernels=Kernels(),
    )
    drafts = both(models, "llama_68m", "llama_160m")
    shape = decodes_with_drafts(8, 8 * 500, 4)
    parts = [drafting_of(one, replica, CHAIN) for one in drafts.drafts.values()]
    whole = drafting_of(drafts, replica, DraftShape((2, 2, 2, 2)))
    for quantity in ("seconds", "flops", "bytes_moved"):
        total = sum(getattr(part, quantity)(shape) for part in parts)
        assert getattr(whole, quantity)(shape) == pytest.approx(total, rel=1e-12)
    assert sum(whole.breakdown(shape).values()) == pytest.approx(whole.seconds(shape))
    assert sum(line.seconds for line in whole.explain(shape)) == pytest.approx(whole.seconds(shape))


def test_rejects_a_draft_of_another_vocabulary_by_its_name(models):
    drafts = both(models, "llama_68m", "qwen3_0_6b")
    with pytest.raises(ValueError, match=r"^drafts.qwen3_0_6b.model=qwen3-0.6b: has 151,936 tokens"):
        drafts.check(models["llama2_7b"], ParallelLayout())
    with pytest.raises(ValueError, match=r"drafts=..: must not be empty"):
        SeveralDrafts(drafts={})
