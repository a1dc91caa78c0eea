"""key=value without Hydra."""

import pytest

from experiments.app.key_values import key_values
from sim.settings.errors import ConfigError


def test_the_last_value_of_a_key_counts_and_may_hold_an_equals_sign():
    assert key_values(["run=a", "to=x=y", "run=b"], ("run", "to")) == {"run": "b", "to": "x=y"}


@pytest.mark.parametrize("argument", ["rum=a", "run", "-run=a"])
def test_rejects_what_is_no_setting_and_names_the_nearest(argument):
    with pytest.raises(ConfigError, match=r"no such setting; nearest: run; allowed: run, to"):
        key_values([argument], ("run", "to"))
