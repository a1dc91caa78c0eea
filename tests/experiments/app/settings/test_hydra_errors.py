"""Messages about keys that were added, deleted or have no name; test_cli has the other messages."""

import shlex

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import COMPOSE_ERRORS, check_edits, composed, explain
from hwmodels.model.weights import Lora
from sim.settings.build import build
from sim.settings.errors import ConfigError

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
    """Beside an override that is refused, it is not the one that the message names."""
    check_edits(source.compose([override]), [override], source)
    both = [override, "~seed"]
    with pytest.raises(ConfigError, match=r"^~seed: must not be deleted"):
        check_edits(source.compose(both), both, source)


@pytest.mark.parametrize("override", ["=3", "=abc", "+=3", "~=3", "~"])
def test_a_value_without_a_key_is_reported_with_the_right_form(source, override):
    with pytest.raises(COMPOSE_ERRORS) as error:
        source.compose([override])
    assert str(explain(error.value, [override], source)) == f"{override}: must be key=value"


def test_a_part_of_what_is_null_is_answered_with_the_whole():
    """The suggested setting works."""
    simulate = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    with pytest.raises(COMPOSE_ERRORS) as error:
        simulate.compose(["lora.rank=16"])
    message = str(explain(error.value, ["lora.rank=16"], simulate))
    start, _, rest = message.partition("'")
    assert start == "lora.rank: lora is null; set it as a whole: "
    (override,) = shlex.split(f"'{rest}")
    assert build(simulate.compose([override]).lora, "lora") == Lora(rank=16, num_active=8)


@pytest.mark.parametrize(
    ("override", "start"),
    [
        (
            "decode_routing=x",
            "decode_routing=x: no such choice; write routing@decode_routing=...; all: windtunnel list ",
        ),
        (
            "decode_routing=powr_of_two",
            "decode_routing=powr_of_two: no such choice; write routing@decode_routing=...; "
            "nearest: power_of_two; all: windtunnel list routing",
        ),
        (
            "decode_routing=power_of_two",
            "decode_routing=power_of_two: must be written routing@decode_routing=power_of_two, ",
        ),
        ("decode_routing=null", "decode_routing=null: no such choice; write routing@decode_routing=...; "),
        (
            "routing@decode_routing=x",
            "routing@decode_routing=x: no such choice; all: windtunnel list routing",
        ),
    ],
)
def test_a_group_that_is_chosen_twice_is_reported_with_its_choices(override, start):
    """A key without its group gets a message with the right spelling."""
    with pytest.raises(ConfigError) as error:
        composed(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), [override])
    assert str(error.value).startswith(start)


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        (
            "simulate",
            ["model.transform.keep=0.5"],
            "model.transform.keep: model/transform=none has no settings; "
            "choose one with settings, such as model/transform=prune_depth",
        ),
        (
            "simulate",
            ["speculation.num_speculative_tokens=4"],
            "speculation.num_speculative_tokens: speculation=none has no settings; "
            "choose one with settings, such as speculation=draft_model",
        ),
        (
            "simulate",
            ["model/transform=distill", "model.transform.student=llama3_2_3b"],
            "model.transform.student=llama3_2_3b: must be written "
            "model@model.transform.student=llama3_2_3b, as a choice of model",
        ),
        (
            "simulate",
            ["model/transform=distill", "model.transform=prune_depth"],
            "model.transform=prune_depth: must be written model/transform=prune_depth, "
            "as a choice of model/transform",
        ),
        (
            "calibrate",
            ["device=cpu", "model=random_8m", "model/transform=prune_depth", "out=mm"],
            "model/transform=prune_depth: this command does not take model/transform; leave it out",
        ),
        (
            "place",
            ["model=random_8m"],
            "model=random_8m: this command does not take model; leave it out",
        ),
        (
            "simulate",
            ["workload=plain_csv", "workload/arrivals=gamma"],
            "workload/arrivals=gamma: is not used by workload=plain_csv",
        ),
        ("simulate", ["seed@x=1"], "seed@x=1: seed is a setting, not a group; write seed=1"),
    ],
)
def test_what_is_written_in_the_wrong_place_is_reported_with_its_right_place(command, overrides, message):
    with pytest.raises(ConfigError) as error:
        composed(ConfigSource(config_name=command, dirs=[CONFIG_DIR]), overrides)
    assert str(error.value) == message
