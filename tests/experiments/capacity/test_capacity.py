"""windtunnel capacity: finds the cheapest fleet, its numbers are those of its runs, mistakes are reported."""

import json
import math
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.cli import main
from experiments.capacity import optuna_search, tables
from experiments.capacity.advice import Advice, advice_lines, closest
from experiments.capacity.brackets import Bracket
from experiments.capacity.candidates import build_candidates, build_question
from experiments.capacity.day import Day, day_of
from experiments.capacity.launch import sglang_launch, vllm_launch
from experiments.capacity.probe import Probe, Run, distinct_seeds, keeps, reseeded
from experiments.capacity.results import derived, pareto
from experiments.capacity.search import Ceiling, CeilingTask, Search, State, Status, begin
from experiments.capacity.settings import CapacitySettings
from sim.engine.interrupt import Interrupt
from sim.metrics.slo import Slo
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.variants import Variants

SOURCE = ConfigSource(config_name="capacity", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "workload=poisson", "workload.num_requests=120")
TINY = (
    *SMALL,
    "workload.arrivals.rate_per_s=60",
    "engine.max_num_seqs=8",
    "capacity.hardware=[l4,l40s]",
    "capacity.tensor_parallel_sizes=[1]",
    "capacity.quantisations=[]",
    "capacity.jobs=1",
    "hydra.run.dir=out",
)
SLO = Slo(name="toy", ttft_ms=500, tpot_ms=50)
SCENARIO = build_candidates(
    CapacitySettings(), Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), [*SMALL])
)[0][0]


def question_of(*overrides):
    given_all = [*SMALL, *overrides]
    return build_question(SOURCE.compose(given_all), SOURCE, given_all)


def run_with(share, *, cut=False, **figures):
    names = ("usd_per_million_output_tokens", "output_tokens_per_s", "goodput_per_s", "tpot_p50_s", "watts")
    names += ("bill_usd_per_hour",)
    return Run(
        share=share,
        is_cut=cut,
        rate_per_s=1.0,
        term_shares={"ttft": share, "tpot": 1.0},
        term_limits_s={"ttft": 0.4, "tpot": 0.04},
        loosened_s={"ttft": 0.4, "tpot": 0.04},
        figures=dict.fromkeys(names, 1.0) | figures,
        waits={},
        batch=(1.0, 10.0),
        notes=(),
    )


class Fleet(SimpleNamespace):
    """A candidate that needs a given number of replicas, whatever is simulated."""

    def deployed(self, num_up, settings):
        return num_up + settings.spare


def toy_search(fleets, top, monkeypatch, spare=0):
    """Searches toy fleets, each given as (price, replicas needed, bound on the replicas)."""
    asked = CapacitySettings(top=top, jobs=1, spare=spare, max_replicas=40)
    question = SimpleNamespace(settings=asked, slo=SLO)
    states, bounds = [], {}
    for i, (price, needed, bound) in enumerate(fleets):
        fleet = Fleet(name=f"{i:03}", usd_per_hour=price, needed=needed, scenario=SCENARIO.scenario)
        bracket = Bracket(fails=0, most=40 - spare)
        states.append(State(candidate=fleet, index=i, bracket=bracket, target=0.9))
        bounds[fleet.name] = bound
    search = Search(question=question, load=1.0, seeds=asked.seeds, states=states)
    runs = []

    def run(probe):
        fleet = next(s.candidate for s in states if probe.name.startswith(f"{s.candidate.name},"))
        runs.append((fleet.name, probe.replicas))
        missing = fleet.needed - probe.replicas
        shares = (1.0, 1.0, 1.0) if missing <= 0 else (0.95, 0.5, 0.8) if missing <= 2 else (0.3, 0.5, 0.8)
        return [run_with(shares[seed]) for seed in probe.seeds]

    def bound(task):
        return Ceiling(share=1.0, term_shares={}, term_limits_s={}, replicas={"tokens": bounds[task.name]})

    monkeypatch.setattr("experiments.capacity.search.Probe.run", run)
    monkeypatch.setattr("experiments.capacity.search.CeilingTask.run", bound)
    search.exhaust(Interrupt(), lambda done, total: None)
    return search, runs


@given(st.integers(1, 60), st.integers(1, 60), st.integers(60, 64))
def test_bisection_finds_the_least_number_in_few_tries(needed, bound, most):
    bound, tries = min(bound, needed), []
    bracket = Bracket(fails=bound - 1, most=most)
    while (number := bracket.next()) is not None:
        tries.append(number)
        bracket.learn(number, number >= needed)
    assert bracket.is_found
    assert bracket.keeps == needed
    assert len(tries) == len(set(tries)) <= 2 + 2 * math.ceil(math.log2(needed - bound + 2))
    assert tries[0] == bound  # so that a bound that is exact costs one try


