"""The tokens of the eager model."""

import pytest

from tests.realengine.small_models import eager_tokens, make, prompts


@pytest.fixture(scope="module")
def expected():
    """Returns a function that gives the eager tokens of every prompt, by config."""
    known = {}

    def of(config):
        if config not in known:
            llm = make(config)
            known[config] = [eager_tokens(llm, prompt, 12) for prompt in prompts()]
        return known[config]

    return of
