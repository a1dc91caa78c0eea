"""Text on the bill of an API."""

from sim.report.bill import bill_line


def test_the_line_names_both_costs_and_the_break_even():
    line = bill_line({"bill_usd": 10.0, "break_even_load": 0.27, "cost": {"usd": 2.7}})
    assert "$10 for the same traffic, the fleet $2.7;" in line
    assert "0.27 times the traffic" in line


def test_without_a_tariff_there_is_no_line():
    assert bill_line({"bill_usd": None, "cost": {"usd": 2.7}}) == ""