def test_a_search_that_would_need_more_than_allowed_says_so():
    bracket = Bracket(fails=0, most=6)
    while (number := bracket.next()) is not None:
        bracket.learn(number, False)
    assert (bracket.is_beyond, bracket.fails, bracket.keeps) == (True, 6, None)


prices = st.lists(
    st.tuples(st.sampled_from([1.0, 1.5, 2.7, 4.0, 10.0]), st.integers(1, 50), st.integers(0, 12)),
    min_size=1,
    max_size=15,
)


def known_of(search):
    return [(s.ceiling, s.runs, s.bracket, search.status(s)) for s in search.states]


@given(prices, st.integers(1, 4), st.integers(2, 5), st.randoms(use_true_random=False))
def test_what_is_found_does_not_depend_on_processes_and_their_pace(fleets, top, jobs, random):
    """Some numbers of replicas fail with the second seed of three only."""
    given_fleets = [(price, needed, max(1, needed - slack)) for price, needed, slack in fleets]

    def some_at_a_time(work, next_task, jobs_asked, interrupt):
        running, index = {}, 0
        while True:
            while len(running) < jobs and (task := next_task()) is not None:
                running[index], index = task, index + 1
            if not running:
                return
            done = random.choice(sorted(running))
            yield done, work(running.pop(done))

    with pytest.MonkeyPatch.context() as monkeypatch:
        in_turn, runs = toy_search(given_fleets, top, monkeypatch)
        assert len(runs) == sum(len(found) for s in in_turn.states for found in s.runs.values())
        monkeypatch.setattr("experiments.capacity.search.as_asked", some_at_a_time)
        found, _ = toy_search(given_fleets, top, monkeypatch)
    assert known_of(found) == known_of(in_turn)


@given(prices, st.integers(1, 4), st.integers(0, 2))
def test_the_ranking_is_that_of_all_candidates_and_no_run_costs_more(fleets, top, spare):
    given_fleets = [(price, needed, max(1, needed - slack)) for price, needed, slack in fleets]
    with pytest.MonkeyPatch.context() as monkeypatch:
        search, runs = toy_search(given_fleets, top, monkeypatch, spare)
    costs = sorted(
        (price * (needed + spare), f"{i:03}")
        for i, (price, needed, _) in enumerate(given_fleets)
        if needed + spare <= 40
    )
    found = [(search.least_cost(s), s.candidate.name) for s in search.ranked()]
    assert found[:top] == costs[:top]
    if len(costs) >= top:
        last = costs[top - 1][0]
        least = {f"{i:03}": price * (bound + spare) for i, (price, _, bound) in enumerate(given_fleets)}
        assert all(least[name] <= last for name, _ in runs)
    assert {search.status(s) for s in search.states} <= {*Status} - {Status.open}


def test_every_seed_must_keep_the_slo():
    state = State(
        candidate=None,
        index=0,
        bracket=Bracket(fails=0, most=9),
        target=0.9,
    )
    question = SimpleNamespace(slo=SLO)
    state.learn(1, [run_with(0.95), run_with(0.89)], 2, question)
    assert (state.bracket.fails, state.bracket.keeps) == (1, None)
    state.learn(2, [run_with(0.95)], 2, question)  # the second was never run
    assert state.bracket.keeps is None
    state.learn(3, [run_with(0.95), run_with(0.9)], 2, question)
    assert state.bracket.keeps == 3
    assert not keeps(run_with(0.95, cut=True), SLO)


def test_figures_follow_from_cost_devices_and_power():
    runs = [run_with(0.9, goodput_per_s=5.0, output_tokens_per_s=1000.0, tpot_p50_s=0.02, watts=500.0)]
    found = derived(runs, usd_per_hour=10.0, num_devices=4)
    assert found["good_requests_per_usd"] == [1800.0]
    assert found["goodput_per_s_and_gpu"] == [1.25]
    assert found["good_requests_per_kwh"] == [36_000.0]
    assert found["tokens_per_s_and_gpu"] == [250.0]
    assert found["tokens_per_s_and_user"] == [50.0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_the_front_is_not_dominated_and_dominates_all_others(points):
    front = {points[i] for i in pareto(points)}
    for x, y in points:
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)
        assert ((x, y) in front) == (not beaten)


