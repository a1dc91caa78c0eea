"""The client's own cost is measured against a scripted server."""

import re

import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.bench import observe as bench_observe

pytestmark = pytest.mark.slow


def test_prints_a_line_for_each_rate(capsys):
    bench_observe.main(["--rate", "20", "40", "--chunks", "4", "--seconds", "0.5"])
    lines = capsys.readouterr().out.splitlines()
    form = re.compile(r"(\d+) requests/s, \d+ chunks, \d+ chunks/s: CPU time \d+ us per chunk")
    assert [found and found[1] for found in map(form.match, lines)] == ["20", "40"]
