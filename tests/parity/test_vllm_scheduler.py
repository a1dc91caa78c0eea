"""Our core decides as vLLM's schedulers do, the synchronous one and the asynchronous one, step by step.

Compared in every step: tokens by request; admitted requests and the tokens that the cache had of each;
preempted requests; free blocks while the step runs and after it; finished requests and why. Every other
workload is run in leaps on our side.

With asynchronous scheduling vLLM plans a step before it reads the tokens of the step before: the driver keeps
that order, and our core with `Ends.one_step_late` is told of a sampled stop token one step later.

Differences that are on purpose, and kept out of the comparison:
- A step of vLLM's that computes nothing, because it preempted all requests, counts with the next one.
- vLLM's watermark is a share of all blocks, its null block among them; the driver gives it the same number.
- Of sequences with equal priority and equal arrival time, to the last bit, vLLM preempts the one admitted
  first, the oldest one, ours the largest id, which is what vLLM does if it reads its clock once for each
  request. Arrival times are distinct here; a test below has equal ones.
- vLLM offers a block to others when it hands it out, and still does so when it preempts its owner within the
  same step, so that it is never computed (the last test); ours takes the offer back.
- Generated tokens are found from the step in which they fill a block by prompts that quote them and by equal
  answers, as in vLLM: the modes with "shared". In the others, prompts that quote an answer come after its
  end. The real engine learns the content of an answer at its end: while two requests happen to generate
  equal tokens, it shares their prompts only.
- vLLM counts the steps of prefill_schedule_interval from the last time when all data parallel ranks were
  idle, and those that compute nothing; the driver counts as our policy does, steps that compute something.
- A request that has ended and is preempted by the step planned before its tokens are read does not count as
  preempted.
- Chunks of attention are whole blocks here. If they are not, and a prefix ends in an earlier chunk than the
  lookup began with, vLLM gives the sequence null blocks in place of cached ones that its next token attends
  to.
- vLLM's scheduler does not check that a request can ever fit; ours rejects it. max_model_len fits here.
"""

import os
from dataclasses import fields, replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM for CPUs: `make parity` installs it")

from vllm.config import SchedulerConfig

from policies.core.request import Prompt
from tests.parity.lockstep import (
    Arrival,
    OurEngine,
    Settings,
    Workload,
    first_difference,
    shrunk,
)
from tests.parity.vllm_driver import VllmEngine, as_installed
from tests.parity.vllm_options import SCHEDULER
from tests.parity.workloads import make_workload

pytestmark = pytest.mark.parity

NUM_WORKLOADS = int(os.environ.get("PARITY_WORKLOADS", "1000"))
SYNC_MODES = (
    "fcfs",
    "priority",
    "unchunked",
    "threshold",
    "priority+threshold",
    "threshold+adaptive",
    "unchunked+threshold",
    "watermark",
    "priority+watermark",
    "prefix",
    "prefix+priority",
    "prefix+unchunked",
    "prefix+threshold",
    "prefix+priority+threshold",
    "prefix+watermark",
    "prefix+shared",
    "prefix+shared+threshold",
    "prefix+shared+watermark",
    "scheduled",
    "prefix+active",
    "first_chunk",
    "first_chunk+priority",
    "prefix+first_chunk",
    "prefix+first_chunk+threshold",
    "prefix+first_chunk+watermark",
    "paced",
    "prefix+paced",
    "prefix+paced+priority",
    "prefix+paced+threshold",
    "prefix+paced+first_chunk",
)
GROUP_MODES = (
    "windows",
    "windows+priority+threshold",
    "prefix+windows",
    "prefix+windows+priority",
    "prefix+windows+threshold",
    "prefix+windows+first_chunk",
    "prefix+windows+watermark",
    "prefix+chunks",
)
MODES = (*SYNC_MODES, *GROUP_MODES)
MODES += tuple(f"async+{mode}" for mode in MODES)


@pytest.mark.parametrize("mode", MODES)
def test_every_step_is_decided_as_by_vllm(mode):
    for seed in range(NUM_WORKLOADS):
        leaps = seed % 2 == 1

        def difference(workload, leaps=leaps):
            return first_difference(workload, VllmEngine, leaps=leaps)

        workload = as_installed(make_workload(mode, seed))
        found = difference(workload)
        if found is not None:
            small = shrunk(workload, lambda smaller: difference(smaller) is not None)
            lines = [small.settings, *small.arrivals, difference(small)]
            pytest.fail(f"workload {seed}, {leaps=}: {found}\nsmaller:\n" + "\n".join(map(str, lines)))


