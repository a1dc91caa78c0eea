"""Bills of clients for cached prompts."""

import pytest

from hwmodels.tariff import Tariff


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


def test_rejects_a_negative_price():
    with pytest.raises(ValueError, match="read_factor"):
        Tariff(read_factor=-1.0)
