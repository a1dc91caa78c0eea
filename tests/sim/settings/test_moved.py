"""Classes that configs of earlier versions name by their old modules are found where they are now."""

import pytest

from policies.routing.load_balancing import RoundRobin
from sim.settings.build import build, locate, moved_to
from sim.settings.errors import ConfigError
from sim.settings.recorded import check_recorded


@pytest.mark.parametrize(
    ("old", "present"),
    [
        ("policies.routing.round_robin.RoundRobin", "policies.routing.load_balancing.RoundRobin"),
        ("policies.roles.fixed.Fixed", "policies.roles.Fixed"),
        ("policies.speculation.fixed.Fixed", "policies.speculation.draft_lengths.Fixed"),
        ("hwmodels.devices.host.HostOverhead", "hwmodels.host.HostOverhead"),
        ("hwmodels.devices.device.Device", "hwmodels.device.Device"),
        ("hwmodels.operators.calibration.Calibration", "hwmodels.operators.Calibration"),
        ("sim.cluster.recovery.Recovery", "sim.cluster.failures.Recovery"),
        ("sim.workload.lengths.Lengths", "sim.workload.distributions.Lengths"),
        ("hwmodels.hf.config.from_hf_fields", None),  # it is there
        ("policies.routing.round_robin.RoundRobbin", None),
        ("my_policies.old.RoundRobin", None),
        ("policies.missing.__init__", None),
    ],
)
def test_a_class_is_found_by_its_name(old, present):
    assert moved_to(old) == present


def test_a_config_with_old_paths_is_built():
    node = {"_target_": "policies.routing.round_robin.RoundRobin"}
    assert build(node, "routing", RoundRobin) == RoundRobin()
    check_recorded({"routing": node}, "folder=x")


def test_a_name_that_is_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"policies\.routing has no round_robin"):
        locate("policies.routing.round_robin.RoundRobbin", "routing")
