"""Several answers to a prompt: their number, their lengths, and refused settings."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.core.request import Branching
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.workload.base import Answers

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


def build(*overrides):
    return build_run(SOURCE.compose(["workload=synthetic", "workload.num_requests=50", *overrides]))


def arrivals(*overrides):
    scenario, _ = build(*overrides)
    return list(scenario.source().arrivals())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["width=0"], r"^workload.branching.width=0: must be >= 1 sample$"),
        (["width=-3"], r"^workload.branching.width=-3: must be >= 1 sample$"),
        (["width=four"], r"workload.branching.width.*four"),
        (
            ["width=2", "every=0"],
            r"^workload.branching.every=0: must be >= 1 token, or null for independent",
        ),
        (
            ["every=8"],
            r"^workload.branching.width=1, every=8: width must be >= 2 for a search; every",
        ),
    ],
)
def test_rejects_branches_that_make_no_sense(settings, message):
    with pytest.raises(ConfigError, match=message):
        build(*(f"workload.branching.{setting}" for setting in settings))


def test_rejects_several_answers_in_a_closed_loop():
    message = "branching.width=2: must be 1 in a closed loop; .* such as workload/arrivals="
    with pytest.raises(ConfigError, match=message):
        build("workload/arrivals=closed_loop", "workload.branching.width=2")


def test_what_a_request_asks_for():
    assert Answers().branching is None
    assert Answers(width=4).branching == Branching(4)
    assert Answers(width=4, every=1).branching == Branching(4, 1)


def test_samples_have_lengths_of_their_own_and_the_first_is_the_one_without_them():
    alone, several = arrivals(), arrivals("workload.branching.width=3")
    assert [a.sample_tokens[0] for a in several] == [a.num_output_tokens for a in alone]
    assert [a.request.prompt for a in several] == [a.request.prompt for a in alone]
    assert all(len(a.sample_tokens) == 3 and max(a.sample_tokens) == a.num_output_tokens for a in several)
    assert sum(len(set(a.sample_tokens)) == 3 for a in several) > 40


def test_the_branches_of_a_search_end_together():
    search = arrivals("workload.branching.width=3", "workload.branching.every=1")
    assert {a.sample_tokens for a in search} == {()}
    assert [a.num_output_tokens for a in search] == [a.num_output_tokens for a in arrivals()]