def test_axes_are_choices_or_overrides_and_candidates_all_combinations():
    asked = CapacitySettings(
        hardware=("l4", "h100_sxm"),
        tensor_parallel_sizes=(1, 2),
        engines=("vllm", "few: engine=vllm engine.max_num_seqs=4"),
        quantisations=(None, "fp8", "model.kv_cache_dtype=fp8"),
        more=(("batching=chunked", "eager: engine.cuda_graphs.enabled=false"),),
    )
    assert asked.num_candidates == 48
    axes = asked.axes
    assert [entry.label for entry in axes["engine"]] == ["vllm", "few"]
    assert axes["engine"][1].overrides == ("engine=vllm", "engine.max_num_seqs=4")
    assert [entry.overrides[0] for entry in axes["weights"]] == [
        "model.weights=null",
        "model.weights=fp8",
        "model.kv_cache_dtype=fp8",
    ]
    assert axes["TP"][1] == ("TP2", ("tensor_parallel_size=2",), "tensor_parallel_sizes[1]")
    assert axes["more 0"][1].label == "eager"
    assert CapacitySettings(growth_per_month=0.1, months=(0, 12)).loads[12] == pytest.approx(1.1**12)


def test_candidates_that_cannot_be_are_kept_with_their_reason():
    question = question_of(
        "model=llama3_1_70b",
        "capacity.hardware=[l4,h200_sxm]",
        "capacity.tensor_parallel_sizes=[1,3]",
        "capacity.quantisations=[fp8]",
    )
    assert [one.name for one in question.candidates] == ["h200_sxm TP1"]
    reasons = {one.name: one.reason for one in question.refused}
    assert "GiB more than" in reasons["l4 TP1"]
    assert "tensor_parallel_size=3" in reasons["h200_sxm TP3"]


def test_spares_are_added_for_a_number_and_for_availability():
    asked = CapacitySettings(spare=1, availability=0.999, mtbf_hours=100, mttr_hours=2)
    assert SCENARIO.deployed(3, CapacitySettings(spare=2)) == 5
    assert SCENARIO.deployed(8, asked) == 10  # up 98 % of the time each: 8 of 10 for 99.91 %
    assert SCENARIO.deployed(8, replace(asked, availability=0.5)) == 9


def test_spares_for_availability_stay_within_the_most_that_may_be_rented():
    asked = CapacitySettings(availability=0.999, mtbf_hours=100, mttr_hours=2, max_replicas=10)
    assert SCENARIO.most_up(asked) == 8  # two spares for eight
    assert SCENARIO.deployed(9, asked) > 10
    assert SCENARIO.most_up(CapacitySettings(spare=3, max_replicas=10)) == 7
    search = begin(SimpleNamespace(settings=asked, slo=SLO, candidates=[SCENARIO]), 1.0, (0,))
    assert search.states[0].bracket.most == 8


def test_a_router_that_compares_two_gets_two():
    question = question_of("routing=power_of_two", "capacity.hardware=[l4]", "capacity.quantisations=[]")
    one = question.candidates[0]
    assert (one.least_up, one.scenario.replicas) == (2, 2)
    bracket = begin(question, 1.0, (0,)).states[0].bracket
    assert bracket.next() == 2


def test_a_context_that_shortens_requests_rules_a_candidate_out():
    question = question_of(
        "capacity.hardware=[l4]",
        "capacity.tensor_parallel_sizes=[]",
        "capacity.quantisations=[]",
        "capacity.engines=['whole: engine=vllm','short: engine=vllm engine.max_model_len=200']",
    )
    assert [one.name for one in question.candidates] == ["l4 whole"]
    assert question.refused[0].name == "l4 short"
    assert question.refused[0].reason.startswith("engine.max_model_len=200: truncates ")


def test_seeds_that_change_nothing_are_run_once(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,20,5\n3,10,9\n")
    overrides = ["workload=plain_csv", f"workload.path={trace}", "~workload.num_requests"]
    base = [o for o in SMALL if not o.startswith("workload")] + overrides[:2]
    variants = Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), base)
    trace_only = build_candidates(CapacitySettings(), variants)[0][0].scenario
    drawn = build_candidates(CapacitySettings(more=(("routing=random",),)), variants)[0][0].scenario
    assert distinct_seeds([trace_only], CapacitySettings()) == (0,)
    assert distinct_seeds([drawn], CapacitySettings()) == (0, 1, 2)
    assert distinct_seeds([trace_only, drawn], CapacitySettings()) == (0, 1, 2)
    assert distinct_seeds([SCENARIO.scenario], CapacitySettings()) == (0, 1, 2)
    assert reseeded(drawn, 2).routing.seed == 2
    assert reseeded(replace(drawn, routing=replace(drawn.routing, seed=7)), 2).routing.seed == 7


