"""Iterations with drafting: arrays equal numbers, parts sum to the whole, misfits are refused."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwmodels.host import HostOverhead
from hwmodels.iterations import COMPONENTS, DraftWork, IterationShape, UnknownIterationError
from hwmodels.levels.recorded import Recorded
from hwmodels.operators import Calibration
from hwmodels.speculation import SpeculativeModel, decodes_with_drafts, pass_of_equal
from hwmodels.speculation.draft import (
    HeadDraft,
    HostDraft,
    LayerDraft,
    ModelDraft,
    PassDraft,
    SeveralDrafts,
    SkipDraft,
)
from hwmodels.speculation.steps import CHAIN, DraftShape
from tests.hwmodels.speculation.drafting import MEASURED, shaped

few = settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


SMALL_HEAD = {"vocab_size": 9000, "intermediate_size": 6144}
DRAFTS = {
    "model": ("llama3_1_70b", lambda models: ModelDraft(model=models["llama3_2_1b"]), CHAIN),
    "eagle": ("llama3_1_8b", lambda _: LayerDraft(kind="eagle"), CHAIN),
    "eagle tree": ("llama3_1_8b", lambda _: LayerDraft(kind="eagle"), DraftShape.of_tree((4, 8, 6, 2))),
    "eagle3": (
        "qwen3_30b_a3b",
        lambda _: LayerDraft(kind="eagle3", vocab_size=9000, intermediate_size=6144),
        CHAIN,
    ),
    "eagle ahead": ("llama3_1_8b", lambda _: LayerDraft(kind="eagle", step_s=2e-3), CHAIN),
    "mtp": ("deepseek_r1", lambda _: LayerDraft(kind="mtp"), CHAIN),
    "heads": ("llama2_7b", lambda _: HeadDraft(), CHAIN),
    "layers skipped": ("llama2_7b", lambda _: SkipDraft(num_layers=20), CHAIN),
    "host": ("llama2_7b", lambda _: HostDraft(start_s=1e-4, sequence_s=1e-5, kilotoken_s=3e-5), CHAIN),
    "several": (
        "llama2_7b",
        lambda models: SeveralDrafts(
            drafts={name: ModelDraft(model=models[name]) for name in ("llama_68m", "llama_160m")}
        ),
        DraftShape.of_tree((2, 2, 2)),
    ),
    "rows": ("llama2_7b", lambda _: PassDraft(extra_tokens=60), CHAIN),
    "measured": ("llama3_1_8b", lambda _: LayerDraft(kind="eagle"), CHAIN),
    "measured search": ("llama2_7b", lambda _: HostDraft(), CHAIN),
    "measured ahead": ("llama3_1_8b", lambda _: LayerDraft(kind="eagle", step_s=2e-3), CHAIN),
}
LAYOUTS = {
    "deepseek_r1": {"attention_data_parallel_size": 8, "expert_parallel_size": 8, "tensor_parallel_size": 1},
    "llama3_1_70b": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module", params=DRAFTS)
def model(request, models, model_of):
    """Returns a model with every kind of draft in turn, in several layouts."""
    name, make, shape = DRAFTS[request.param]
    host = HostOverhead(iteration_s=1e-3, sequence_s=1e-5, overlapped="ahead" in request.param)
    measured = MEASURED if "measured" in request.param else None
    return model_of(name, make(models), host, shape, measured, **LAYOUTS.get(name, {}))


one_pass = st.tuples(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 5)), max_size=30),
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 2000)), max_size=2),
    st.integers(0, 5),
).filter(lambda drawn: drawn[0] or drawn[1])
"""(context and draft tokens of each sequence, new and cached tokens of each chunk, next draft tokens)."""


def in_one(shapes):
    counts = [np.array(column) for column in zip(*(shape.counts for shape in shapes), strict=True)]
    drafts = [np.array(column) for column in zip(*(shape.drafts for shape in shapes), strict=True)]
    return IterationShape(*counts, drafts=DraftWork(*drafts))


@few
@given(drawn=st.lists(one_pass, min_size=1, max_size=8))
def test_arrays_equal_numbers_to_the_last_bit(model, make_shape, drawn):
    shapes = [shaped(make_shape, one) for one in drawn]
    assert model.seconds(in_one(shapes)).tolist() == [model.seconds(shape) for shape in shapes]


@few
@given(num_seqs=st.integers(1, 200), context=st.integers(1, 8000), k=st.integers(0, 6))
def test_a_leap_equals_its_steps_to_the_last_bit(model, num_seqs, context, k):
    """Only contexts and pairs are arrays."""
    steps = [decodes_with_drafts(num_seqs, num_seqs * (context + i), k) for i in range(20)]
    at = np.array([step.decode_context_tokens for step in steps])
    pairs = np.array([step.drafts.pairs for step in steps])
    leap = steps[0]._replace(decode_context_tokens=at, drafts=steps[0].drafts._replace(pairs=pairs))
    assert model.seconds(leap).tolist() == [model.seconds(step) for step in steps]


@few
@given(
    num_seqs=st.integers(1, 200),
    contexts=st.lists(st.integers(1, 8000), min_size=1, max_size=60).map(sorted),
    k=st.integers(0, 6),
)
def test_the_ends_of_passes_are_sums_of_their_seconds_to_the_last_bit(model, num_seqs, contexts, k):
    """Few passes are priced one by one, and many as an array."""
    at = [context * num_seqs for context in contexts]
    ends_s = [0.5]
    for context in at:
        ends_s.append(ends_s[-1] + float(model.seconds(pass_of_equal(num_seqs, context, k, k))))
    assert model.pass_ends(0.5, num_seqs, at, k, k) == ends_s[1:]


@few
@given(drawn=one_pass)
def test_parts_sum_to_the_whole(model, make_shape, drawn):
    shape = shaped(make_shape, drawn)
    seconds = model.seconds(shape)
    parts = model.breakdown(shape)
    assert list(parts) == list(COMPONENTS)
    assert sum(parts.values()) == pytest.approx(seconds, rel=1e-9)
    lines = model.explain(shape)
    assert sum(line.seconds for line in lines) == pytest.approx(seconds, rel=1e-9)
    assert sum(line.share for line in lines) == pytest.approx(1, rel=1e-9)
    purposes = model.flops_by_purpose(shape)
    assert sum(purposes) == pytest.approx(model.flops(shape), rel=1e-12)


def test_iterations_without_drafts_are_the_bases(model_of, replica_of, make_shape):
    model, base = model_of("llama3_1_8b", LayerDraft()), replica_of("llama3_1_8b").roofline(Calibration())
    shape = make_shape([500] * 7, [(100, 0)])
    for name in ("seconds", "flops", "bytes_moved", "breakdown", "explain"):
        assert getattr(model, name)(shape) == getattr(base, name)(shape)
    assert model.decode_ends(1.0, 7, 3500, 9) == base.decode_ends(1.0, 7, 3500, 9)
    assert (model.peak_flops_per_s, model.peak_bytes_per_s) == (base.peak_flops_per_s, base.peak_bytes_per_s)
    assert model.flops_by_purpose(shape)[1:] == (0, 0)


def test_a_level_that_cannot_price_draft_tokens_is_refused_at_once(replica_of):
    replica = replica_of("llama3_1_8b")
    base = replica.roofline(Calibration())
    recorded = Recorded(
        shapes=IterationShape(*(np.array([n]) for n in (4, 400, 0, 0, 0, 0, 4))), durations_s=[1.0], base=base
    )
    with pytest.raises(
        UnknownIterationError, match="recorded: does not model draft tokens; choose latency=cal"
    ):
        SpeculativeModel(recorded, LayerDraft(), replica)


def test_a_draft_that_does_not_suit_the_target_is_refused(models, model_of):
    with pytest.raises(ValueError, match="choose a draft of the same vocabulary"):
        model_of("llama3_1_8b", ModelDraft(model=models["qwen3_0_6b"]))
    with pytest.raises(ValueError, match=r"draft=None: must be one of the drafts of hwmodels"):
        model_of("llama3_1_8b", NoDraft())


class NoDraft:
    """A draft of an unknown kind."""

    pass_tokens = 0

    def check(self, target, layout):
        """Raises no error: it can draft for every target."""

    def __repr__(self):
        return "None"
