"""The benchmark of routers names every choice there is, and runs."""

import re

import pytest

from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.bench import routing as bench_routing
from experiments.bench.routing import READS

pytestmark = pytest.mark.slow


def test_every_choice_is_measured():
    assert set(READS) == {choice.name for choice in find_groups([CONFIG_DIR])["routing"]}


def test_it_prints_a_line_a_router(monkeypatch, capsys):
    monkeypatch.setattr(bench_routing, "FLEETS", (1, 2))
    bench_routing.main(["power_of_two", "slo_aware", "--repeat=1", "--conversations=5"])
    _, *lines = capsys.readouterr().out.splitlines()
    number = r" +\d+\.\d"
    assert len(lines) == 2
    for line, name in zip(lines, ("power_of_two", "slo_aware"), strict=True):
        assert re.fullmatch(rf"{name} ({number}{number}{number}\d){{2}}  {READS[name]}", line), line


def test_a_timed_router_is_the_router(monkeypatch):
    """A timed router receives first tokens and ends, as the router alone would."""
    calls = []

    class Listening:
        reads_caches = True

        def choose(self, request, replicas, now):
            return len(replicas) - 1

        def on_end(self, request, now):
            calls.append(request)

    timed = bench_routing.Timed(routing=Listening())
    assert timed.choose("request", [0, 0, 0], 0.0) == 2
    timed.on_end("request", 1.0)
    assert calls == ["request"]
    assert timed.reads_caches
    assert getattr(timed, "check", None) is None
    assert timed.num_choices == 1
    assert timed.seconds > 0
