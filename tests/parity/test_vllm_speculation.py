"""Speculation is scheduled as by vLLM's schedulers, for each method that they treat differently.

Compared in every step, beside what test_vllm_scheduler.py compares: draft tokens by request, with the
padding rows of new requests. Which draft tokens a proposer finds and which of them are right
is scripted, equally on both sides (drafts_script.py). Every other workload is run in leaps on our side; where
`ngram` and `suffix` find fewer tokens than asked, a leap has one step.

Differences that are on purpose, and kept out of the comparison:
- Settings with which vLLM stands still or fails an assertion of its own (speculative_workloads.py).
- vLLM's worker drafts nothing useful near max_model_len; its scheduler does not know.
- With asynchronous scheduling our core is told which draft tokens are right one step before vLLM's scheduler
  reads it. Until then it counts all draft tokens of the step in flight as computed, as vLLM does.
- vLLM 0.33 skips a waiting prompt that has no chunk without an end within the tokens that several modules of
  MTP read ahead. A request that was admitted before it and is preempted waits in front of it there, and here
  in the order of arrival: some workloads that are short of KV differ (`MAY_DIFFER`).
"""

import os
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs: `make parity` installs it")

from vllm.config import SpeculativeConfig

from tests.parity.lockstep import first_difference, shrunk
from tests.parity.our_speculation import OurSpeculativeEngine, proposer_of
from tests.parity.speculative_workloads import make_speculative_workload
from tests.parity.vllm_driver import RELEASE, as_installed
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


MAY_DIFFER = 0.15
"""Share of the workloads that may differ where vLLM 0.33 skips prompts."""


def skip_unless_known(mode):
    """Skips a mode whose method the installed vLLM does not have, as 0.33 has no Medusa."""
    method = mode.removeprefix("async+").split("+")[0]
    if method not in str(SpeculativeConfig.__annotations__["method"]):
        pytest.skip(f"this vLLM has no {method}")


@pytest.mark.parametrize("mode", MODES)
def test_every_step_with_drafts_is_decided_as_by_vllm(mode):
    skip_unless_known(mode)
    may_skip = RELEASE.skips_unfit and "modules" in mode
    num_allowed = int(MAY_DIFFER * NUM_WORKLOADS) if may_skip else 0
    for seed in range(NUM_WORKLOADS):
        leaps = seed % 2 == 1

        def difference(workload, leaps=leaps):
            return first_difference(
                workload, VllmSpeculativeEngine, make_ours=OurSpeculativeEngine, leaps=leaps
            )

        workload = as_installed(make_speculative_workload(mode, seed))
        found = difference(workload)
        if found is not None:
            num_allowed -= 1
        if found is not None and num_allowed < 0:
            small = shrunk(workload, lambda smaller: difference(smaller) is not None)
            lines = [small.settings, *small.arrivals, difference(small)]
            pytest.fail(f"workload {seed}, {leaps=}: {found}\nsmaller:\n" + "\n".join(map(str, lines)))


@pytest.mark.parametrize("mode", ["ngram", "draft_model+prefix", "async+eagle", "async+mtp+modules+prefix"])
def test_the_workloads_with_drafts_have_what_is_hard(mode):
    num_padded = num_cut = num_preempted = num_skipped = 0
    for seed in range(60):
        workload = as_installed(make_speculative_workload(mode, seed))
        decision_log = []
        first_difference(
            workload, VllmSpeculativeEngine, make_ours=OurSpeculativeEngine, decision_log=decision_log
        )
        most = workload.settings.speculation.num_speculative_tokens
        for step in decision_log:
            num_padded += sum(request_id in step.drafts for request_id in step.admitted)
            num_cut += sum(0 < num < most for num in step.drafts.values())
            num_preempted += len(step.preempted)
            num_skipped += sum(num == 1 for num in step.tokens.values())
    assert min(num_padded, num_preempted) > 10
    assert min(num_cut, num_skipped) > 100


@pytest.mark.parametrize(
    "change",
    [{"num_speculative_tokens": 5}, {"method": "eagle"}, {"method": "ngram"}, {"right_share": 0.5}],
    ids=str,
)
def test_an_engine_that_speculates_otherwise_is_found_out(change):
    def make_other(settings):
        return OurSpeculativeEngine(replace(settings, speculation=replace(settings.speculation, **change)))

    workloads = [as_installed(make_speculative_workload("draft_model+prefix", seed)) for seed in range(40)]
    found = [first_difference(one, VllmSpeculativeEngine, make_ours=make_other) for one in workloads]
    assert sum(difference is not None for difference in found) > 20


@pytest.mark.parametrize("mode", METHODS)
def test_the_rules_of_each_proposer_are_those_of_vllm(mode):
    skip_unless_known(mode)
    for seed in range(20):
        settings = as_installed(make_speculative_workload(mode, seed)).settings
        proposer = proposer_of(settings.speculation)
        rules, num_tokens = proposer.rules, proposer.num_speculative_tokens
        scheduler = VllmSpeculativeEngine(settings).scheduler
        assert scheduler.num_spec_tokens == num_tokens
        assert scheduler.num_lookahead_tokens == (num_tokens if rules.keeps_lookahead else 0)
        lookahead = max(rules.prefill_lookahead, 1)
        if RELEASE.hashes_ahead and settings.is_prefix_caching and rules.drops_last_block:
            assert scheduler.num_hash_lookahead_tokens == lookahead
        else:
            assert scheduler.use_eagle_block_drop == rules.drops_last_block
        # vLLM says 1 for methods whose prompt chunks may end anywhere.
        assert max(scheduler.num_prefill_lookahead, 1) == max(rules.prefill_lookahead, 1)
        slots = scheduler.vllm_config.speculative_config.max_num_new_slots_for_drafting
        assert slots == rules.num_input_slots


@pytest.mark.parametrize("mode", METHODS)
def test_a_proposer_overlaps_if_vllm_schedules_its_method_asynchronously(mode):
    skip_unless_known(mode)
    settings = replace(make_speculative_workload(mode, 0).settings, async_scheduling=True)
    if proposer_of(settings.speculation).rules.overlaps:
        VllmSpeculativeEngine(settings)
    else:
        with pytest.raises(ValueError, match=r"(?i)async scheduling is (only|not) supported"):
            VllmSpeculativeEngine(settings)