def test_hours_get_replicas_in_proportion_to_their_tokens():
    scenario = replace(
        SCENARIO.scenario,
        workload=replace(
            SCENARIO.scenario.workload,
            num_requests=None,
            duration_s=4 * 3600.0,
            arrivals=Steps(),
        ),
    )
    day = day_of(replace(SCENARIO, scenario=scenario), 4, CapacitySettings(spare=1), 0)
    assert day.replicas == [2, 3, 5, 2]
    assert day.saved_share == pytest.approx(1 - 12 / 20)
    assert "at:'02:00',replicas:5" in day.overrides
    assert Day(replicas=[2, 2], fixed=2).saved_share == 0
    planned = replace(SCENARIO, scenario=scenario)
    assert day_of(planned, 1, CapacitySettings(), 0) is None  # nothing to save
    assert day_of(planned, 4, CapacitySettings(window_s=1800), 0) is None
    cut = replace(scenario, workload=replace(scenario.workload, arrivals=Steps(until_s=3.5 * 3600)))
    assert day_of(replace(SCENARIO, scenario=cut), 4, CapacitySettings(spare=1), 0).replicas == [2, 3, 5]


class Steps:
    """One request a minute in the first hour, two in the second, four in the third, one in the fourth."""

    def __init__(self, until_s=math.inf):
        self.until_s = until_s

    def times_s(self, rng, *, num_requests, duration_s):
        each = [h * 3600 + np.arange(n * 60) * 60 / n for h, n in enumerate((1, 2, 4, 1))]
        at_s = np.concatenate(each)
        return at_s[at_s < self.until_s]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["slo=none"], "^slo=none: capacity is planned for an SLO"),
        (["replicas=3"], "^replicas=3: capacity varies it; leave it at 1, see capacity.max_replicas"),
        (["load=2"], "^load=2: capacity varies it"),
        (["scaling=concurrency"], "^scaling: must be none"),
        (["failures=crash"], "^failures: must be none"),
        (["layout=auto"], "^layout: must be as_set"),
        (["capacity.hardware=[l4,l40x]"], r"^capacity.hardware\[1\]: hardware=l40x: .*nearest: l40s"),
        (["capacity.hardware=[l4,l4]"], r"^capacity.hardware=\[l4, l4\]: must all be different"),
        (["capacity.tensor_parallel_sizes=[0]"], r"^capacity.tensor_parallel_sizes\[0\]=0: must be >= 1"),
        (["capacity.quantisations=[fp9]"], r"^capacity.quantisations\[0\]: .*fp9.*must be one of"),
        (["capacity.engines=['a: engine']"], r"^capacity.engines\[0\]=engine: must be key=value"),
        (["capacity.more=[['engine.max_num_seq=2']]"], r"^capacity.more\[0\]\[0\]: .*max_num_seqs"),
        (
            ["capacity.more=[['replicas=1','replicas=3']]"],
            r"^capacity.more\[0\]\[1\]: replicas=3: capacity varies it",
        ),
        (["capacity.engines=['a: load=2']"], r"^capacity.engines\[0\]: load=2: capacity varies it"),
        (["capacity.more=[['failures=crash']]"], r"^capacity.more\[0\]\[0\]: failures: must be none"),
        (["capacity.more=[['seed=5']]"], r"^capacity.more\[0\]\[0\]: seed=5: all .* the same seed, 0;"),
        (["capacity.more=[['output_scale=0.1']]"], r"output_scale=0.1: all candidates must have the same"),
        (["capacity.engines=['a: engine=vllm','a: engine=sglang']"],
         r"^capacity.engines=\[a, a\]: must have different names"),
        (["capacity.engines=['engine.max_model_len=100']"], r"=100: truncates .* of seed 0 \(0 with"),
        (["capacity.availability=0.9999999999999", "capacity.max_replicas=2"], "availability=.*: needs"),
        (["routing=power_of_two", "routing.num_choices=65"], "num_choices=65: must be <= 64"),
        (["capacity.headroom=-1"], "^capacity.headroom=-1: must be a finite share"),
        (["capacity.spare=64"], "^capacity.spare=64: must be < max_replicas=64"),
        (["capacity.availability=1"], "^capacity.availability=1: must be between 0 and 1"),
        (["capacity.growth_per_month=-1"], "^capacity.growth_per_month=-1: must be"),
        (["capacity.months=[0,6]"], r"^capacity.months=\[0, 6\]: are all the same without growth"),
        (["capacity.months=[6,0]", "capacity.growth_per_month=1"], r"^capacity.months=\[6, 0\]: must be"),
        (["capacity.window_s=0"], "^capacity.window_s=0: must be >= 1 s"),
        (["capacity.seeds=[]"], r"^capacity.seeds=\[\]: must contain at least one seed"),
        (["capacity.top=0"], "^capacity.top=0: must be >= 1"),
        (["capacity.study=a.log"], "^capacity.study=a.log: needs search=optuna"),
        (["workload=closed_loop", "~workload.num_requests"], "^workload: .*open loop"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_key_value_and_rule(overrides, message):
    small = [o for o in SMALL if not any(p.startswith("workload=") for p in overrides) or "workload" not in o]
    few = ["capacity.hardware=[l4]", "capacity.tensor_parallel_sizes=[1]", "capacity.quantisations=[]"]
    asked = [*small, *few, *overrides]
    asked = [o for o in asked if not o.startswith("~")]
    with pytest.raises(ConfigError, match=message):
        build_question(SOURCE.compose(asked), SOURCE, asked)


def candidate_with(*overrides):
    variants = Variants(
        ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), ["model=llama3_1_8b", *overrides]
    )
    return build_candidates(CapacitySettings(), variants)[0][0]


