"""Worlds as fixtures: those of experiments/conformance, and of tests/worlds where more happens.

A hypothesis test draws a `World` from the `worlds` strategy.
"""

import pytest

from experiments.conformance.adapting import draw_adapter_worlds
from experiments.conformance.draws import draw_worlds
from experiments.conformance.same_run import assert_same_records, gaps_of
from experiments.conformance.toys import ToyModel
from experiments.conformance.worlds import Ask
from tests.worlds.branching import draw_branching_worlds
from tests.worlds.clusters import Cluster


@pytest.fixture(scope="session")
def worlds():
    """Returns the strategy for any `World`."""
    return draw_worlds()


@pytest.fixture(scope="session")
def adapter_worlds():
    """Returns the strategy for worlds whose requests name LoRA adapters."""
    return draw_adapter_worlds()


@pytest.fixture(scope="session")
def branching_worlds():
    """Returns the strategy for worlds in which half of the requests ask for several answers."""
    return draw_branching_worlds()


@pytest.fixture(scope="session")
def ask():
    """Returns `Ask(arrival_s, num_prompt_tokens, num_output_tokens, priority=0, max_tokens=None)`."""
    return Ask


@pytest.fixture(scope="session")
def make_world():
    """Returns a maker of a `Cluster` with room for everything and iterations of one tick, 0.125 s."""

    def make(*asks, **settings):
        return Cluster(asks=asks, **settings)

    return make


@pytest.fixture(scope="session")
def toy_model():
    """Returns `ToyModel(tick_s, flat)`."""
    return ToyModel


@pytest.fixture(scope="session")
def same_records():
    """Asserts that two runs left the same records, bit for bit."""
    return assert_same_records


@pytest.fixture(scope="session")
def list_gaps():
    """Returns a function for every gap of a run's records as (seconds, end), sorted."""
    return gaps_of
