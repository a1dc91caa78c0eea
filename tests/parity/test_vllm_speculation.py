"""Speculation is scheduled as by vLLM's schedulers, for each method that they treat differently."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs: `make parity` installs it")

from tests.parity.speculation import make_speculative_workload, proposer_of
from tests.parity.vllm_speculation_driver import VllmSpeculativeEngine

pytestmark = pytest.mark.parity

NUM_WORKLOADS = int(os.environ.get("PARITY_WORKLOADS", "1000"))
METHODS = ("ngram", "suffix", "medusa", "draft_model", "eagle", "eagle3", "mtp", "mtp+modules")


@pytest.mark.parametrize("mode", METHODS)
def test_the_rules_of_each_proposer_are_those_of_vllm(mode):
    for seed in range(20):
        settings = make_speculative_workload(mode, seed).settings
        proposer = proposer_of(settings.speculation)
        rules, num_tokens = proposer.rules, proposer.num_speculative_tokens
        scheduler = VllmSpeculativeEngine(settings).scheduler
        assert scheduler.num_spec_tokens == num_tokens
        assert scheduler.num_lookahead_tokens == (num_tokens if rules.keeps_lookahead else 0)
        assert scheduler.use_eagle_block_drop == rules.drops_last_block
        # vLLM says 1 for methods whose prompt chunks may end anywhere.
        assert max(scheduler.num_prefill_lookahead, 1) == max(rules.prefill_lookahead, 1)
        slots = scheduler.vllm_config.speculative_config.max_num_new_slots_for_drafting
        assert slots == rules.num_input_slots


@pytest.mark.parametrize("mode", METHODS)
def test_a_proposer_overlaps_if_vllm_schedules_its_method_asynchronously(mode):
    settings = replace(make_speculative_workload(mode, 0).settings, async_scheduling=True)
    if proposer_of(settings.speculation).rules.overlaps:
        VllmSpeculativeEngine(settings)
    else:
        with pytest.raises(ValueError, match="async scheduling is only supported"):
            VllmSpeculativeEngine(settings)
