"""What `pytest --policy path.to.Policy` runs: a test for each promise. See plugin.py."""

import pytest

from experiments.conformance.claims import Claim
from experiments.conformance.plugin import CLAIMS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each claim."""
    metafunc.parametrize("claim", metafunc.config.stash[CLAIMS], ids=str)


def test_policy(claim: Claim, request: pytest.FixtureRequest) -> None:
    """It holds in every world that is tried."""
    __tracebackhide__ = True
    claim.check(request.config.getoption("policy_worlds"))
