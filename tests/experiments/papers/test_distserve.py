"""DistServe's experiments: lengths as in its artifact, measured times of both engines, layouts."""

from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.papers.distserve import APPLICATIONS, CHAT, SUMMARIES, attainment, largest_attained
from experiments.papers.distserve_lengths import (
    MAX_LENGTH,
    humaneval,
    longbench,
    sharegpt,
    with_lognormal_outputs,
)
from experiments.papers.distserve_prices import TIMES, Profiled, ProfiledModel
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout


def model(engine="vllm", tensor=4, stages=1):
    return ProfiledModel(TIMES[engine, "opt-66b", tensor], stages, base=None)


def prompt(num_tokens):
    return IterationShape(0, 0, 1, num_tokens, causal_pairs(num_tokens), num_tokens, 1)


def decodes(num_seqs, context):
    return IterationShape(num_seqs, context, 0, 0, 0, 0, num_seqs)


@pytest.mark.parametrize(
    ("draw", "prompts", "outputs"),
    [
        (sharegpt, 755, 200),
        (humaneval, 171.3, 98.2),
        (longbench, 1738, 90.7),
    ],
)
def test_lengths_have_the_means_of_the_paper_and_fit_the_context(draw, prompts, outputs):
    drawn = draw(np.random.default_rng(0), 50_000)
    assert drawn[0].mean() == pytest.approx(prompts, rel=0.03)
    assert drawn[1].mean() == pytest.approx(outputs, rel=0.03)
    assert min(map(np.min, drawn)) >= 1
    assert sum(drawn).max() <= MAX_LENGTH


def test_half_of_the_answers_of_longbench_have_twelve_tokens_or_fewer():
    _, answers = longbench(np.random.default_rng(0), 50_000)
    assert np.mean(answers <= 12) == pytest.approx(0.5, abs=0.02)


def test_lognormal_outputs_have_their_mean_and_a_larger_median():
    prompts, outputs = with_lognormal_outputs(longbench, 91)(np.random.default_rng(0), 20_000)
    assert outputs.mean() == pytest.approx(91, rel=0.03)
    assert np.median(outputs) == pytest.approx(91 / 2**0.5, rel=0.03)
    assert (prompts + outputs).max() <= MAX_LENGTH


@pytest.mark.parametrize(("engine", "milliseconds"), [("vllm", 652.8), ("distserve", 365.4)])
def test_a_prompt_of_2000_tokens(engine, milliseconds):
    """43.0 + 0.2129 x 2000 + 4.60e-5 x 2000^2 ms, and 29.4 + 0.1514 x 2000 + 8.32e-6 x 2000^2 ms."""
    assert model(engine).seconds(prompt(2000)) == pytest.approx(milliseconds / 1e3, rel=1e-3)


def test_a_pipeline_takes_as_long_as_one_of_its_micro_batches():
    halves = model("distserve", tensor=2, stages=2).seconds(decodes(20, 30_000))
    assert halves == model("distserve", tensor=2).seconds(decodes(10, 15_000))


def test_large_batches_have_their_own_coefficients():
    """40.86 + 4.265e-4 x 50,000 + 0.19508 x 100 = 81.7 ms; the others would give 87.9 ms."""
    assert model().seconds(decodes(100, 50_000)) == pytest.approx(0.0817, abs=1e-4)


def test_leaps_equal_steps():
    steps = [float(model().seconds(decodes(3, 900 + 3 * i))) for i in range(40)]
    assert model().decode_ends(1.5, 3, 900, 40) == list(accumulate(steps, initial=1.5))[1:]


def test_rejects_a_layout_that_was_not_measured():
    replica = SimpleNamespace(layout=ParallelLayout(tensor_parallel_size=3))
    with pytest.raises(ValueError, match="tensor_parallel_size=3: was not measured for opt-13b with vllm"):
        Profiled(engine="vllm", model="opt-13b").iteration_model(replica)


def test_all_layouts_of_the_applications_were_measured():
    for application in APPLICATIONS:
        for layout in (application.prefill, application.decode):
            assert ("distserve", application.model, layout.tensor) in TIMES
        assert ("vllm", application.model, application.vllm.tensor) in TIMES


def test_gpus_of_the_chatbot():
    assert (CHAT.num_gpus("vllm"), CHAT.num_gpus("distserve")) == (1, 3)


def test_an_idle_vllm_misses_the_limit_with_the_long_prompts_only():
    """So at most 89 to 93 % of 100 chats are within the limits, whatever the rate."""
    rng = np.random.default_rng(0)
    rng.exponential(size=100)  # the arrivals, which are drawn first
    prompts, _ = sharegpt(rng, 100)
    start, per_token, per_square = TIMES["vllm", "opt-13b", 1].prompts
    in_time = start + per_token * prompts + per_square * prompts**2 <= 1e3 * CHAT.ttft_s
    with attainment(CHAT, "vllm", 1, priced_as="vllm") as share:
        assert share(1e-3) == in_time.mean() == 0.89
        assert share(0.5) < 0.89


@pytest.mark.slow
def test_the_times_of_its_engine_cost_vllm_half_of_its_rate():
    """Published: 0.125 requests/s per GPU."""
    own, other = (largest_attained(SUMMARIES, "vllm", 2, priced_as=times) for times in ("vllm", "distserve"))
    assert own == pytest.approx(0.125, rel=0.25)
    assert other > 1.8 * own