def test_launch_commands_have_a_flag_for_what_is_set_and_a_note_for_what_has_none():
    plain = candidate_with(
        "tensor_parallel_size=2",
        "pipeline_parallel_size=2",
        "model.weights=fp8",
        "model.kv_cache_dtype=fp8",
        "engine.max_num_seqs=77",
        "engine.max_num_batched_tokens=3000",
        "engine.max_model_len=9000",
        "caching=paged",
        "batching.enable_chunked_prefill=false",
    )
    vllm, sglang = vllm_launch(plain), sglang_launch(plain)
    words = shlex.split(vllm.command.replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    given_flags = dict(zip(words, [*words[1:], ""], strict=True))
    assert {name: given_flags.get(name) for name in (
        "--tensor-parallel-size", "--pipeline-parallel-size", "--max-num-seqs", "--max-num-batched-tokens",
        "--max-model-len", "--quantization", "--kv-cache-dtype", "--gpu-memory-utilization", "--block-size",
    )} == {
        "--tensor-parallel-size": "2", "--pipeline-parallel-size": "2", "--max-num-seqs": "77",
        "--max-num-batched-tokens": "3000", "--max-model-len": "9000", "--quantization": "fp8",
        "--kv-cache-dtype": "fp8", "--gpu-memory-utilization": "0.9", "--block-size": "16",
    }  # fmt: skip
    assert "--dtype" not in vllm.command
    half = candidate_with("model.dtype=fp16")
    assert "--dtype float16" in vllm_launch(half).command
    assert "--dtype float16" in sglang_launch(half).command
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--async-scheduling"} < {*words}
    assert vllm.notes == []
    words = shlex.split(sglang.command.replace("\\\n", " "))
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "meta-llama/Llama-3.1-8B"]
    given_flags = dict(zip(words, [*words[1:], ""], strict=True))
    assert given_flags["--max-running-requests"] == "77"
    assert given_flags["--max-prefill-tokens"] == "3000"
    assert given_flags["--kv-cache-dtype"] == "fp8_e4m3"
    assert "--disable-radix-cache" in words
    other = candidate_with("engine=sglang", "scheduling=shortest_job_first", "prediction=oracle",
                           "model.weights=int4_wo")  # fmt: skip
    notes = "\n".join(vllm_launch(other).notes)
    assert "batching=sglang: vLLM has no flag" in notes
    assert "scheduling=shortest_job_first: vLLM has no flag" in notes
    assert "caching=radix" in notes
    assert "model.weights=int4_wo: replace the model's name by that of a checkpoint" in notes
    assert "prediction=" in notes
    pruned = vllm_launch(candidate_with("model/transform=prune_depth"))
    assert "meta-llama" not in pruned.command
    assert any("no published weights" in note for note in pruned.notes)


