"""The replicas that start and leave by a scaling decision."""

import pytest

from policies.scaling import Present, change_to

IDLE = Present("idle", True, 0, 0)
BUSY = Present("busy", True, 5, 1)
BUSY_TOO = Present("busy, newer", True, 5, 3)
STARTING = Present("starting", False, 0, 2)


@pytest.mark.parametrize(
    ("target", "num_starts", "drained"),
    [
        (6, 2, []),
        (4, 0, []),
        (3, 0, ["starting"]),
        (2, 0, ["starting", "idle"]),
        (1, 0, ["starting", "idle", "busy, newer"]),
        (0, 0, ["starting", "idle", "busy, newer", "busy"]),
    ],
)
def test_replicas_leave_that_do_not_serve_then_the_least_busy_then_the_newest(target, num_starts, drained):
    present = [IDLE, BUSY, STARTING, BUSY_TOO]
    assert change_to(target, present) == (num_starts, drained)
