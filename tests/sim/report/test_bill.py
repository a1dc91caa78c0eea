"""Text on the bill of an API, and on training."""

from sim.report.wording import bill_line, training_line


def test_the_line_names_both_costs_and_the_break_even():
    line = bill_line({"bill_usd": 10.0, "break_even_load": 0.27, "cost": {"usd": 2.7}})
    assert "$10 for the same traffic, the fleet $2.7;" in line
    assert "0.27 times the traffic" in line


def test_without_a_tariff_there_is_no_line():
    assert bill_line({"bill_usd": None, "cost": {"usd": 2.7}}) == ""


def test_training_is_compared_with_serving_if_its_tokens_are_known():
    figures = {"training_tokens": 15e12, "training_flops": 7.23e23, "output_tokens_of_equal_flops": 4.4e13}
    line = training_line({"training": figures})
    assert "on 1.5e+13 tokens took 7.23e+23 FLOPs; serving takes as many for 4.4e+13 output tokens" in line
    assert training_line({"training": None}) == ""
