"""Speculation is scheduled as by vLLM's schedulers, for each method that they treat differently."""

import os
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs: `make parity` installs it")

from tests.parity.lockstep import first_difference, shrunk
from tests.parity.our_speculation import OurSpeculativeEngine, proposer_of
from tests.parity.speculative_workloads import make_speculative_workload
from tests.parity.vllm_speculation_driver import VllmSpeculativeEngine

pytestmark = pytest.mark.parity

NUM_WORKLOADS = int(os.environ.get("PARITY_WORKLOADS", "1000"))
METHODS = ("ngram", "suffix", "medusa", "draft_model", "eagle", "eagle3", "mtp", "mtp+modules")
SYNC_ONLY_MODES = (
    "ngram",
    "ngram+priority",
    "ngram+unchunked",
    "ngram+threshold",
    "ngram+prefix",
    "ngram+prefix+shared",
    "ngram+by_batch_size",
    "suffix",
    "suffix+prefix+watermark",
    "medusa",
    "medusa+scheduled",
    "medusa+prefix+priority",
    "medusa+prefix+paced",
)
BOTH_MODES = (
    "draft_model",
    "draft_model+priority",
    "draft_model+unchunked",
    "draft_model+scheduled",
    "draft_model+threshold+adaptive",
    "draft_model+by_batch_size",
    "draft_model+prefix",
    "draft_model+prefix+shared",
    "draft_model+prefix+priority+threshold",
    "draft_model+prefix+watermark",
    "draft_model+prefix+first_chunk",
    "eagle",
    "eagle+watermark",
    "eagle+prefix",
    "eagle+prefix+shared",
    "eagle+prefix+priority",
    "eagle+prefix+unchunked",
    "eagle+prefix+active",
    "eagle+prefix+by_batch_size",
    "eagle3+priority+by_batch_size",
    "eagle3+prefix+first_chunk",
    "eagle3+prefix+paced",
    "mtp+first_chunk",
    "mtp+prefix+threshold",
    "mtp+modules",
    "mtp+modules+threshold",
    "mtp+modules+prefix",
    "mtp+modules+prefix+shared",
    "mtp+modules+prefix+priority",
    "mtp+modules+prefix+by_batch_size",
)
MODES = (*SYNC_ONLY_MODES, *BOTH_MODES, *(f"async+{mode}" for mode in BOTH_MODES))


@pytest.mark.parametrize("mode", MODES)
def test_every_step_with_drafts_is_decided_as_by_vllm(mode):
    for seed in range(NUM_WORKLOADS):
        leaps = seed % 2 == 1

        def difference(workload, leaps=leaps):
            return first_difference(
                workload, VllmSpeculativeEngine, make_ours=OurSpeculativeEngine, leaps=leaps
            )

        workload = make_speculative_workload(mode, seed)
        found = difference(workload)
        if found is not None:
            small = shrunk(workload, lambda smaller: difference(smaller) is not None)
            lines = [small.settings, *small.arrivals, difference(small)]
            pytest.fail(f"workload {seed}, {leaps=}: {found}\nsmaller:\n" + "\n".join(map(str, lines)))


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
