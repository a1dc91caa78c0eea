"""The costs of drafting: each method against closed forms, and the host's time."""

from dataclasses import replace

import pytest

from hwmodels.host import CudaGraphs
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.operators import Calibration
from hwmodels.speculation import SpeculativeModel, decodes_with_drafts
from hwmodels.speculation.draft import HeadDraft, HostDraft, LayerDraft, ModelDraft, PassDraft, SkipDraft
from hwmodels.speculation.steps import DraftHost, DraftShape, draft_host_of
from tests.hwmodels.speculation.drafting import IDLE, MEASURED, QUICK, drafting, shaped


def test_a_small_model_takes_its_own_decodes(models, model_of, replica_of):
    """First a pass over the rows and the sampled token, then one row per step."""
    model = model_of("llama3_1_70b", ModelDraft(model=models["llama3_2_1b"], **QUICK), tensor_parallel_size=4)
    small = replace(replica_of("llama3_1_70b", tensor_parallel_size=4), model=models["llama3_2_1b"])
    small = small.roofline(Calibration())
    first = decodes_with_drafts(6, 6 * 1000, 5)._replace(sampled_seqs=6)
    later = decodes_with_drafts(6, 6 * 1002, 0)._replace(drafts=None)
    expected = small.seconds(first) + 3 * small.seconds(later)
    assert drafting(model, decodes_with_drafts(6, 6000, 4)) == pytest.approx(expected, rel=1e-12)


def test_a_small_model_computes_the_prompts_too(models, model_of, make_shape):
    model = model_of("llama3_1_70b", ModelDraft(model=models["llama3_2_1b"], **QUICK), tensor_parallel_size=4)
    alone = shaped(make_shape, ([(1000, 4)], [], 0))
    beside = shaped(make_shape, ([(1000, 4)], [(2000, 0)], 0))
    tokens = model.flops_by_purpose(beside).drafting - model.flops_by_purpose(alone).drafting
    small = models["llama3_2_1b"]
    weights = 2 * (small.num_matmul_parameters - small.embedding_elements)
    attention = 4 * 16 * 32 * 64 * causal_pairs(2000)
    assert tokens == pytest.approx(2000 * weights + attention, rel=1e-12)


def test_a_layer_takes_its_weights_and_the_targets_head_in_each_step(models, model_of):
    """EAGLE for Llama-3.1-8B: 2 x 4,096 x 4,096, a layer of 218 M, the head of 525 M, in bf16."""
    model = model_of("llama3_1_8b", LayerDraft(kind="eagle", **QUICK))
    read = [model.bytes_moved(decodes_with_drafts(1, 1, k)) for k in (3, 4)]
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    kv = (1 + 0.5) * 2 * 1024 * 2  # of the step, which is priced half a token further
    kv += 0.5 * 2 * 2 * 1024 * 2 + 33 * 2 * 1024 * 2  # of the other steps; of one more row in the pass
    step = 2 * (2 * 4096 * 4096 + layer + 128_256 * 4096)
    assert read[1] - read[0] == pytest.approx(step + kv, rel=1e-4)
    assert (
        0.5e-3
        < model.seconds(decodes_with_drafts(1, 1, 4)) - model.seconds(decodes_with_drafts(1, 1, 3))
        < 0.7e-3
    )


def test_eagle3_reduces_three_hidden_states_once(model_of):
    """The 3 hidden to hidden matrix is used by all rows of the pass, never by later steps."""
    model = model_of("llama3_1_8b", LayerDraft(kind="eagle3", vocab_size=32_000, **QUICK))
    purposes = [model.flops_by_purpose(decodes_with_drafts(1, 1, k)).drafting for k in (1, 2, 3)]
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 6144
    row = 2 * (layer + 3 * 4096 * 4096)
    step = 2 * (layer + 32_000 * 4096)
    assert purposes[1] - purposes[0] == pytest.approx(step + row, rel=1e-4)
    assert purposes[2] - purposes[1] == pytest.approx(step + row, rel=1e-4)


