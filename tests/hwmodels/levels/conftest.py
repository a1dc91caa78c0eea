"""A model of which operators are measured."""

import pytest


@pytest.fixture(scope="module")
def llama(models):
    return models["llama3_1_8b"]
