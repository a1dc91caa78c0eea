"""pytest plugin: `pytest --policy path.to.Policy [--policy-settings key=value ...]` checks its conformance.

Every pytest session of an environment with windtunnel loads this module; the suite is imported if asked for.
Without files to test, the suite is all that runs; with files, it runs beside them.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("suite.py")
CLAIMS = pytest.StashKey[Iterable[object]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite."""
    group = parser.getgroup("windtunnel", "conformance of a serving policy")
    group.addoption("--policy", metavar="PATH", help="a policy class to check, as module.Class")
    group.addoption(
        "--policy-settings",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="its settings; those that are not given have their defaults, and some are varied",
    )
    group.addoption(
        "--policy-worlds", metavar="N", type=int, default=100, help="random worlds a promise (default: 100)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the policy, and have the suite collected."""
    path = config.getoption("policy")
    if path is None:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError("--policy draws random worlds: pip install 'windtunnel[conformance]'")
    sys.path.append(os.getcwd())  # a user's own classes may lie here; last, so that they shadow nothing
    claims = importlib.import_module("experiments.conformance.claims")
    errors = importlib.import_module("sim.settings.errors")
    try:
        settings = _settings(config.getoption("policy_settings"))
        config.stash[CLAIMS] = claims.claims_by_name(path, settings)
    except (errors.ConfigError, ValueError) as error:
        raise pytest.UsageError(f"--policy {path}: {error}") from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.args.append(str(SUITE))


def _settings(words: list[str]) -> dict[str, object]:
    """key=value words as settings; values are written as in a config file."""
    omegaconf = importlib.import_module("omegaconf")
    for word in words:
        key, equals, _ = word.partition("=")
        if not (key and equals):
            raise ValueError(f"--policy-settings {word}: must be key=value")
    settings = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_dotlist(words))
    return {str(key): value for key, value in settings.items()}