@pytest.mark.parametrize("mode", MODES)
def test_the_workloads_have_what_is_hard(mode):
    decision_log = []
    for seed in range(60):
        first_difference(as_installed(make_workload(mode, seed)), VllmEngine, decision_log=decision_log)
    few = (
        5 if mode.removeprefix("async+") in GROUP_MODES else 1
    )  # their pools have room for every group, so memory is tight less often
    assert few * sum(bool(step.preempted) for step in decision_log) > 10
    assert sum(len(step.admitted) > 1 for step in decision_log) > 10
    assert few * sum(step.num_free_planned == 0 for step in decision_log) > 100
    num_prompts = [sum(num_tokens > 1 for num_tokens in step.tokens.values()) for step in decision_log]
    assert sum(num > 1 for num in num_prompts) > 30
    reasons = [reason for step in decision_log for reason in step.finished.values()]
    assert min(reasons.count("stop"), reasons.count("length")) > 100
    hits = [num_cached for step in decision_log for num_cached in step.admitted.values() if num_cached]
    assert (len(hits) > 100) == ("prefix" in mode)


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"num_blocks": 1},
        {"is_priority": True},
        {"is_prefix_caching": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_engine_with_one_other_setting_is_found_out(change):
    """The comparison can fail: numbers are changed by one, on a second engine of ours."""

    class Other(OurEngine):
        def __init__(self, settings):
            changes = {
                name: getattr(settings, name) + value if type(value) is int else value
                for name, value in change.items()
            }
            super().__init__(replace(settings, **changes))

        def step(self):
            return self.steps(self.core.now, 1)[0]

    found = [first_difference(as_installed(make_workload("prefix", seed)), Other) for seed in range(100)]
    assert sum(difference is not None for difference in found) > 5


def test_every_option_of_the_scheduler_has_a_counterpart_or_a_reason():
    """Fails for a newer vLLM with the names of its new and dropped options."""
    names = {field.name for field in fields(SchedulerConfig)}
    assert not names - SCHEDULER.keys(), "new options: look at what they decide"
    assert not SCHEDULER.keys() - names, "dropped options: remove them from vllm_options.py"


def test_of_equal_priorities_and_arrival_times_vllm_preempts_the_one_admitted_first():
    """vLLM's clock gives every request its own arrival time; of equal times its `max` takes the first.

    Two prompts of 4 tokens and a third fill all blocks. The last of them is preempted here, as it is by vLLM
    if it arrives a microsecond after the others.
    """
    settings = Settings(
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_model_len=12,
        num_blocks=6,
        block_size=2,
        is_priority=True,
    )
    arrivals = tuple(
        Arrival(request_id=i, step=0, prompt=Prompt(4), num_output_tokens=4, priority=1) for i in range(3)
    )

    class AtOneTime(VllmEngine):
        def add(self, arrival, arrival_s):
            super().add(arrival, 0.0)

    decision_log = []
    workload = Workload(settings, arrivals)
    assert first_difference(workload, VllmEngine, decision_log=decision_log) is None
    assert next(step.preempted for step in decision_log if step.preempted) == [2]
    decision_log.clear()
    assert first_difference(workload, AtOneTime, decision_log=decision_log) is not None
    assert next(step.preempted for step in decision_log if step.preempted) == [0]


def test_vllm_finds_blocks_that_were_never_computed_and_we_do_not():
    """A bug of vLLM 0.32: the victim was given its chunk earlier in the very step that preempts it.

    Request 0 has 24 of 31 tokens computed when request 1, which is more urgent and behind it in the running
    queue, takes its blocks. vLLM then finds 30 of them in the cache.
    """
    settings = Settings(
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=41,
        num_blocks=20,
        block_size=2,
        long_prefill_token_threshold=8,
        is_priority=True,
        is_prefix_caching=True,
    )
    arrivals = (
        Arrival(request_id=0, step=0, prompt=Prompt(31), num_output_tokens=1, priority=5),
        Arrival(request_id=1, step=1, prompt=Prompt(9), num_output_tokens=1, priority=0),
    )
    decision_log = []
    difference = first_difference(Workload(settings, arrivals), VllmEngine, decision_log=decision_log)
    assert difference.startswith("step 3")
    assert "ours   Step(tokens={0: 7}, admitted={0: 24}" in difference
    assert decision_log[-1].admitted == {0: 30}
    assert sum(step.tokens.get(0, 0) for step in decision_log[:-1]) == 24
