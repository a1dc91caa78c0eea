"""Tests that `pytest --policy path.to.Policy` runs, one per claim. See plugin.py."""

import pytest

from experiments.conformance.claims import Claim
from experiments.conformance.plugin import CLAIMS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generates one test per claim."""
    metafunc.parametrize("claim", metafunc.config.stash[CLAIMS], ids=str)


def test_policy(claim: Claim, request: pytest.FixtureRequest) -> None:
    """Checks a claim in all worlds."""
    __tracebackhide__ = True
    claim.check(request.config.getoption("policy_worlds"))
