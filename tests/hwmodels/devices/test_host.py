"""CUDA-graph padding, and host settings that are refused."""

import math

import pytest

from hwmodels.devices.host import CudaGraphs, HostOverhead


def test_capture_sizes_are_vllms_ladder():
    sizes = CudaGraphs(max_capture_size=512).sizes
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[sizes.index(256) - 1 : sizes.index(256) + 2] == [248, 256, 272]
    assert (sizes[-1], len(sizes)) == (512, 51)


def test_a_batch_is_padded_to_the_next_captured_size():
    padded = CudaGraphs(max_capture_size=16).padded()
    assert padded == [0, 1, 2, 4, 4, 8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 16, 16]


def test_without_graphs_nothing_is_captured():
    graphs = CudaGraphs(enabled=False)
    assert graphs.sizes == []
    assert graphs.padded() == [0]


def test_rejects_a_capture_size_below_one():
    with pytest.raises(ValueError, match="max_capture_size=0: must be a whole number >= 1; set enabled"):
        CudaGraphs(max_capture_size=0)


@pytest.mark.parametrize("name", ["iteration_s", "sequence_s", "launch_s", "graph_replay_s"])
@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf])
def test_rejects_seconds_that_are_negative_or_not_finite(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: must be a finite number >= 0 s"):
        HostOverhead(**{name: value})
