"""Texts of a summary that depend on its figures."""

import pytest

from sim.report.wording import busy_line


@pytest.mark.parametrize(
    ("busy", "mfu", "mbu", "why"),
    [
        (0.9, 0.3, 0.6, "reads of weights and KV limit decode (MBU 60.0 %)"),
        (0.9, 0.3, 0.1, "communication leave units idle (MBU 10.0 %)"),
        (0.9, 0.6, 0.2, ""),  # compute is used well
        (0.1, 0.01, 0.05, ""),  # the GPU is idle
        (None, None, None, ""),  # an empty window
    ],
)
def test_a_busy_gpu_with_a_low_mfu_is_explained(busy, mfu, mbu, why):
    line = busy_line({"gpu_busy": busy, "mfu": mfu, "mbu": mbu})
    assert bool(line) is bool(why)
    assert why in line
    if why:
        assert line.startswith(
            "High utilisation with low MFU is normal: iterations run 90.0 % of the time, but "
        )