@pytest.mark.slow
def test_a_search_writes_its_answer_its_candidates_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["capacity.seeds=[0,1]", "capacity.headroom=0.3", "capacity.spare=1"]
    asked += ["capacity.growth_per_month=0.5", "capacity.months=[0,3]"]
    assert main(["capacity", *TINY, *asked]) == 0
    printed = capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert printed.splitlines()[0] == summary["answer"][0]
    best = summary["ranked"][0]
    assert f"{best['replicas']} x {best['candidate']}" in summary["answer"][0]
    assert best["replicas"] == best["replicas_up"] + 1
    assert best["usd_per_hour"] == min(row["usd_per_hour"] for row in summary["ranked"])
    assert best["share_at_margin"]["mean"] >= 0.9
    first, later = summary["stages"]
    assert (first["load"], later["load"]) == (1.0, 1.5**3)
    assert later["usd_per_hour"] >= first["usd_per_hour"]
    assert later["grown_replicas"] is None or later["grown_replicas"] >= first["grown_replicas"]
    table = pd.read_parquet(tmp_path / "out/candidates.parquet")
    assert sorted(table.candidate) == ["l4 TP1", "l40s TP1"] or sorted(table.candidate) == ["l4", "l40s"]
    assert set(table.status) <= {status.name for status in Status}
    # place, given these rates, rents as many of them.
    name = f"{best['candidate'].split()[0]}"
    rate = best["kept_output_tokens_per_s_and_replica"]
    assert rate * best["replicas_up"] == pytest.approx(1.3 * best["figures"]["output_tokens_per_s"]["mean"])
    demand = rate * best["replicas_up"] * 0.999
    asked = [f"models=[{{name:smollm2_135m,demand:{demand}}}]", f"gpus=[{{name:{name},count:9}}]"]
    asked += ["objective=cost", "tensor_parallel_sizes=[1]", "measured=[out/summary.json]"]
    assert main(["place", *asked, "engine.max_num_seqs=8"]) == 0
    placed = json.loads((tmp_path / "placement.json").read_text())
    assert placed["gpus"][name] == best["replicas_up"]
    assert main(["place", *asked[:-1], "measured=[out/config.yaml]"]) == 2
    assert "measured[0]=out/config.yaml: is damaged or cut short" in capsys.readouterr().err
    assert "Page with the Pareto front: out/capacity.html" in printed
    assert any(line.startswith("Prices of a GPU for an hour: L4 $0.80 (AWS on") for line in summary["answer"])
    page = (tmp_path / "out/capacity.html").read_text()
    for heading in ("Answer", "Pareto front: speed per user against", "Forecast", "vLLM, each of"):
        assert heading in page
    # What is reported is true: simulate agrees at this number, and not with one less.
    own = [o for o in TINY if not o.startswith(("capacity", "hydra"))] + best["overrides"]
    share = {}
    for up in {best["replicas_up"], max(1, best["replicas_up"] - 1)}:
        overrides = [*own, f"replicas={up}", "load=1.3", "output.report=false", "output.tables=false"]
        for seed in (0, 1):
            assert main(["simulate", *overrides, f"seed={seed}", f"hydra.run.dir=run{up}{seed}"]) == 0
        share[up] = [
            json.loads((tmp_path / f"run{up}{seed}/summary.json").read_text())["goodput"]["share"]
            for seed in (0, 1)
        ]
    assert min(share[best["replicas_up"]]) >= 0.9
    if best["replicas_up"] > 1:
        assert min(share[best["replicas_up"] - 1]) < 0.9


@pytest.mark.slow
def test_without_an_answer_it_says_what_fails_and_what_would_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = [o for o in TINY if not o.startswith("capacity.hardware")]
    asked += ["capacity.hardware=[t4]", "capacity.seeds=[0]", "capacity.max_replicas=2", "slo.tpot_ms=2.5"]
    assert main(["capacity", *asked]) == 3
    lines = capsys.readouterr().out.splitlines()
    advice = json.loads((tmp_path / "out/summary.json").read_text())["advice"]
    assert lines[0].startswith("No candidate meets the SLO. The closest is t4")
    assert any(line.startswith("TPOT: ") and "the limit of 2.50 ms" in line for line in lines)
    assert advice["missed_terms"]["tpot"]["needed_s"] > 0.0025
    assert any(line.startswith("Another GPU: ") for line in lines)
    looser = advice["looser_limits_s"].get("tpot")
    if looser is not None:  # true: with that limit it is kept
        own = [o for o in TINY if not o.startswith(("capacity", "hydra"))]
        overrides = [*own, "hardware=t4", f"replicas={advice['replicas']}", f"slo.tpot_ms={1e3 * looser}"]
        assert main(["simulate", *overrides, "hydra.run.dir=again"]) == 0
        assert json.loads((tmp_path / "again/summary.json").read_text())["goodput"]["attained"]


