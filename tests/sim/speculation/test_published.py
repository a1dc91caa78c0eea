"""The default acceptance of a proposer is its published one, by task."""

import pytest
import yaml

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.speculation.acceptance.iid import ASSUMED_RATE, PUBLISHED, TASKS, Iid, published_rate
from sim.speculation.acceptance.lengths import MeanLengths, rate_of_chain

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "workload=synthetic", "workload.num_requests=60", "slo=none")
HUMAN_EVAL = {"draft_model": 2.61, "ngram": 1.87, "medusa": 2.67, "lookahead": 1.77, "eagle": 4.29}
"""Mean accepted lengths of code, which Spec-Bench does not have."""


def build(*overrides):
    return build_run(SOURCE.compose([*SMALL, *overrides]))


def test_rates_are_those_with_which_the_measured_drafts_have_the_published_lengths():
    table = yaml.safe_load((CONFIG_DIR / "acceptance" / "spec_bench.yaml").read_text())
    lengths = {
        method: {("chat" if task == "multi_turn" else task): length for task, length in by_task.items()}
        | {"code": HUMAN_EVAL[method]}
        for method, by_task in table["lengths"].items()
    }
    trees = {method: tuple(map(tuple, paths)) for method, paths in table["trees"].items()}
    found = MeanLengths(
        lengths=lengths,
        num_draft_tokens=table["num_draft_tokens"],
        trees=trees,
        rank_decay=table["rank_decay"],
    )
    for method, rates in found._rates.items():
        expected = [rates[task] for task in TASKS]
        assert list(PUBLISHED[method].rates) == pytest.approx(expected, abs=6e-4)
    assert published_rate("eagle3", "chat") == pytest.approx(rate_of_chain(3.53, 7), abs=6e-4)


def test_every_proposer_has_its_source_or_an_assumed_rate():
    for published in PUBLISHED.values():
        assert published.source
        assert len(published.rates) == len(TASKS)
    assert published_rate("self_speculative", "chat") == ASSUMED_RATE


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        (("speculation=ngram",), 1.66),  # 1 + a + ... + a^4 with 0.405
        (("speculation=ngram", "acceptance.task=summarization"), 2.46),
        (("speculation=ngram", "acceptance.rate=0.8"), 3.36),
        (("speculation=suffix", "speculation.num_speculative_tokens=4"), 1.66),
        (("speculation=eagle3",), 2.71),  # three draft tokens with 0.743
    ],
)
def test_drafts_are_accepted_as_published(overrides, length):
    scenario, source = build(*overrides)
    found = scenario.run(source).summary["speculation"]["mean_accepted_length"]
    assert found == pytest.approx(length, rel=0.04)


@pytest.mark.parametrize(
    ("workload", "task"), [("rag", "rag"), ("agentic", "code"), ("conversation", "chat"), ("synthetic", None)]
)
def test_the_workload_says_its_task(workload, task):
    scenario, _ = build_run(SOURCE.compose(["speculation=ngram", f"workload={workload}"]))
    assert scenario.acceptance.task == task
    scenario, _ = build_run(
        SOURCE.compose(["speculation=ngram", f"workload={workload}", "acceptance.task=math"])
    )
    assert scenario.acceptance.task == "math"


def test_pools_have_the_task_of_the_workload_too():
    scenario, _ = build_run(
        SOURCE.compose(["workload=rag", "pools=two_gpus", "speculation=ngram", "batching=chunked"])
    )
    assert {pool.acceptance.task for pool in scenario.pools.values()} == {"rag"}


def test_the_summary_names_what_was_taken():
    scenario, source = build("speculation=ngram", "acceptance.task=code")
    (note,) = (n for n in scenario.run(source).summary["notes"] if n.startswith("acceptance="))
    assert "0.465, is published for speculation=ngram and task code (Vicuna-7B, greedy: EAGLE-2" in note
    scenario, source = build("speculation=self_speculative", "speculation.draft.num_layers=4")
    (note,) = (n for n in scenario.run(source).summary["notes"] if n.startswith("acceptance="))
    assert "0.8, is assumed, as no figures are published for speculation=self_speculative" in note


def test_a_task_that_is_not_known_or_has_no_effect_is_refused():
    with pytest.raises(ConfigError, match="task=poems: must be one of chat, code"):
        build("speculation=ngram", "acceptance.task=poems")
    with pytest.raises(ValueError, match="a task has no effect beside a rate"):
        Iid(rate=0.5, task="code")
