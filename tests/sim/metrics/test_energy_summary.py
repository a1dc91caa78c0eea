"""Energy and cost of a run whose every figure is worked out on paper.

One replica, 4 s at 1 $ a second; boards take 100 W idle and 300 W at most:

    time       tokens  MFU   MBU   load = MFU + MBU / 2   watts
    0 - 1 s      8     0.8   0.5   1 (not 1.05)            300
    1 - 2 s      5     0.5   0.5   0.75                    250
    2 - 3 s      1     0.1   0.5   0.35                    170
    3 - 4 s    idle                                        100

Two requests of 8 and 4 prompt tokens; 4 output tokens.
"""

import json
from dataclasses import replace

import pandas as pd
import pytest

from hwmodels.costs import EnergySettings, PowerModel
from sim.metrics.dialects import MetricsSettings
from sim.metrics.figure import PoolHardware
from sim.metrics.summary import summarise
from sim.records.run import replicas_throughout
from sim.report import numbers, wording
from tests.sim.metrics.small_runs import run_of_three_iterations

POWER = PowerModel(idle_w=100, tdp_w=300, compute_weight=1.0, memory_weight=0.5)
SETTINGS = EnergySettings(grid_g_co2e_per_kwh=360, pue=2)


class TenFlopsAToken:
    """10 FLOPs a token at a peak of 100 FLOP/s; 50 bytes an iteration at a peak of 100 bytes/s."""

    peak_flops_per_s = peak_bytes_per_s = 100.0

    def flops(self, shape):
        return 10.0 * (shape.decode_seqs + shape.prefill_tokens)

    def bytes_moved(self, shape):
        return 50.0


def two_requests():
    requests = pd.DataFrame(
        {
            "request_id": [0, 1],
            "status": ["finished", "finished"],
            "arrival_s": [0.0, 0.5],
            "scheduled_s": [0.0, 1.0],
            "first_token_s": [1.0, 2.0],
            "last_token_s": [3.0, 2.0],
            "finished_s": [3.0, 2.0],
            "prompt_tokens": [8, 4],
            "output_tokens": [3, 1],
            "preemptions": [0, 0],
        }
    )
    return run_of_three_iterations(requests)


def summary_of(records, **given):
    of_pool = {name: given.pop(name) for name in ("power", "num_devices") if name in given}
    pool = PoolHardware(model=TenFlopsAToken(), price_usd_per_hour=3600.0, **{"power": POWER, **of_pool})
    return summarise(records, pools=[pool], slo=None, **{"energy": SETTINGS, **given})


def test_energy_follows_what_each_iteration_reaches():
    energy = summary_of(two_requests())["energy"]
    assert energy["joules"] == pytest.approx(300 + 250 + 170 + 100)
    assert energy["idle_joules"] == pytest.approx(100)
    assert energy["mean_device_w"] == pytest.approx(820 / 4)
    assert energy["joules_per_output_token"] == pytest.approx(820 / 4)
    assert energy["joules_per_1000_requests"] == pytest.approx(410_000)


def test_electricity_and_emissions_are_those_bought():
    energy = summary_of(two_requests())["energy"]
    assert energy["kwh"] == pytest.approx(2 * 820 / 3.6e6)
    assert energy["g_co2e"] == pytest.approx(0.164)
    assert energy["kwh_per_device_year"] == pytest.approx(2 * 205 * 8760 / 1000)
    assert energy["kwh_per_1000_requests"] == pytest.approx(500 * 2 * 820 / 3.6e6)
    assert (energy["grid_g_co2e_per_kwh"], energy["pue"]) == (360, 2)


def test_supplies_must_provide_more_than_the_power_limit():
    assert summary_of(two_requests())["energy"]["max_device_w"] == pytest.approx(330)
    settings = replace(SETTINGS, max_power_factor=1.5)
    energy = summary_of(two_requests(), energy=settings)["energy"]
    assert energy["max_device_w"] == pytest.approx(450)
    assert energy["joules"] == pytest.approx(820), "the mean power does not depend on peaks"


