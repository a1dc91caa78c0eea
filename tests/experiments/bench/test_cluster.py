"""The benchmark of clusters runs."""

import re

import pytest

from experiments.bench import cluster as bench_cluster

pytestmark = pytest.mark.slow


def test_it_prints_a_line_a_router_and_fleet(capsys):
    bench_cluster.main(
        ["2", "--routing", "random", "power_of_two", "--repeat=1", "--seconds=5", "--replica-seconds=5"]
    )
    heading, *lines = capsys.readouterr().out.splitlines()
    columns = re.findall(r"\S+(?: s\b| MiB)?", heading)
    assert [line.split()[:2] for line in lines] == [[routing, "2"] for routing in ("random", "power_of_two")]
    for line in lines:
        number = dict(zip(columns, line.split(), strict=True))
        total_us = 1e6 * float(number["CPU s"]) / int(number["requests"])
        assert float(number["us/request"]) == pytest.approx(total_us, rel=0.2)
        assert 0 < float(number["figures"]) < float(number["us/request"])
