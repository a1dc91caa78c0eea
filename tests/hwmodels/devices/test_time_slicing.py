"""Time slicing: the bytes of a switch, and its share of the time."""

import pytest

from hwmodels.device import STATE_BYTES, TimeSlicing


def test_a_switch_saves_and_restores_all_sms_and_fills_the_l2(toy_device):
    """100 SMs of 496 KiB, twice, and 50 MB at 1e12 bytes/s: 152 us; of 2 ms and that, 7 %."""
    assert TimeSlicing().switch_s(toy_device) == pytest.approx((2 * 100 * STATE_BYTES + 50e6) / 1e12)
    assert TimeSlicing().switch_share(toy_device) == pytest.approx(0.0705, abs=1e-3)


def test_the_worked_number_of_an_h100(devices):
    assert TimeSlicing().switch_s(devices["h100_sxm"]) == pytest.approx(55.7e-6, rel=0.01)
    assert TimeSlicing().switch_share(devices["h100_sxm"]) == pytest.approx(0.027, abs=5e-4)


def test_longer_slices_switch_less(toy_device):
    shares = [TimeSlicing(slice_s=slice_s).switch_share(toy_device) for slice_s in (2e-3, 10e-3, 30e-3)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.01


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_rejects_slices_of_no_time(value):
    with pytest.raises(ValueError, match=r"slice_s=.*: must be a finite number > 0 s"):
        TimeSlicing(slice_s=value)
