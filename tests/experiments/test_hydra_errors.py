"""What is said about keys that were added, deleted or have no name; test_cli has the other messages."""

import pytest

from experiments.compose import ConfigSource
from experiments.errors import ConfigError
from experiments.hydra_errors import COMPOSE_ERRORS, check_edits, explain

CONFIGS = {
    "boat.yaml": "defaults: [_self_, {sail: square}]\nseed: 0\ntrip: {days: 3, fast: false}\n",
    "sail/none.yaml": "",
    "sail/square.yaml": "_target_: boats.Sail\narea_m2: 12.5\n",
}


@pytest.fixture
def source(tmp_path):
    for name, text in CONFIGS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return ConfigSource(config_name="boat", dirs=[tmp_path])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("~sail", "~sail: must be chosen; allowed: sail=none, sail=square"),
        ("~sail=square", "~sail: must be chosen; allowed: sail=none, sail=square"),
        ("~trip", "~trip: must not be deleted; instead set trip.days, trip.fast"),
        ("~seed", "~seed: must not be deleted; instead set seed"),
    ],
)
def test_what_the_root_holds_cannot_be_deleted(source, override, message):
    with pytest.raises(ConfigError) as error:
        check_edits(source.compose([override]), [override], source)
    assert str(error.value) == message


@pytest.mark.parametrize("override", ["~trip.days", "~sail.area_m2", "+sail.colour=red", "sail=none"])
def test_what_build_checks_is_left_to_it(source, override):
    check_edits(source.compose([override]), [override], source)


@pytest.mark.parametrize("override", ["=3", "=abc", "+=3", "~=3", "~"])
def test_a_value_without_a_key_is_told_what_to_look_like(source, override):
    with pytest.raises(COMPOSE_ERRORS) as error:
        source.compose([override])
    assert str(explain(error.value, [override], source)) == f"{override}: must be key=value"
