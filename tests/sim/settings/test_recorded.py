"""Recorded configs name only classes that are known, and read nothing but themselves."""

import pytest

import sim.settings.recorded as recorded
from sim.settings.errors import ConfigError

OWN = {
    "routing": {"_target_": "policies.routing.load_balancing.RoundRobin"},
    "seeds": [1, "${seed}"],
    "seed": 0,
}


def test_classes_of_ours_and_references_within_the_config_are_allowed():
    """The class that is refused stands behind them, and only it is named."""
    recorded.check_recorded(OWN, "run=there")
    with pytest.raises(ConfigError, match=r"its config contains z\._target_=os\.system, which"):
        recorded.check_recorded({**OWN, "z": {"_target_": "os.system"}}, "run=there")


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "subprocess.Popen",
        "policies_of_mine.Mine",
        "sim.settings.build.importlib.import_module",
        "sim.settings.build.get_type_hints",
        "importlib.import_module",
        "${name}",
        ["os.system"],
        7,
    ],
)
def test_other_targets_are_refused_wherever_they_stand(target):
    for config in ({"a": {"_target_": target}}, {"a": [{"b": {"_target_": target}}]}):
        with pytest.raises(ConfigError):
            recorded.check_recorded({**OWN, **config}, "run=there")


def test_the_message_names_folder_key_class_and_cure():
    with pytest.raises(ConfigError) as error:
        recorded.check_recorded({"a": {"_target_": "os.system", "command": "true"}}, "run=there")
    assert str(error.value) == (
        "run=there: its config contains a._target_=os.system, which belongs neither to windtunnel nor to an "
        "installed plugin; add --trust if you trust the folder and that code"
    )


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "x${seed}", "${oc.decode:'{_target_: os.system}'}"])
def test_other_interpolations_are_refused(text):
    with pytest.raises(ConfigError, match="may refer only to its own keys"):
        recorded.check_recorded({"title": text}, "run=there")


def test_classes_of_an_installed_plugin_are_allowed(monkeypatch):
    class Plugin:
        module = "collections"

    config = {"a": {"_target_": "collections.OrderedDict"}}
    with pytest.raises(ConfigError, match=r"a\._target_=collections\.OrderedDict, which belongs neither"):
        recorded.check_recorded(config, "run=there")
    monkeypatch.setattr(recorded, "entry_points", lambda group: [Plugin()] if "plugins" in group else [])
    recorded.check_recorded(config, "run=there")