def test_advice_in_words():
    found = Advice(
        best="t4",
        replicas=2,
        share=0.4,
        terms={"tpot": (0.05, 0.08), "ttft": (0.5, math.inf)},
        looser={"tpot": 0.0812},
        load=0.25,
        rate_per_s=8.0,
        other=("l4", 3, 2.4),
        misses_idle=False,
    )
    assert advice_lines(found, SLO) == [
        "No candidate meets the SLO. The closest is t4 with 2 replicas: SLO attainment 40 %, target 90 %.",
        "TPOT: 90 % of the requests are within 80.0 ms, 1.60 times the limit of 50.0 ms.",
        "TTFT: exists for fewer than 90 % of the requests.",
        "A looser limit: slo.tpot_ms=82 would be met.",
        "A lower rate: it meets the SLO at 2.00 requests/s (0.25 times the traffic of 8.00 requests/s).",
        "Another GPU: 3 x l4 meet the SLO for $2.40/hour.",
    ]
    hopeless = advice_lines(replace(found, looser={}, load=None, misses_idle=True, other=None), SLO)
    assert hopeless[3:] == [
        "A looser limit: relaxing one limit alone is not enough.",
        "A lower rate: does not help, as the limit is missed even on idle replicas.",
        "Another GPU: no GPU of configs/hardware meets the SLO with these settings.",
    ]
    slow = advice_lines(replace(found, replicas=1, looser={"e2e": 1234.5674}, load=None), SLO, " in month 12")
    assert slow[0].startswith(
        "No candidate meets the SLO in month 12. The closest is t4 with 1 replica: SLO attainment 40 %"
    )
    assert slow[3] == "A looser limit: slo.e2e_ms=1234568 would be met."
    assert slow[4] == (
        "A lower rate: none down to 0.000244 requests/s (3.1e-05 times the traffic) meets the SLO; "
        "lower rates were not tried."
    )


def test_the_closest_is_found_by_runs_to_the_end_not_by_bounds(monkeypatch):
    true_shares = {"idle": 0.2, "cut": 0.7, "worse": 0.6}
    states = []
    for i, (name, ceiling) in enumerate({"idle": 0.89, "cut": 1.0, "worse": 1.0}.items()):
        fleet = Fleet(name=name, usd_per_hour=1.0, least_up=1, scenario=SCENARIO.scenario)
        state = State(candidate=fleet, index=i, bracket=Bracket(fails=0, most=4), target=0.9)
        state.ceiling = Ceiling(share=ceiling, term_shares={}, term_limits_s={}, replicas={"tokens": 1})
        states.append(state)
    for state in states[1:]:
        state.runs[4] = [run_with(0.88 if state.index == 1 else 0.885, cut=True)]
    question = SimpleNamespace(settings=CapacitySettings(jobs=1), slo=SLO)
    search = Search(question=question, load=1.0, seeds=(0,), states=states)

    def run(probe):
        assert not probe.stop
        return [run_with(true_shares[probe.name.split(",")[0]])]

    monkeypatch.setattr("experiments.capacity.advice.Probe.run", run)
    best, probe, runs = closest(search, Interrupt())
    assert (best.candidate.name, probe.replicas, runs[0].share) == ("cut", 4, 0.7)


