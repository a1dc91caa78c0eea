"""The answer names what limits the winner, its prices, changed number formats and every exclusion."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.capacity import first_limit as growth
from experiments.capacity import tables
from experiments.capacity.candidates import TOO_LARGE, Refused, build_candidates
from experiments.capacity.first_limit import FirstLimit, GrowthTask, first_limit
from experiments.capacity.precision import Checkpoints, Unchanged, cheapest_unchanged, precision_sentence
from experiments.capacity.probe import Run
from experiments.capacity.results import Limit, by_reason, effort, excluded, exclusion_lines
from experiments.capacity.search import Bracket, Ceiling, Search, State, Status
from experiments.capacity.settings import CapacitySettings
from experiments.capacity.tables import price_sentence
from experiments.study.steady_state import Lack
from sim.engine.clock import Interrupt
from sim.metrics.slo import Slo

SIMULATE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SLO = Slo(ttft_ms=500, tpot_ms=50, attainment_target=0.95)


def candidates_of(*overrides, **axes):
    asked = CapacitySettings(**({"hardware": ("h100_sxm",), "quantisations": (None, "fp8")} | axes))
    base = ["model=smollm2_135m", "workload=poisson", *overrides]
    return build_candidates(asked, Variants(SIMULATE, base))[0]


OWN, FP8 = candidates_of()


def run_with(share):
    return Run(
        share=share,
        is_cut=False,
        rate_per_s=1.0,
        term_shares={},
        term_limits_s={},
        loosened_s={},
        figures={},
        waits={},
        batch=(1.0, 10.0),
        notes=(),
    )


def state_of(candidate, index, num_up=None, ceiling=None):
    bracket = Bracket(fails=0 if num_up is None else num_up - 1, most=8)
    state = State(candidate=candidate, index=index, bracket=bracket, target=0.95, ceiling=ceiling)
    if num_up is not None:
        state.bracket.learn(num_up, True)
        state.runs[num_up] = [run_with(1.0)]
    return state


def search_of(*states, top=1, method="exhaustive"):
    settings = CapacitySettings(top=top, jobs=1, max_replicas=8, search=method)
    question = SimpleNamespace(
        settings=settings, slo=SLO, refused=(), base=("model=smollm2_135m",), source=SIMULATE
    )
    return Search(question=question, load=1.0, seeds=(0,), states=list(states))


def changed(candidate, *base):
    return Checkpoints(SimpleNamespace(source=SIMULATE, base=base)).changed(candidate)


def test_formats_that_differ_from_the_checkpoints_are_named():
    assert changed(OWN, "model=smollm2_135m") == ()
    assert changed(FP8, "model=smollm2_135m", "model.weights=fp8") == ("fp8 weights",)
    both = replace(FP8.scenario.model, kv_cache_dtype="fp8")
    both = replace(FP8, scenario=replace(FP8.scenario, model=both))
    assert changed(both, "model=smollm2_135m") == ("fp8 weights", "fp8 KV cache")
    experts = candidates_of("model=gpt_oss_20b", quantisations=(None,))[0]  # mxfp4 in the checkpoint
    assert changed(experts, "model=gpt_oss_20b") == ()


def test_a_winner_in_fp8_is_beside_the_cheapest_with_the_checkpoints_format():
    search = search_of(state_of(FP8, 0, num_up=1), state_of(OWN, 1, num_up=2), top=2)
    found = cheapest_unchanged(search, Interrupt())
    assert found is not None
    assert precision_sentence(found, 2.7) == (
        "fp8 weights change the model's outputs, so check their quality; cheapest with the "
        "checkpoint's bf16: 2 x h100_sxm for $5.40/hour, 100 % more."
    )
    assert cheapest_unchanged(search_of(state_of(OWN, 0, num_up=1)), Interrupt()) is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"best": None, "candidates": 0}, "no candidate has the checkpoint's bf16; to compare, add null to"),
        ({"best": None}, "no candidate with the checkpoint's bf16 meets the SLO."),
        ({"best": None, "is_searched": False}, "the checkpoint's bf16 was not complete."),
        ({"best": ("a", 1, 1.0)}, "1 x a for $1.00/hour, the same cost."),
    ],
)
def test_what_is_not_known_of_the_checkpoints_format_is_said(changes, text):
    given = {"changed": ("fp8 weights",), "own": "bf16", "candidates": 2, "best": None, "is_searched": True}
    assert text in precision_sentence(Unchanged(**given | changes), 1.0)


@pytest.mark.parametrize(("fails_at", "load"), [(1.5, 1.5), (5.0, 5.0), (float("inf"), 2.0**14)])
def test_the_load_of_the_least_fleet_is_raised_until_it_fails(fails_at, load, monkeypatch):
    state = state_of(OWN, 0, num_up=1)

    def run(probe):
        assert probe.load > 1
        return [run_with(0.99 if probe.load < fails_at else 0.5)]

    monkeypatch.setattr("experiments.capacity.first_limit.Probe.run", run)
    limit = Limit("tpot", "memory bandwidth", 0.5)
    monkeypatch.setattr(growth, "limit_of_run", lambda run, state: limit)
    search = search_of(state)
    probe = replace(search.probe(state, 1), scenario=replace(OWN.scenario, slo=SLO))
    found, failing = GrowthTask(name="toy", probe=probe, max_requests=1000).run()
    assert load / 1.1 <= found <= load
    assert (failing is None) is (fails_at == float("inf"))
    monkeypatch.setattr(growth.GrowthTask, "run", lambda task: (found, failing))
    assert first_limit(search, state, Interrupt()) == FirstLimit(
        load=found, limit=None if failing is None else limit
    )
    assert first_limit(search, state_of(OWN, 0, num_up=2), Interrupt()) is None  # one fewer has failed


def test_a_window_that_shrinks_to_a_burst_is_made_longer_or_gives_a_lower_bound(monkeypatch):
    state, asked = state_of(OWN, 0, num_up=1), []

    def run(probe):
        """Simulates a toy that meets the SLO up to 5 times the traffic, which takes 100 requests each."""
        number = probe.num_requests or 30
        asked.append((probe.load, number))
        lack = Lack("its traffic is short", 100 * probe.load / number) if number < 100 * probe.load else None
        return [run_with(0.99 if probe.load < 5 or lack else 0.5)._replace(lack=lack, num_requests=number)]

    monkeypatch.setattr("experiments.capacity.first_limit.Probe.run", run)
    search = search_of(state)
    probe = replace(search.probe(state, 1), scenario=replace(OWN.scenario, slo=SLO))
    found, failing = GrowthTask(name="toy", probe=probe, max_requests=10_000).run()
    assert 5 / 1.1 <= found <= 5
    assert failing.lack is None
    found, failing = GrowthTask(name="toy", probe=probe, max_requests=300).run()
    assert 3 / 1.1 <= found <= 3
    assert failing.lack is not None
    assert max(number for _, number in asked if number <= 300) == 300
    monkeypatch.setattr(growth.GrowthTask, "run", lambda task: (found, failing))
    first = first_limit(search, state, Interrupt())
    assert first == FirstLimit(load=found, limit=None, lack="its traffic is short")
    assert "the SLO is met up to at least " in tables._limits(answer_with(None, first))[0]
    assert (
        "the traffic is too short to show more: its traffic is short"
        in tables._limits(answer_with(None, first))[0]
    )


def test_on_equal_cost_the_checkpoints_own_formats_win_whatever_the_order_of_the_lists():
    for top in (1, 2):
        search = search_of(state_of(FP8, 0, num_up=1), state_of(OWN, 1, num_up=1), top=top)
        assert search.ranked()[0].candidate is OWN
    cheaper = search_of(state_of(FP8, 0, num_up=1), state_of(OWN, 1, num_up=2), top=2)
    assert cheaper.ranked()[0].candidate is FP8


def answer_with(limit, first, num_up=1):
    best = SimpleNamespace(limit=limit, num_up=num_up)
    question = SimpleNamespace(settings=CapacitySettings())
    return SimpleNamespace(ranked=[best], first_limit=first, question=question)


def test_what_limits_the_winner_is_said_with_and_without_a_smaller_fleet():
    limit = Limit("ttft", "queueing for KV memory", 0.713)
    assert tables._limits(answer_with(limit, None, 3)) == [
        "With one replica fewer TTFT fails first (queueing for KV memory; 71.3 % of the measured requests "
        "meet it)."
    ]
    assert tables._limits(answer_with(None, FirstLimit(load=2.6, limit=limit))) == [
        "One replica is the minimum, and the SLO is met up to 2.60 times the traffic; beyond that TTFT fails "
        "first (queueing for KV memory)."
    ]
    assert tables._limits(answer_with(None, FirstLimit(load=2.0, limit=None)))[0].endswith(
        "; more was not tried."
    )
    assert tables._limits(answer_with(None, None)) == []


def test_the_tables_percentile_is_that_of_the_target():
    def labels(**slo):
        scenario = replace(OWN.scenario, slo=Slo(**slo))
        return tables._percentiles(SimpleNamespace(candidate=replace(OWN, scenario=scenario)))

    assert labels(ttft_ms=1, tpot_ms=1, attainment_target=0.95) == {"ttft": "TTFT p95", "tpot": "TPOT p95"}
    assert labels(e2e_ms=1, attainment_target=0.999) == {"e2e": "E2E p99.9"}
    assert labels(ttft_ms=1, attainment_target=1) == {"ttft": "TTFT max"}


def test_prices_come_with_their_source_and_date():
    text = price_sentence([OWN, FP8], [])
    assert (
        text.count("H100 SXM $2.70 (on-demand list price at GPU clouds, order of magnitude, early 2026)") == 1
    )
    own = "hardware.price_usd_per_hour=1.9"
    cheaper = candidates_of(own, quantisations=())
    assert "H100 SXM $1.90 (set by hardware.price_usd_per_hour)" in price_sentence(cheaper, [own])
    quoted = candidates_of(hardware=(f"mine: hardware=h100_sxm {own}",), quantisations=())
    assert [one.name for one in quoted] == ["mine"]
    assert "H100 SXM $1.90 (set by" in price_sentence(quoted, [])


def test_every_candidate_is_counted_once_and_exclusions_have_reasons():
    idle = Ceiling(
        share=0.2,
        term_shares={"ttft": 0.9, "tpot": 0.2},
        term_limits_s={"ttft": 0.1, "tpot": 0.07},
        replicas={"tokens": 1},
    )
    named = [replace(OWN, name=name) for name in ("best", "slow", "slower", "large", "dear")]
    states = [
        state_of(named[0], 0, num_up=1),
        state_of(named[1], 1, ceiling=idle),
        state_of(named[2], 2, ceiling=idle),
        state_of(named[3], 3, ceiling=replace(idle, share=1.0, replicas={"tokens": 20})),
        state_of(named[4], 4),
    ]
    states[3].bracket.fails = 8
    search = search_of(*states)
    search.question.refused = (Refused(name="huge", parts={}, reason="needs 3 GiB more", kind=TOO_LARGE),)
    out = excluded(search.question, search)
    assert {reason: len(own) for reason, own in by_reason(out).items()} == {
        "TPOT is missed even on an idle replica": 2,
        TOO_LARGE: 1,
        "more than capacity.max_replicas=8 would be needed": 1,
    }
    assert effort(search.question, search) == (
        "6 candidates: 1 meets the SLO, 2 excluded (TPOT is missed even on an idle replica), 1 excluded (the "
        "model does not fit in memory), 1 excluded (more than capacity.max_replicas=8 would be needed), 1 "
        "neither simulated nor ranked (costs at least as much as the last ranked one); 1 run of 1 candidate."
    )
    lines = exclusion_lines(out)
    assert lines[0].startswith(
        "2 excluded, TPOT is missed even on an idle replica: slow, slower. For example, "
    )
    assert lines[1] == "1 excluded, the model does not fit in memory: huge: needs 3 GiB more"
    assert search.status(states[4]) is Status.never_reached
