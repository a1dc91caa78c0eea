"""The text of a config, key by key, is read by OmegaConf as the same config."""

import pytest
from omegaconf import OmegaConf

from sim.report.files import config_yaml


@pytest.mark.parametrize("value", [1, 1.0, True, "1", "1e6", None, "null", [], {}, [1, {"a": [2.5]}], "ä: b"])
def test_a_config_is_read_back_as_it_was(value):
    for config in ({"key": value, "other": {"inner": value}}, {"other": value}):
        again = OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
        assert again == config
        assert [type(item) for item in again.values()] == [type(item) for item in config.values()]


def test_an_empty_config_is_an_empty_mapping():
    assert OmegaConf.create(config_yaml({})) == {}
