"""Models that take turns on one GPU: times of a change, requests that wait, and refused pools."""

from itertools import pairwise

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.roles import Turns
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
TWO = (
    "++pools={a: {model: llama3_2_1b}, b: {model: qwen2_5_7b}}",
    *("hardware=h100_sxm", "turns.sleep_level=1", "turns.min_turn_s=2", "workload=callers"),
    *("++workload.models={llama-3.2-1b: 1, qwen2.5-7b: 1}", "workload.of.num_requests=60"),
)


def compose(*overrides):
    return SOURCE.compose([*TWO, *overrides])


def run(*overrides):
    scenario, source = build_run(compose(*overrides))
    return scenario, scenario.run(source).in_pandas()


@pytest.fixture(scope="module")
def level_1():
    return run()


def test_every_request_is_served_and_one_model_is_awake_at_a_time(level_1):
    _, result = level_1
    assert result.summary["requests"]["finished"] == 60
    turns = result.records.replicas
    assert len(turns) > 3
    assert [turn.pool for turn in turns] == [index % 2 for index in range(len(turns))]
    assert all(turn.end_s == later.start_s for turn, later in pairwise(turns))


def test_a_change_takes_the_time_of_both_copies_over_pcie(level_1):
    """Weights of 2.5 GB leave, and 15.2 GB come, at 0.8 of PCIe's 64 GB/s: 0.28 s."""
    scenario, result = level_1
    rate = 0.8 * scenario.hardware.pcie.bandwidth_bytes_per_s
    num_bytes = sum(pool.plan_memory().weights_bytes for pool in scenario.pools.values())
    changes_s = [turn.ready_s - turn.start_s for turn in result.records.replicas[1:]]
    assert changes_s == pytest.approx([num_bytes / rate] * len(changes_s))


def test_level_2_loads_the_weights_of_the_next_model_only():
    scenario, result = run("turns.sleep_level=2")
    changes_s = [turn.ready_s - turn.start_s for turn in result.records.replicas[1:]]
    loads_s = [pool.load_s for pool in scenario.pools.values()]
    assert changes_s == pytest.approx([loads_s[(index + 1) % 2] for index in range(len(changes_s))])


def test_one_gpu_is_paid_for_at_a_time(level_1):
    _, result = level_1
    turns = result.records.replicas
    assert sum(turn.end_s - turn.start_s for turn in turns) == pytest.approx(turns[-1].end_s)


def test_leap_equals_step(level_1):
    stepped = run("sim.leap=false")[1]
    assert stepped.records.requests.equals(level_1[1].records.requests)


def test_a_turn_ends_when_it_has_no_requests_or_has_lasted():
    turns = Turns(sleep_level=1, min_turn_s=5.0)
    assert turns.ends_s({}, is_busy=False, began_s=3.0) == float("inf")
    assert turns.ends_s({1: 4.0}, is_busy=False, began_s=3.0) == 3.0
    assert turns.ends_s({1: 4.0}, is_busy=True, began_s=3.0) == 8.0
    assert turns.next_model({2: 4.0, 1: 4.0, 0: 6.0}) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["turns.sleep_level=3"], "turns.sleep_level=3: must be one of 1, 2, or null"),
        (["turns.min_turn_s=-1"], r"turns\.min_turn_s=-1.*: must be a finite number >= 0 s"),
        (["++pools.b.replicas=2"], r"pools\.b: must have replicas=1"),
        (["++pools.b.hardware=l40s"], r"pools\.b: must have the hardware and the number of GPUs of pools\.a"),
        (["++pools.b.model=llama3_2_1b"], "must serve different models"),
        (["storage.host_memory_gib=10"], r"need 16\.\d GiB of host memory per GPU, more than"),
    ],
)
def test_pools_that_cannot_take_turns_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_scenario(compose(*overrides))
