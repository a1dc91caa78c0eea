"""Classes that configs of earlier versions name by their old modules are found where they are now."""

from pathlib import Path

import pytest

from policies.routing.load_balancing import RoundRobin
from sim.settings.build import build, locate, moved_to
from sim.settings.errors import ConfigError
from sim.settings.recorded import check_recorded

OLD = Path(__file__).with_name("old_targets.txt")
"""The classes that configs/ named before modules were merged, in version 0.1.0 of 29 November 2026."""


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
        ("sim.workload.retries.Retries", "sim.cluster.clients.Retries"),
        ("policies.speculation.tree.TokenTree.of_widths", "policies.speculation.TokenTree.of_widths"),
        ("my_policies.old.RoundRobin", None),
        ("policies./tmp/x.RoundRobin", None),
        ("policies.missing.__init__", None),
        ("RoundRobin", None),
        ("None", None),
        ("", None),
    ],
)
def test_a_class_is_found_by_its_name(old, present):
    assert moved_to(old) == present


def test_a_config_with_old_paths_is_built():
    node = {"_target_": "policies.routing.round_robin.RoundRobin"}
    assert build(node, "routing", RoundRobin) == RoundRobin()
    check_recorded({"routing": node}, "folder=x")


@pytest.mark.parametrize("path", OLD.read_text(encoding="utf-8").split())
def test_every_class_of_an_older_config_is_found(path):
    assert callable(locate(path, "group"))


def test_a_wrong_class_in_a_module_that_is_there_is_refused():
    with pytest.raises(ConfigError, match="RoundRobin"):
        locate("policies.batching.RoundRobin", "routing")


def test_a_name_that_is_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"policies\.routing has no round_robin"):
        locate("policies.routing.round_robin.RoundRobbin", "routing")