def test_steps_of_experts_load_experts(models, model_of):
    """A step of DeepSeek-R1's module reads 8 of 256 experts and the shared one, beside attention and head."""
    model = model_of("deepseek_r1", LayerDraft(kind="mtp", **QUICK), tensor_parallel_size=8)
    names = {line.operator for line in model.explain(decodes_with_drafts(1, 500, 2))}
    assert {"draft experts", "draft draft_proj", "draft lm_head", "draft mlp_all_reduce", "experts"} <= names


def test_heads_cost_the_same_for_any_number_of_draft_tokens(models, model_of):
    """Medusa: 4 heads of 4,096 x (4,096 + 32,000) weights in bf16."""
    model = model_of("llama2_7b", HeadDraft(num_heads=4, start_s=0.0))
    first, second = (drafting(model, decodes_with_drafts(1, 500, k)) for k in (2, 4))
    assert first == pytest.approx(second, rel=1e-9)
    stored = 2 * 4 * 4096 * (4096 + 32_000)
    assert model._drafting.bytes_moved(decodes_with_drafts(1, 500, 4)) == stored
    assert stored / 3.35e12 < first < 1.6 * stored / 3.35e12


def test_a_search_costs_time_of_the_host_only(model_of):
    model = model_of("llama2_7b", HostDraft(start_s=1e-4, sequence_s=1e-5, kilotoken_s=3e-5))
    shape = decodes_with_drafts(8, 8 * 2000, 3)
    assert drafting(model, shape) == pytest.approx(1e-4 + 8 * 1e-5 + 16 * 3e-5, rel=1e-6)
    assert model.flops_by_purpose(shape).drafting == 0
    assert model.breakdown(shape)["host"] == pytest.approx(1e-4 + 8 * 1e-5 + 16 * 3e-5)


def test_kept_layers_take_their_share_of_a_decode(model_of, replica_of):
    model = model_of("llama2_7b", SkipDraft(num_layers=16, **QUICK))
    base = replica_of("llama2_7b").roofline(Calibration())
    half = drafting(model, decodes_with_drafts(1, 500, 4)) / 4
    assert half / base.seconds(IterationShape(1, 502, 0, 0, 0, 0, 1)) == pytest.approx(0.5, abs=0.03)
    assert drafting(model, decodes_with_drafts(1, 500, 0)) == pytest.approx(0, abs=1e-12)


def test_the_pool_of_n_grams_keeps_the_devices_waiting(model_of):
    waiting, none = (
        model_of("llama2_7b", PassDraft(extra_tokens=60, start_s=start_s)) for start_s in (3e-3, 0.0)
    )
    assert waiting.pass_seconds(1, 600, 4) == pytest.approx(none.pass_seconds(1, 600, 4) + 3e-3)


def test_lookahead_has_more_rows_in_the_pass(model_of):
    """60 rows that refine guesses, and 4 candidates, are 64 draft rows for the pass."""
    model, none = model_of("llama2_7b", PassDraft(extra_tokens=60)), model_of("llama2_7b", HostDraft())
    assert model.seconds(decodes_with_drafts(3, 1500, 4)) == none.seconds(decodes_with_drafts(3, 1500, 64))
    guessing, verifying = (
        one.flops_by_purpose(decodes_with_drafts(3, 1500, k)).draft_rows
        for one, k in ((model, 4), (none, 64))
    )
    assert guessing == pytest.approx(verifying, rel=1e-3)


def test_a_window_of_its_own_is_a_second_pass_of_the_target(model_of):
    """4 columns of 3 guesses beside the newest token: 13 rows of each sequence, of which 4 are sampled."""
    own = PassDraft.of_window(4, 4, own_pass=True, start_s=3e-3)
    model, none = model_of("llama2_7b", own), model_of("llama2_7b", HostDraft())
    shape = decodes_with_drafts(3, 1500, 8)
    window = decodes_with_drafts(3, 1500, 12)._replace(sampled_seqs=3 * 4)
    assert drafting(model, shape) == pytest.approx(none.seconds(window) + 3e-3)
    assert model.flops(shape) == pytest.approx(none.flops(shape) + none.flops(window), rel=1e-6)
    nothing = shape._replace(drafts=shape.drafts._replace(seqs=0, steps=0, drafted=0))
    assert drafting(model, nothing) == pytest.approx(3e-3)
    assert sum(model.breakdown(shape).values()) == pytest.approx(model.seconds(shape))
    assert sum(line.seconds for line in model.explain(shape)) == pytest.approx(model.seconds(shape))


