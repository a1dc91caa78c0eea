"""The benchmark of prices runs and prints figures; what they are depends on the machine."""

import re

import pytest

from experiments.bench import pricing as bench_pricing

pytestmark = pytest.mark.slow


def test_prints_a_line_a_question(capsys):
    bench_pricing.main(["workload=poisson"], repeat=1)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "llama-3.1-8b on 1 x H100 SXM"
    assert [re.fullmatch(r" +\d+\.\d+ (us|ns/iteration) +(.+)", line)[2] for line in lines] == [
        "32 decodes",
        "a chunk of 512 tokens",
        "32 decodes and a chunk",
        "32 decodes with 4 draft tokens each",
        "1,000 at once: iterations of 1 to 255 decodes",
        "1,000 at once: iterations of 1 to 255 decodes with a chunk",
        "1,000 at once: a leap of 32 decodes",
        "1,000 at once: a leap of 32 decodes with 4 draft tokens each",
    ]
