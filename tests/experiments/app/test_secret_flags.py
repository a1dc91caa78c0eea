"""Values of secret flags leave the command line for the environment."""

from __future__ import annotations

import os

import pytest

from experiments.app.cli import COMMANDS
from experiments.app.job import without_secrets
from experiments.serve.settings import KEY_VARIABLE
from sim.settings.errors import ConfigError

VARIABLES = {"--api-key": "KEY_OF_A_TEST"}


@pytest.mark.parametrize("words", [["--api-key", "s3cret"], ["--api-key=s3cret"]])
def test_a_secret_leaves_the_command_line_for_the_environment(words, monkeypatch):
    monkeypatch.setenv("KEY_OF_A_TEST", "")
    assert without_secrets(["seed=1", *words, "port=0"], VARIABLES) == ["seed=1", "port=0"]
    assert os.environ["KEY_OF_A_TEST"] == "s3cret"


@pytest.mark.parametrize("words", [["--api-key"], ["--api-key="], ["--api-key", ""]])
def test_rejects_a_secret_flag_without_a_value(words):
    with pytest.raises(ConfigError, match="--api-key: needs a value"):
        without_secrets(words, VARIABLES)


def test_the_key_of_serve_is_read_from_the_variable_that_its_flag_sets():
    assert COMMANDS["serve"].secrets == {"--api-key": KEY_VARIABLE}
