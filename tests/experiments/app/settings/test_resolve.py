"""A config is made plain, with every interpolation replaced by its value."""

import pytest
from omegaconf import OmegaConf

from experiments.app.settings.compose import resolved
from sim.settings.errors import ConfigError

NODES = {"side": 4, "art": {"side_m": "${side}", "title": "???", "frames": [{"width": "${art.side_m}"}, 2]}}
PLAIN = {"side": 4, "art": {"side_m": 4, "title": "???", "frames": [{"width": 4}, 2]}}


@pytest.mark.parametrize("config", [NODES, OmegaConf.create(NODES)])
def test_interpolations_get_their_values_and_what_is_missing_stays(config):
    found = resolved(config)
    assert found == PLAIN
    assert [type(part) for part in (found, found["art"], found["art"]["frames"])] == [dict, dict, list]


def test_nodes_may_be_referred_to_and_texts_contain_values():
    config = OmegaConf.create(
        {"art": {"side": 4}, "copy": "${art}", "text": "${art.side} m", "near": "${.art.side}"}
    )
    assert resolved(config) == {"art": {"side": 4}, "copy": {"side": 4}, "text": "4 m", "near": 4}


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("${nowhere}", "art.title: Interpolation key 'nowhere' not found"),
        ("${art.title}", "art.title: "),
        ("${oc.env:NO_SUCH_VARIABLE}", "art.title: KeyError raised while resolving"),
    ],
)
def test_an_interpolation_without_a_value_is_named(title, message):
    with pytest.raises(ConfigError) as error:
        resolved(OmegaConf.create({"art": {"title": title}}))
    assert str(error.value).startswith(message)
