"""The candidates of a search: combinations, exclusions, spares, hours, and settings that are refused."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.app.launch_lines.written import vllm_launch
from experiments.capacity.answer import Day, day_of
from experiments.capacity.candidates import build_question
from experiments.capacity.probe import Probe, traffic
from experiments.capacity.search import CeilingTask, begin
from experiments.capacity.settings import CapacitySettings
from sim.settings.errors import ConfigError
from tests.experiments.capacity.questions import SCENARIO, SLO, SMALL, SOURCE, TINY, question_of
from tests.hwmodels.hf.published import LLAMA


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


def test_candidates_serve_the_longest_request_and_no_longer_one():
    """The longest of all seeds, rounded up to 256 tokens; a length of one's own is kept."""
    question = question_of("capacity.hardware=[l4]", "capacity.seeds=[0,1]", "capacity.quantisations=[]")
    scenario = question.candidates[0].scenario
    longest = max(
        arrival.request.prompt.num_tokens + arrival.num_output_tokens
        for seed in (0, 1)
        for arrival in traffic(scenario, seed, None)[0].listed
    )
    assert scenario.engine.max_model_len == -(-longest // 256) * 256
    assert f"--max-model-len {scenario.engine.max_model_len}" in vllm_launch(question.candidates[0]).command
    own = question_of("engine.max_model_len=2000", "capacity.hardware=[l4]", "capacity.quantisations=[]")
    assert own.candidates[0].scenario.engine.max_model_len == 2000


def test_a_candidate_whose_kv_memory_does_not_hold_the_longest_request_is_refused_in_vllms_words():
    """Llama-3.1-70B in fp8 leaves 1.3 GiB of KV, 4,288 tokens, on an H100; in bf16 two are needed."""
    question = question_of(
        "model=llama3_1_70b",
        "workload.lengths.prompt_tokens.value=6000",
        "workload.num_requests=20",
        "capacity.hardware=[h100_sxm]",
        "capacity.tensor_parallel_sizes=[1,2]",
        "capacity.quantisations=[fp8]",
    )
    assert [one.name for one in question.candidates] == ["h100_sxm TP2"]
    reason = question.refused[0].reason
    assert "to serve at least one request with the model's max seq len" in reason
    assert "larger than the available KV cache memory (1.31 GiB)" in reason
    assert "estimated maximum model length is 4288. Try increasing engine.gpu_memory_utilization" in reason


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


@pytest.mark.parametrize(
    ("quantisation", "names", "refused"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ["h100_sxm"], {}),
        (
            {"quant_method": "awq", "bits": 4},
            ["h100_sxm"],
            {"h100_sxm fp8": "the checkpoint is quantised already, by awq in int4_wo"},
        ),
        (None, ["h100_sxm", "h100_sxm fp8"], {}),
    ],
)
def test_a_checkpoint_that_is_quantised_already_has_its_own_format(tmp_path, quantisation, names, refused):
    config = LLAMA if quantisation is None else {**LLAMA, "quantization_config": quantisation}
    (tmp_path / "config.json").write_text(json.dumps(config))
    question = question_of(
        "model=hf",
        f"model.path={tmp_path}",
        "capacity.hardware=[h100_sxm]",
        "capacity.tensor_parallel_sizes=[]",
        "capacity.quantisations=[null,fp8]",
    )
    assert [one.name for one in question.candidates] == names
    assert {one.name for one in question.refused} == set(refused)
    for one in question.refused:
        assert refused[one.name] in one.reason


def test_a_format_may_have_an_engines_name():
    question = question_of(
        "model=llama3_1_8b",
        "capacity.hardware=[h100_sxm]",
        "capacity.tensor_parallel_sizes=[]",
        "capacity.quantisations=[null,awq_marlin]",
    )
    own, awq = question.candidates
    assert (own.scenario.model.weights, awq.scenario.model.weights) == (None, "int4_wo")
    command = vllm_launch(awq)
    assert "--quantization awq_marlin" in command.command
    assert "model.weights=awq_marlin: needs a checkpoint that is quantised so" in command.notes