def test_training_is_worth_so_many_output_tokens():
    """A forward pass takes 10 FLOPs a token, training 30; the run computes 14 tokens for 4 output tokens."""
    assert summary_of(two_requests())["training"] is None
    training = summary_of(two_requests(), energy=replace(SETTINGS, training_tokens=700.0))["training"]
    assert training["training_flops"] == pytest.approx(21_000)
    assert training["output_tokens_of_equal_flops"] == pytest.approx(21_000 / 140 * 4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"max_power_factor": 0.9},
            "max_power_factor=0.9: must be a finite number >= 1; a multiple of the TDP",
        ),
        ({"max_power_factor": float("nan")}, "max_power_factor=nan"),
        ({"training_tokens": 0.0}, "training_tokens=0.0"),
        ({"training_tokens": -5}, "training_tokens=-5"),
    ],
)
def test_impossible_settings_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        EnergySettings(**setting)


def test_every_device_of_a_replica_takes_its_power():
    energy = summary_of(two_requests(), num_devices=2)["energy"]
    assert energy["joules"] == pytest.approx(2 * 820)
    assert energy["mean_device_w"] == pytest.approx(205)


def test_a_replica_that_does_nothing_idles():
    energy = summary_of(replace(two_requests(), replicas=replicas_throughout(2, 4.0)))["energy"]
    assert energy["joules"] == pytest.approx(820 + 4 * 100)


def test_only_what_lies_in_the_window_counts():
    """1.5 to 3 s: half of the second iteration, all of the third."""
    energy = summary_of(two_requests(), metrics=MetricsSettings(warmup_s=1.5, cooldown_s=1.0))["energy"]
    assert energy["joules"] == pytest.approx(125 + 170)
    assert energy["idle_joules"] == 0


def test_an_iteration_without_duration_takes_no_energy():
    records = two_requests()
    iterations = records.iterations.assign(duration_s=[1.0, 1.0, 0.0])
    energy = summary_of(replace(records, iterations=iterations))["energy"]
    assert energy["joules"] == pytest.approx(300 + 250 + 2 * 100)


def test_without_the_power_of_a_device_there_is_no_energy():
    summary = summary_of(two_requests(), power=None)
    assert summary["energy"] is None
    assert wording.energy_line(summary) == ""


def test_an_empty_window_has_no_energy_per_token():
    summary = summary_of(two_requests(), metrics=MetricsSettings(warmup_s=100))
    json.dumps(summary, allow_nan=False)
    assert summary["energy"]["joules"] == 0
    assert summary["energy"]["joules_per_output_token"] is None
    assert wording.energy(summary)["per output token"] == "– J"


def test_energy_is_one_line_in_words():
    summary = summary_of(two_requests(), energy=EnergySettings(grid_g_co2e_per_kwh=3.6e6, pue=1))
    assert wording.energy_line(summary) == (
        "Energy: 0.000228 kWh, 820 g CO2e; 205 J per output token, 0.114 kWh per 1,000 requests; 205 W/GPU"
    )
    assert numbers.grams(1234) == "1.23 kg"


def test_cost_is_split_as_the_busy_time_is():
    # Prompts took the first second and 4 of the 5 tokens of the second one: 1.8 of 3 busy seconds.
    cost = summary_of(two_requests())["cost"]
    assert cost["usd"] == pytest.approx(4)
    assert cost["split"]["prefill_time_share"] == pytest.approx(0.6)
    assert cost["split"]["usd_per_million_input_tokens"] == pytest.approx(0.6 * 4 / 12 * 1e6)
    assert cost["split"]["usd_per_million_output_tokens"] == pytest.approx(0.4 * 4 / 4 * 1e6)
    assert cost["usd_per_million_output_tokens"] == pytest.approx(1e6)
    assert cost["usd_per_1000_requests"] == pytest.approx(2000)
