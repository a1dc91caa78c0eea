"""Figures of runs as metrics: a tariff's break-even is one, although a run that ends at once has none."""

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.study.figures import known_figures
from sim.settings.scenario import build_scenario


def test_the_break_even_of_a_tariff_is_a_known_figure():
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    small = ["model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=3"]
    assert "break_even_load" in known_figures(build_scenario(source.compose([*small, "tariff=batch"])))
    assert "break_even_load" not in known_figures(build_scenario(source.compose(small)))
