"""pytest plugin: `pytest --policy path.to.Policy [--policy-settings key=value ...]` checks its conformance.

Every pytest session of an environment with windtunnel loads this module, which imports the suite only for
--policy. Without files on the command line, only the suite runs; with files, it runs in addition to them.
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
    """Adds the options of the suite."""
    group = parser.getgroup("windtunnel", "conformance of a serving policy")
    group.addoption("--policy", metavar="PATH", help="policy class to check, as module.Class")
    group.addoption(
        "--policy-settings",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="settings of the policy; others have their defaults, and some of them are varied",
    )
    group.addoption(
        "--policy-worlds",
        metavar="N",
        type=int,
        default=100,
        help="number of random worlds per promise (default: 100)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Finds the policy and adds the suite to the tests. Raises UsageError if the policy cannot be built."""
    path = config.getoption("policy")
    if path is None:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError("--policy needs hypothesis: pip install 'windtunnel[conformance]'")
    _accept_old_claims(config)
    sys.path.append(os.getcwd())  # for the user's own classes; last, so that they shadow no other module
    claims = importlib.import_module("experiments.conformance.claims")
    errors = importlib.import_module("sim.settings.errors")
    failures = importlib.import_module("policies.user_code")
    try:
        settings = _settings(config.getoption("policy_settings"))
        config.stash[CLAIMS] = claims.claims_by_name(path, settings)
    except (errors.ConfigError, ValueError) as error:
        raise pytest.UsageError(f"--policy {path}: {failures.with_quote(error)}") from error
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    config.args.append(str(SUITE))


def _accept_old_claims(config: pytest.Config) -> None:
    """Makes -k select claims by their old names, too, and prints a note."""
    renamed = importlib.import_module("experiments.conformance.renamed")
    config.option.keyword, notes = renamed.with_new_claims(config.option.keyword)
    for note in notes:
        print(f"windtunnel: {note}", file=sys.stderr)


def _settings(words: list[str]) -> dict[str, object]:
    """Parses key=value words as settings; values are written as in a config file."""
    omegaconf = importlib.import_module("omegaconf")
    for word in words:
        key, equals, _ = word.partition("=")
        if not (key and equals):
            raise ValueError(f"--policy-settings {word}: must be key=value")
    settings = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_dotlist(words))
    return {str(key): value for key, value in settings.items()}
