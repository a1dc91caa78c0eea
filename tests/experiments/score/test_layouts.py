"""Parallel layouts from the columns of measured tables, also from those that count differently."""

import numpy as np
import pytest

from experiments.score import silicon
from experiments.score.layouts import layout_of
from experiments.study.presets import NotSimulatedError, base_scenario
from hwmodels.levels import Spec
from tests.experiments.score.measured_rows import SILICON

BASE = base_scenario("deepseek-r1", "h200_sxm", "vllm")


def read(tp, dp, cut, groups, base=BASE):
    row = {"tp_size": tp, "pp_size": 1, "attention_dp_size": dp, "moe_tp_size": cut, "moe_ep_size": groups}
    return layout_of(row, base)


@pytest.mark.parametrize(
    ("sizes", "tensor", "data", "expert"),
    [
        ((8, 1, 1, 8), 8, 1, 8),
        ((8, 1, 2, 4), 8, 1, 4),
        ((1, 8, 1, 8), 1, 8, 8),
        ((2, 4, 8, 1), 2, 4, 1),
        ((8, 8, 1, 8), 1, 8, 8),  # tp counts devices
        ((8, 2, 4, 2), 4, 2, 2),
        ((64, 1, 8, 8), 8, 1, 8),  # tp x ep, beyond a node
        ((32, 1, 8, 4), 8, 1, 4),
        ((4, 1, 0, np.nan), 4, 1, 1),
        ((2, 4, 0, 0), 2, 4, 8),
        ((8, 1, 8, np.nan), 8, 1, 1),
    ],
)
def test_the_devices_of_attention_are_those_of_the_experts(sizes, tensor, data, expert):
    layout = read(*sizes).layout
    assert layout.tensor_parallel_size == tensor
    assert layout.attention_data_parallel_size == data
    assert layout.expert_parallel_size == expert
    assert layout.num_devices == tensor * data


@pytest.mark.parametrize("sizes", [(8, 1, 1, 4), (4, 3, 4, 1), (2, 2, 8, 1)])
def test_sizes_that_contradict_each_other_are_refused(sizes):
    with pytest.raises(
        NotSimulatedError, match=f"moe_ep_size={sizes[3]}: must be tp_size={sizes[0]} x atten"
    ):
        read(*sizes)


def test_experts_over_several_nodes_are_no_product():
    """2 ways of 16 experts on 32 devices: no node has the 16 devices of tp."""
    assert read(4, 8, 2, 16).layout.num_devices == 32
    assert read(32, 1, 2, 16).layout.tensor_parallel_size == 32


def test_a_table_that_counts_products_has_one_replica():
    row = {**SILICON, "model": "deepseek-r1", "gpu": "h200_sxm", "weights": "fp8", "tp_size": 64, "gpus": 64}
    scenario = silicon.scenario_of({**row, "moe_tp_size": 8, "moe_ep_size": 8}, Spec())
    assert (scenario.replicas, scenario.layout.num_devices) == (1, 8)