@pytest.mark.slow
def test_optuna_goes_on_from_its_study_and_finds_what_the_whole_search_finds(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    asked = [*TINY, "capacity.seeds=[0]", "capacity.report=false"]
    assert main(["capacity", *asked]) == 0
    whole = json.loads((tmp_path / "out/summary.json").read_text())
    digest = optuna_search.digest_of(build_question(SOURCE.compose(asked), SOURCE, asked))
    more = ["capacity.search=optuna", "capacity.trials=1", "capacity.study=study.log"]
    for trials in (1, 2, 2):  # the second call simulates the other candidate, the third none
        assert main(["capacity", *asked, *more, "overwrite=true"]) == 0
        study = optuna_search._study(
            optuna_search.load_optuna(),
            "study.log",
            0,
            1.0,
            digest,
        )
        assert sum("runs" in trial.user_attrs for trial in study.trials) == trials
    found = json.loads((tmp_path / "out/summary.json").read_text())
    assert found["ranked"][0]["candidate"] == whole["ranked"][0]["candidate"]
    assert found["ranked"][0]["usd_per_hour"] == whole["ranked"][0]["usd_per_hour"]
    assert main(["capacity", *asked, *more, "capacity.headroom=0.1"]) == 2


def test_what_a_study_keeps_of_a_run_and_which_question_it_is_of():
    run = run_with(0.9, watts=math.inf)
    assert optuna_search._run_of(json.loads(json.dumps(run._asdict()))) == run
    few = ["capacity.hardware=[l4]", "capacity.tensor_parallel_sizes=[1]", "capacity.quantisations=[]"]
    digests = [
        optuna_search.digest_of(question_of(*few, *own))
        for own in ([], ["capacity.trials=3"], ["capacity.headroom=0.1"], ["slo.tpot_ms=31"])
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_headline_names_growth_and_spans_have_units_that_fit():
    settings = CapacitySettings(months=(12,), growth_per_month=0.08)
    search = SimpleNamespace(load=1.0, states=[], status=None)
    found = SimpleNamespace(search=search, question=SimpleNamespace(settings=settings, refused=()))
    assert tables._growth(found) == ""
    search.load = settings.loads[12]
    assert tables._growth(found) == " in month 12 (2.52 times the traffic)"
    assert [tables._span(s) for s in (60, 570, 3600, 36000)] == ["60.0 s", "9.5 min", "60 min", "10.0 h"]


def test_a_study_that_is_none_and_a_missing_library_are_reported(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    (tmp_path / "bad.log").write_text("no journal\n")
    with pytest.raises(ConfigError, match=r"^capacity.study=.*cannot be resumed"):
        optuna_search._study(optuna_search.load_optuna(), str(tmp_path / "bad.log"), 0)
    file = str(tmp_path / "study.log")
    first = optuna_search._study(optuna_search.load_optuna(), file, 0, 1.0, "a")
    assert first.user_attrs["question"] == "a"
    optuna_search._study(optuna_search.load_optuna(), file, 0, 2.0, "a")  # another load of the same
    with pytest.raises(ConfigError, match=r"study\.log: belongs to a search with other overrides"):
        optuna_search._study(optuna_search.load_optuna(), file, 0, 1.0, "b")
    with pytest.raises(ConfigError, match="no folder"):
        optuna_search._study(optuna_search.load_optuna(), str(tmp_path / "none/bad.log"), 0)

    def missing(name):
        raise ModuleNotFoundError("optuna", name="optuna")

    monkeypatch.setattr("experiments.capacity.optuna_search.importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'windtunnel\[optuna\]'"):
        optuna_search.load_optuna()


AGENTS = (
    *(one for one in TINY if not one.startswith("workload")),
    "workload=agentic",
    "workload.num_tasks=12",
    "workload.system_prompt_tokens.value=300",
    "slo=tasks",
)


def test_tasks_are_planned_by_their_slo_and_simulated_whole():
    given_all = [*AGENTS, "slo.task_ms=60000"]
    found = build_question(SOURCE.compose(given_all), SOURCE, given_all)
    scenario = found.candidates[0].scenario
    one = Probe(name="", scenario=scenario, replicas=1, load=1.0, seeds=(0,), window_s=None).run()[0]
    assert one.term_shares.keys() == one.term_limits_s.keys() == {"task"}
    assert one.share == pytest.approx(scenario.run().summary["goodput"]["share"])
    bound = CeilingTask(name="", scenario=scenario, settings=found.settings, load=1.0, seed=0).run()
    assert (bound.share, bound.replicas) == (1.0, {"tokens": 1})


def test_a_window_of_sessions_is_refused():
    given_all = [*AGENTS, "capacity.window_s=10"]
    with pytest.raises(ConfigError, match=r"capacity.window_s=10: sessions, of which the last begins at"):
        build_question(SOURCE.compose(given_all), SOURCE, given_all)


def test_a_fleet_is_compared_with_the_bill_of_an_api():
    """A fleet of $2 an hour, and a bill of $4 for the same traffic: cheaper from half of it on."""
    assert derived([run_with(1.0, bill_usd_per_hour=4.0)], 2.0, 1)["break_even_load"] == [0.5]
    assert math.isnan(derived([run_with(1.0, bill_usd_per_hour=math.nan)], 2.0, 1)["break_even_load"][0])
    scenario = question_of(*TINY, "tariff=batch", "slo.ttft_ms=5000").candidates[0].scenario
    one = Probe(
        name="", scenario=scenario, replicas=1, load=1.0, seeds=(0,), window_s=None, stop=False
    ).run()[0]
    summary = scenario.run().summary
    assert one.figures["bill_usd_per_hour"] == 3600 * summary["bill_usd"] / summary["simulated_s"]
    found = derived([one], scenario.price_usd_per_hour, 1)["break_even_load"]
    assert found == pytest.approx([summary["break_even_load"]])
