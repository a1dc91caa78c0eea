"""A number in the place of a mapping is answered with the setting that takes it."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.hydra_errors import composed
from sim.settings.errors import ConfigError

LENGTHS = "workload.lengths.prompt_tokens"


@pytest.fixture(scope="module")
def source():
    return ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["workload=poisson", f"{LENGTHS}=10"], f"set {LENGTHS}.value=10"),
        ([f"{LENGTHS}=10"], f"choose workload/lengths=fixed and set {LENGTHS}.value=10"),
        (
            ["workload=lora", "workload.of.lengths.output_tokens=7"],
            "set workload.of.lengths.output_tokens.value=7",
        ),
        (["workload=conversation", "workload.turns=3"], "set workload.turns.mean=3"),
        (
            ["workload=synthetic", "workload.arrivals=5"],
            "set workload.arrivals.rate_per_s=5",
        ),
    ],
)
def test_the_message_names_the_setting_to_write_instead(source, overrides, advice):
    with pytest.raises(ConfigError) as error:
        composed(source, overrides)
    assert str(error.value) == f"{overrides[-1]}: must be a mapping; {advice}"


def test_the_advice_can_be_followed(source):
    cfg = composed(source, ["workload=synthetic", "workload/lengths=fixed", f"{LENGTHS}.value=10"])
    assert cfg.workload.lengths.prompt_tokens.value == 10


def test_numbers_where_numbers_belong_are_accepted(source):
    cfg = composed(
        source, ["workload.max_tokens=3", "sim.until_s=0.5", "scheduling.aging_s=1", "scheduling=priority"]
    )
    assert (cfg.workload.max_tokens, cfg.sim.until_s, cfg.scheduling.aging_s) == (3, 0.5, 1)


def test_with_two_unknown_settings_the_nearest_one_is_of_the_chosen_workload(source):
    """A name is never the nearest to itself."""
    overrides = ["workload=lora", "workload.num_requests=6", "workload.arrivals.rate_per_s=6"]
    with pytest.raises(
        ConfigError, match=r"^workload\.num_requests: .* nearest: workload\.of\.num_requests;"
    ):
        composed(source, overrides)