def test_a_draft_with_kv_keeps_it_complete_even_if_it_drafts_nothing(models, model_of):
    eagle, skip = (
        model_of("llama2_7b", LayerDraft(**QUICK)),
        model_of("llama2_7b", SkipDraft(num_layers=9, **QUICK)),
    )
    nothing = decodes_with_drafts(4, 2000, 2)
    nothing = nothing._replace(drafts=nothing.drafts._replace(seqs=0, steps=0, drafted=0))
    assert drafting(eagle, nothing) > 0
    assert drafting(skip, nothing) == pytest.approx(0, abs=1e-12)


def test_the_host_bounds_steps(model_of):
    slow = LayerDraft(start_s=2e-3, step_s=5e-3)
    shape = decodes_with_drafts(1, 500, 3)
    assert drafting(model_of("llama3_1_8b", slow), shape) == pytest.approx(2e-3 + 3 * 5e-3, rel=1e-9)


def test_a_host_that_works_ahead_bounds_the_iteration_only(model_of):
    """The pass takes 6 ms: steps of 1 ms are hidden behind it, steps of 5 ms are not."""
    ahead = replace(IDLE, iteration_s=1e-3, exposed_s=1e-4, overlapped=True)
    shape = decodes_with_drafts(1, 500, 3)
    quick, hidden, slow = (
        model_of("llama3_1_8b", LayerDraft(start_s=start_s, step_s=step_s), ahead)
        for start_s, step_s in ((0.0, 0.0), (1e-3, 1e-3), (2e-3, 5e-3))
    )
    assert hidden.seconds(shape) == quick.seconds(shape)
    assert slow.seconds(shape) == pytest.approx(1e-3 + 2e-3 + 3 * 5e-3 + 1e-4, rel=1e-12)
    waits_s = slow.seconds(shape) - quick.seconds(shape)
    assert slow.breakdown(shape)["host"] - quick.breakdown(shape)["host"] == pytest.approx(waits_s)
    (line,) = (line for line in slow.explain(shape) if line.operator == "draft host and launches")
    assert line.seconds >= waits_s


@pytest.mark.parametrize("draft", [LayerDraft(**QUICK), HostDraft(sequence_s=1e-4)])
def test_the_measured_host_time_of_drafts_is_added_to_an_iteration(model_of, draft):
    """8 sequences of 500 tokens with 3 draft tokens each."""
    plain, measured = (model_of("llama3_1_8b", draft, draft_host=host) for host in (None, MEASURED))
    shape = decodes_with_drafts(8, 4000, 3)
    added_s = measured.seconds(shape) - plain.seconds(shape)
    assert added_s == pytest.approx(2e-3 + 8 * 3e-5 + 24 * 7e-6 + 4 * 1e-5)
    assert measured.breakdown(shape)["host"] - plain.breakdown(shape)["host"] == pytest.approx(added_s)
    assert sum(line.seconds for line in measured.explain(shape)) == pytest.approx(measured.seconds(shape))
    without = shape._replace(drafts=None, sampled_seqs=8)
    assert measured.seconds(without) == plain.seconds(without)


def test_a_method_has_its_own_host_time_or_that_of_all_others():
    ngram, others = DraftHost(sequence_s=1e-5), DraftHost(iteration_s=1e-3)
    hosts = {"ngram": ngram, "others": others}
    assert draft_host_of(hosts, "ngram") is ngram
    assert draft_host_of(hosts, "eagle") is others
    assert draft_host_of({"ngram": ngram}, "eagle") is draft_host_of({}, "ngram") is None


