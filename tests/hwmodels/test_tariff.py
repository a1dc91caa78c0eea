"""Bills of clients for cached prompts."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hwmodels.costs import Tariff, break_even_load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_the_worked_number_of_the_module():
    tariff = Tariff(usd_per_million_input_tokens=3.0, read_factor=0.1, write_factor=1.25)
    plain = tariff.bill_usd(input_tokens=1e7, found=0, written=0, output_tokens=0, pinned_token_s=0)
    cached = tariff.bill_usd(input_tokens=1e7, found=8.991e6, written=9e3, output_tokens=0, pinned_token_s=0)
    assert plain == pytest.approx(30.0)
    assert cached == pytest.approx(5.73, abs=0.005)


def test_rent_is_per_token_and_hour():
    """A million tokens for two hours at $4.5: $9."""
    tariff = Tariff(usd_per_million_token_hours=4.5)
    bill = tariff.bill_usd(input_tokens=0, found=0, written=0, output_tokens=0, pinned_token_s=1e6 * 7200)
    assert bill == pytest.approx(9.0)


def test_batch_apis_cost_half_and_rent_stays():
    whole, half = (
        Tariff(usd_per_million_token_hours=1.0, batch_factor=factor).bill_usd(
            input_tokens=1e6, found=2e5, written=1e5, output_tokens=1e5, pinned_token_s=3600e6
        )
        for factor in (1.0, 0.5)
    )
    assert half - 1.0 == pytest.approx((whole - 1.0) / 2)


def test_published_prices_of_explicit_caches():
    """A million cached tokens at -75 % of $0.30, kept for two hours at $1.00: $0.075 and $2."""
    tariff = instantiate(OmegaConf.load(CONFIGS / "tariff" / "cached_storage.yaml"))
    bill = tariff.bill_usd(input_tokens=1e6, found=1e6, written=0, output_tokens=0, pinned_token_s=7200e6)
    assert bill == pytest.approx(0.075 + 2.0)


def test_break_even_is_the_load_at_which_costs_are_equal():
    assert break_even_load(2.70, 10.0) == pytest.approx(0.27)
    assert break_even_load(1.0, 0.0) == float("inf")


def test_rejects_a_negative_cost():
    with pytest.raises(ValueError, match="fleet_usd=-1"):
        break_even_load(-1.0, 1.0)


def test_rejects_a_negative_price():
    with pytest.raises(ValueError, match="read_factor"):
        Tariff(read_factor=-1.0)
