"""A waiting prompt whose cached prefix is evicted needs room for its first chunk only, also in leaps."""

from dataclasses import dataclass

import pytest

from policies.core.request import Prompt, Request, Segment
from sim import simulate
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.listed import ListedSource

PREFIX, OTHER, REST = 1, 2, 3


@dataclass(frozen=True)
class Given:
    """Requests as (arrival, (content id, tokens) of the prompt, output tokens)."""

    rows: tuple

    def source(self, *, seed, max_model_len):
        arrivals = []
        for request_id, (at_s, contents, num_output) in enumerate(self.rows):
            segments = tuple(Segment(*one) for one in contents)
            prompt = Prompt(sum(one.num_tokens for one in segments), segments)
            arrivals.append(Arrival(Request(request_id, at_s, prompt), num_output))
        return ListedSource(arrivals, notes=WorkloadNotes())


def requests(*, num_blocks, rest, leap):
    """Returns the requests of a run: 0 leaves a prefix, 1 evicts it while 2, which has it, waits."""
    rows = (
        (0.0, ((PREFIX, 95),), 1),
        (1.0, ((OTHER, 64),), 60),
        (1.02, ((PREFIX, 95), (REST, rest)), 3),
    )
    return simulate(
        workload=Given(rows),
        model="smollm2_135m",
        hardware="l4",
        slo=None,
        caching="radix",
        batching="chunked",
        batching__scheduler_reserve_full_isl=False,
        batching__max_num_batched_tokens=32,
        engine__num_kv_blocks=num_blocks,
        sim__leap=leap,
    ).requests


@pytest.mark.parametrize(("num_blocks", "rest"), [(167, 8), (172, 8)])
def test_a_prompt_is_admitted_as_soon_as_its_prefix_is_evicted(num_blocks, rest):
    """Its last tokens fit the budget beside the prefix, so nothing is left for later while it is cached."""
    leaped, stepped = (requests(num_blocks=num_blocks, rest=rest, leap=leap) for leap in (True, False))
    assert leaped.equals(stepped)
    assert 1.02 < stepped["scheduled_s"][2] < stepped["finished_s"][1], "admitted beside request 1"