def test_a_host_that_works_ahead_hides_its_time_for_drafts(model_of):
    ahead = replace(IDLE, overlapped=True)
    plain, hidden, slow = (
        model_of("llama3_1_8b", LayerDraft(**QUICK), ahead, draft_host=host)
        for host in (None, DraftHost(iteration_s=1e-3), DraftHost(iteration_s=20e-3, token_s=1e-3))
    )
    shape = decodes_with_drafts(2, 1000, 3)
    assert hidden.seconds(shape) == plain.seconds(shape)
    assert slow.seconds(shape) == pytest.approx(20e-3 + 6e-3)


def test_heads_without_graphs_wait_for_their_launches(replica_of):
    """4 heads of a matrix, an LM head and 4 kernels of sampling each, at 60 us."""
    replica = replace(
        replica_of("llama2_7b", replace(IDLE, launch_s=60e-6)), cuda_graphs=CudaGraphs(enabled=False)
    )
    model = SpeculativeModel(replica.roofline(Calibration()), HeadDraft(start_s=0.0), replica)
    shape = decodes_with_drafts(1, 500, 4)
    assert drafting(model, shape) == pytest.approx(4 * 6 * 60e-6)
    assert sum(model.breakdown(shape).values()) == pytest.approx(model.seconds(shape))


def test_a_step_without_graphs_launches_every_kernel(model_of):
    host = replace(IDLE, launch_s=60e-6)
    shape = decodes_with_drafts(1, 500, 4)
    with_graphs = drafting(model_of("llama3_1_8b", LayerDraft(**QUICK), host), shape)
    without = drafting(model_of("llama3_1_8b", LayerDraft(cuda_graphs=False, **QUICK), host), shape)
    kernels = round(without / 60e-6 / 4)
    assert 10 < kernels < 30
    assert without > 1.5 * with_graphs


def test_rows_of_a_tree_make_steps_longer(model_of):
    shape = decodes_with_drafts(64, 64 * 1000, 4)
    chain = drafting(model_of("llama3_1_8b", LayerDraft(**QUICK)), shape)
    tree = drafting(model_of("llama3_1_8b", LayerDraft(**QUICK), shape=DraftShape((8,) * 4)), shape)
    assert chain < tree < 8 * chain


def test_a_draft_that_computes_only_what_lacks_its_kv_takes_two_rows_in_its_first_step(model_of, models):
    """Both are decode rows, each of which reads the whole context: with a long one they are no cheaper."""
    shape = decodes_with_drafts(64, 64 * 100, 4)
    small = models["llama3_2_1b"]
    every = model_of("llama3_1_8b", ModelDraft(model=small, **QUICK))
    fewest = model_of("llama3_1_8b", ModelDraft(model=small, computes_rejected=False, **QUICK))
    assert drafting(fewest, shape) < drafting(every, shape)
    flops = [model.flops_by_purpose(shape).drafting for model in (every, fewest)]
    of_one_row = [
        model.flops_by_purpose(decodes_with_drafts(64, 64 * 100, 1)).drafting for model in (fewest,)
    ]
    assert fewest.breakdown(shape)["attention"] > every.breakdown(shape)["attention"]
    steps = [6 + 3, 2 + 3]  # rows of the first step, and one in each later one
    assert flops[0] / flops[1] == pytest.approx(steps[0] / steps[1], rel=0.25)
    assert of_one_row[0] < flops[1]


def test_the_estimate_grows_with_draft_tokens_and_sequences(model_of):
    model = model_of("llama3_1_8b", LayerDraft(kind="eagle3", vocab_size=32_000))
    by_k = [model.pass_seconds(8, 8000, k) for k in range(8)]
    by_batch = [model.pass_seconds(n, 1000 * n, 4) for n in (1, 2, 4, 8, 16, 64, 256)]
    for seconds in (by_k, by_batch):
        assert seconds == sorted(seconds)
        assert len(set(seconds)) == len(seconds)
    assert by_k[3] == model.seconds(decodes_with_drafts(8, 8000, 3))
