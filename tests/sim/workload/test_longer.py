"""Longer prompts and answers: the same content stretched, shared prefixes shared, the context kept."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.caching.content import prompt_segments
from policies.core.request import Prompt, Request, Segment
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario, run
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.modified import LongerSource

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "hardware=l4")


class Given:
    """A workload of these arrivals."""

    num_requests, last_arrival_s, patience_s = None, 1.0, None

    def __init__(self, *arrivals):
        self.notes = WorkloadNotes()
        self._arrivals = arrivals

    def source(self, *, seed, max_model_len):
        return self

    def arrivals(self):
        yield from self._arrivals

    def follow_ups(self, request, now, num_output_tokens):
        return ()


def longer(*arrivals, prompt=1.0, output=1.0, context=10**6):
    given_all = Given(*arrivals)
    return LongerSource(given_all, seed=0, max_model_len=context, prompt_scale=prompt, output_scale=output)


def prompts_of(prompts, scale):
    source = longer(*(Arrival(Request(i, 0.0, p), 1) for i, p in enumerate(prompts)), prompt=scale)
    return [arrival.request for arrival in source.arrivals()]


def tokens_of(request):
    """Returns each token as (content, start of the content, place in the content)."""
    tokens, start = [], 0
    for content, length in prompt_segments(request):
        tokens += [(content, start, i) for i in range(length)]
        start += length
    return tokens


def common(one, other):
    pairs = zip(tokens_of(one), tokens_of(other), strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens_of(one)), len(tokens_of(other)))
    )


pieces = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=5)
scales = st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 3.7])


@given(pieces, pieces, pieces, st.integers(0, 4), scales)
def test_what_prompts_share_is_stretched_as_they_are(shared, one, other, tail, scale):
    def prompt(own):
        segments = tuple(Segment(*piece) for piece in [*shared, *own])
        return Prompt(sum(s.num_tokens for s in segments) + tail + (not segments), segments)

    before = [Request(i, 0.0, prompt(own)) for i, own in enumerate((one, other))]
    after = prompts_of([request.prompt for request in before], scale)
    for old, new in zip(before, after, strict=True):
        assert new.prompt.num_tokens == max(1, round(old.prompt.num_tokens * scale))
        assert sum(s.num_tokens for s in new.prompt.segments) <= new.prompt.num_tokens
    kept = common(*before) * scale
    assert common(*after) >= kept - 1
    if scale >= 1:  # shorter prompts may lose what distinguished them
        assert common(*after) <= kept + 1


def test_two_prompts_of_a_system_prompt_share_twice_as_much():
    system = Segment(7, 16)
    one, other = prompts_of([Prompt(20, (system,), 16), Prompt(24, (system, Segment(9, 8)), 16)], 2.0)
    assert one.prompt == Prompt(40, (Segment(7, 32),), 32)
    assert other.prompt == Prompt(48, (Segment(7, 32), Segment(9, 16)), 32)
    assert common(one, other) == 32


def test_answers_their_samples_and_their_limits_are_longer_prompts_are_not():
    (made,) = longer(Arrival(Request(0, 0.0, Prompt(10), max_tokens=8), 6, (6, 3)), output=2.5).arrivals()
    assert (made.request.prompt.num_tokens, made.num_output_tokens) == (10, 15)
    assert made.sample_tokens == (15, 8)
    assert made.request.max_tokens == 20


def test_what_exceeds_the_context_is_clipped_the_prompt_first():
    source = longer(
        Arrival(Request(0, 0.0, Prompt(30, (Segment(1, 30),))), 10), prompt=3.0, output=4.0, context=100
    )
    (made,) = source.arrivals()
    assert (made.request.prompt, made.num_output_tokens) == (Prompt(60, (Segment(1, 60),)), 40)
    assert source.notes.num_clipped == 1


@cache
def scenario():
    cfg = SOURCE.compose(
        [*SMALL, "workload=synthetic", "workload.num_requests=40", "engine.max_model_len=512"]
    )
    return build_scenario(cfg)


@given(scales, scales)
def test_every_request_of_any_traffic_fits_the_context(prompt, output):
    arrivals = list(replace(scenario(), prompt_scale=prompt, output_scale=output).source().arrivals())
    assert [arrival.request.request_id for arrival in arrivals] == list(range(40))
    for arrival in arrivals:
        assert arrival.request.prompt.num_tokens >= 1
        assert 1 <= arrival.num_output_tokens <= 512 - arrival.request.prompt.num_tokens


def test_a_later_turn_quotes_an_answer_as_long_as_it_was():
    overrides = [*SMALL, "workload=conversation", "workload.num_conversations=6", "caching=prefix"]
    plain, scaled = (
        run(*build_run(SOURCE.compose([*overrides, *more]))).in_pandas()
        for more in ([], ["prompt_scale=2", "output_scale=3"])
    )
    for result, prompts, answers in ((plain, 1, 1), (scaled, 2, 3)):
        by_session = result.requests.sort_values("arrival_s").groupby("session_id")
        for _, turns in by_session:
            said = turns["prompt_tokens"] + turns["output_tokens"]
            message = turns["prompt_tokens"].iloc[1:].to_numpy() - said.iloc[:-1].to_numpy()
            assert (message >= 1).all(), (prompts, answers)
    first = [r.requests.sort_values("request_id").groupby("session_id").first() for r in (plain, scaled)]
    assert (first[1]["prompt_tokens"] == 2 * first[0]["prompt_tokens"]).all()
    assert (first[1]["output_tokens"] == 3 * first[0]["output_tokens"]).all()
    share = [r.summary["cache"]["hit_share"] for r in (plain, scaled)]
    assert share[1] > 0.9 * share[0] > 0


def test_conversations_end_where_their_context_is_full():
    overrides = [
        *SMALL,
        "workload=conversation",
        "workload.num_conversations=20",
        "engine.max_model_len=4096",
    ]
    result = run(*build_run(SOURCE.compose([*overrides, "prompt_scale=2"])))
    notes = result.summary["workload"]
    assert notes["num_conversations_cut"] + sum(notes["skipped"].values()) > 0
    assert (result.requests["prompt_tokens"] + result.requests["output_tokens"]).max() <= 4096


@pytest.mark.parametrize("key", ["prompt_scale", "output_scale"])
@pytest.mark.parametrize("value", ["0", "-1", "1e9"])
def test_a_scale_that_makes_no_length_is_refused(key, value):
    with pytest.raises(ConfigError, match=f"^{key}=.*must be >= 1e-06 and <= 1e"):
        build_run(SOURCE.compose([*SMALL, f"{key}={value}"]))


def test_scales_of_one_change_nothing():
    overrides = [*SMALL, "workload=synthetic", "workload.num_requests=50"]
    plain = run(*build_run(SOURCE.compose(overrides))).in_pandas()
    same = run(*build_run(SOURCE.compose([*overrides, "prompt_scale=1.0"]))).in_pandas()
    assert plain.summary["e2e"] == same.summary["e2e"]
