"""Power, energy, electricity, emissions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.costs import EnergySettings, PowerModel, energy_joules, idle_joules
from hwmodels.iterations import IterationShape

H100 = PowerModel(idle_w=70, tdp_w=700)
DECODE = IterationShape(8, 8_192, 0, 0, 0, 0, 8)
shares = st.floats(0, 1)


class Model:
    """Uses half of its bandwidth and a tenth of its FLOP/s in each second that is priced."""

    peak_flops_per_s = 1e15
    peak_bytes_per_s = 4e12

    def flops(self, shape):
        return 1e14 * np.sign(shape.decode_seqs)

    def bytes_moved(self, shape):
        return 2e12 * np.sign(shape.decode_seqs)


def test_power_is_idle_plus_the_weighted_load():
    # 1.7 * 0.1 + 0.55 * 0.5 = 0.445 of the 630 W between idle and TDP.
    assert H100.watts(compute_utilisation=0.1, memory_utilisation=0.5) == pytest.approx(350.35)
    assert H100.watts(compute_utilisation=0, memory_utilisation=0) == 70
    assert H100.watts(compute_utilisation=0, memory_utilisation=0, link_utilisation=1) == pytest.approx(133)


def test_power_meets_the_measurements_that_it_was_set_by():
    assert H100.watts(compute_utilisation=0.0, memory_utilisation=0.65) == pytest.approx(300, rel=0.05)
    assert H100.watts(compute_utilisation=0.25, memory_utilisation=0.75) == pytest.approx(600, rel=0.05)
    assert H100.watts(compute_utilisation=0.6, memory_utilisation=0.1) == 700


@given(compute=shares, memory=shares, link=shares, more=shares)
def test_power_lies_between_idle_and_tdp_and_grows_with_the_load(compute, memory, link, more):
    watts = H100.watts(compute_utilisation=compute, memory_utilisation=memory, link_utilisation=link)
    busier = H100.watts(compute_utilisation=compute + more, memory_utilisation=memory, link_utilisation=link)
    assert 70 <= watts <= busier <= 700


def test_power_limits_are_the_devices_own(devices):
    power = PowerModel.of(devices["l4"])
    assert (power.idle_w, power.tdp_w) == (devices["l4"].idle_w, 72)


def test_energy_of_an_iteration_counts_every_device():
    # Two devices for a second at MFU 0.1 and MBU 0.5.
    assert energy_joules(H100, Model(), DECODE, 1.0, num_devices=2) == pytest.approx(700.7)


def test_energy_of_many_iterations_is_that_of_each():
    shape = DECODE._replace(decode_seqs=np.array([8, 16]))
    durations = np.array([1.0, 2.0])
    assert energy_joules(H100, Model(), shape, durations, num_devices=1) == pytest.approx(
        [energy_joules(H100, Model(), DECODE, duration, num_devices=1) for duration in (1.0, 2.0)]
    )


def test_idle_devices_still_draw_idle_power():
    assert idle_joules(H100, 10.0, num_devices=4) == 2_800


def test_a_megajoule_is_0_433_kwh_and_205_g():
    assert EnergySettings().kwh(1e6) == pytest.approx(0.4333, abs=1e-4)
    assert EnergySettings().g_co2e(1e6) == pytest.approx(205.0, abs=0.1)
    assert EnergySettings(grid_g_co2e_per_kwh=0, pue=1).kwh(3.6e6) == 1
    assert EnergySettings(grid_g_co2e_per_kwh=0, pue=1).g_co2e(3.6e6) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pue": 0.9}, "pue=0.9: must be a finite number >= 1; 1 is a data centre without any overhead"),
        ({"pue": math.inf}, "pue=inf: must be a finite number >= 1; 1 is a data centre without any overhead"),
        ({"grid_g_co2e_per_kwh": -1}, "grid_g_co2e_per_kwh=-1: must be a finite number >= 0"),
    ],
)
def test_settings_reject_impossible_figures(given, message):
    with pytest.raises(ValueError, match=message):
        EnergySettings(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"idle_w": 700}, "idle_w=700: must be below tdp_w=700 W"),
        ({"memory_weight": -0.1}, "memory_weight=-0.1: must be a finite number >= 0"),
        ({"tdp_w": math.nan}, "tdp_w=nan: must be a finite number > 0"),
    ],
)
def test_power_rejects_impossible_figures(given, message):
    with pytest.raises(ValueError, match=message):
        PowerModel(**{"idle_w": 70, "tdp_w": 700, **given})
