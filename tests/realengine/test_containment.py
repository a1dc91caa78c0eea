"""Errors about one request end that request; an engine that cannot go on refuses all work with one error."""

import asyncio
import gc
import random
import re
import warnings
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")

import torch

from policies.batching.chunked import Chunked
from policies.scheduling import Scheduling
from policies.scheduling.deadlines import EarliestDeadlineFirst
from policies.scheduling.priority import Priority
from policies.scheduling.virtual_token_counter import VirtualTokenCounter
from policies.user_code import PolicyError
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from tests.examples import examples
from tests.realengine.serving.async_scenarios import CONFIG, GREEDY, SETTINGS, last, prompts, run_scenario

torch.set_num_threads(1)

BAD_FIELDS = [
    ({"priority": "high"}, "priority='high': must be a whole number"),
    ({"priority": 1.5}, "priority=1.5: must be a whole number"),
    ({"priority": True}, "priority=True: must be a whole number"),
    ({"priority": 10**400}, "priority=1000"),
    ({"priority": None}, "priority=None: must be a whole number"),
    ({"tenant": [1]}, "tenant=[1]: must be a text"),
    ({"tenant": None}, "tenant=None: must be a text"),
    ({"lora": ["a"]}, "lora=['a']: must be the name of an adapter, or None"),
    ({"lora": "unknown"}, "adapter=unknown: must be null"),
    ({"cache_salt": 7}, "cache_salt=7: must be a text"),
]
LATER_FIELDS = [
    ({"deadline_s": "soon"}, "deadline_s='soon': must be a finite number of seconds, or None"),
    ({"deadline_s": float("nan")}, "deadline_s=nan: must be a finite number of seconds"),
    ({"arrival_s": float("inf")}, "arrival_s=inf: must be a finite number of seconds"),
]
POLICIES = [Priority(), Priority(aging_s=2.0), VirtualTokenCounter(), EarliestDeadlineFirst()]


def make(**more):
    return LLM(Architecture.from_hf(CONFIG), **(SETTINGS | more))


@pytest.fixture(scope="module")
def expected():
    return [output.outputs[0].token_ids for output in make().generate(prompts(6), GREEDY)]


@pytest.mark.parametrize("scheduling", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_field_of_a_wrong_type_ends_its_request_alone(scheduling, expected):
    async def scenario(llm):
        bad = [last(llm, prompts()[1], **fields) for fields, _ in BAD_FIELDS]
        asked = [last(llm, prompts()[0]), *bad, last(llm, prompts()[2])]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, *errors, other = run_scenario(scenario, scheduling=scheduling)
    for error, (_, message) in zip(errors, BAD_FIELDS, strict=True):
        assert type(error) is ValueError
        assert message in str(error)
    assert [output.outputs[0].token_ids for output in (first, other)] == [expected[0], expected[2]]


@pytest.mark.parametrize(("fields", "message"), LATER_FIELDS, ids=str)
def test_times_that_are_no_numbers_end_their_request_alone(fields, message, expected):
    engine = make(scheduling=EarliestDeadlineFirst()).engine
    answers = [engine.add(prompts()[i], GREEDY, **(fields if i == 1 else {})) for i in range(3)]
    engine.run()
    assert answers[1].error.startswith(message)
    assert [tuple(answers[i].outputs[0].tokens) for i in (0, 2)] == [expected[0], expected[2]]


class Fault(Exception):
    """The error of the policies below."""


@dataclass(slots=True)
class Faults:
    """Raises at random calls of the methods that it names."""

    seed: int
    share: float
    methods: frozenset[str]
    calls: Any = field(default_factory=random.Random)
    raised: Counter = field(default_factory=Counter)

    def __deepcopy__(self, memo):
        return self  # the engine copies its policies; the test reads what they have done

    def __post_init__(self):
        self.calls = random.Random(self.seed)

    def at(self, method):
        if method in self.methods and self.calls.random() < self.share:
            self.raised[method] += 1
            raise Fault(f"in {method}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyOrder(Scheduling):
    """First come, first served, with faults."""

    faults: Faults

    def rank(self, seq):
        self.faults.at("rank")
        return (seq.request.arrival_s,)

    def chunk_rank(self, seq):
        self.faults.at("chunk_rank")
        return (seq.request.arrival_s,)

    def before_step(self, view, step, now):
        self.faults.at("before_step")

    def on_commit(self, plan, num_iterations, now):
        self.faults.at("on_commit")

    def on_end(self, seq):
        self.faults.at("on_end")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyLengths:
    """Predicts one token, with faults."""

    needs_truth: ClassVar[bool] = False
    faults: Faults

    def predict(self, request, true_num_tokens):
        self.faults.at("predict")
        return 1

    def observe(self, request, num_tokens):
        self.faults.at("observe")


OF_ONE_REQUEST = frozenset({"rank", "chunk_rank", "on_end", "predict", "observe"})
OF_A_STEP = frozenset({"before_step", "on_commit"})


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    share=st.sampled_from([0.03, 0.2, 0.7]),
    methods=st.sets(st.sampled_from(sorted(OF_ONE_REQUEST)), min_size=1),
    overlap=st.booleans(),
    num_kv_blocks=st.sampled_from([6, 60]),
)
@examples(10, 25)
def test_errors_about_one_request_end_that_request_with_the_reason(
    seed, share, methods, overlap, num_kv_blocks, expected
):
    faults = Faults(seed, share, frozenset(methods))
    llm = make(
        scheduling=FaultyOrder(faults=faults),
        predictor=FaultyLengths(faults=faults),
        batching=Chunked(max_num_batched_tokens=16),
        overlap=overlap,
        num_kv_blocks=num_kv_blocks,
    )
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        outputs = llm.generate(prompts(6), GREEDY)
    assert all(output.finished for output in outputs)
    for output, tokens in zip(outputs, expected, strict=True):
        got = output.outputs[0].token_ids
        assert got == tokens[: len(got)]
        if output.error is None:
            assert got == tokens
        else:
            assert re.search(r"raised Fault: in (" + "|".join(methods) + ")", output.error)
            assert output.outputs[0].finish_reason in ("error", "stop", "length")
    num_failed = sum(output.error is not None for output in outputs)
    num_noted = sum("has ended already" in str(each.message) for each in noted)
    assert num_failed + num_noted <= sum(faults.raised.values())
    assert (num_failed + num_noted > 0) == (sum(faults.raised.values()) > 0)
    core = llm.engine.core
    assert (llm.engine.num_unfinished, core.num_unfinished, core.block_pool.num_used) == (0, 0, 0)
    core.check_integrity()
    faults.methods = frozenset()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts(6), GREEDY)] == expected


@given(seed=st.integers(0, 2**32), method=st.sampled_from(sorted(OF_A_STEP)), overlap=st.booleans())
@examples(8, 15)
def test_an_error_about_a_step_ends_all_requests_and_the_engine_says_so_from_then_on(
    seed, method, overlap, expected
):
    faults = Faults(seed, 0.2, frozenset({method}))
    engine = make(scheduling=FaultyOrder(faults=faults), overlap=overlap).engine
    answers = [engine.add(prompt, GREEDY) for prompt in prompts(6)]
    try:
        engine.run()
    except PolicyError as error:
        reason = str(error)
    else:
        assert not faults.raised
        return
    assert f"{method} raised Fault: in {method}" in reason
    assert all(answer.is_finished for answer in answers)
    assert not engine.num_unfinished
    for answer, tokens in zip(answers, expected, strict=True):
        got = tuple(answer.outputs[0].tokens)
        assert got == tokens[: len(got)]
        assert got == tokens or answer.error == reason
    later = engine.add(prompts(1)[0], GREEDY)
    assert later.error == f"the engine has failed: {reason}; create a new engine"
    assert engine.step() == []
    engine.abort(answers[0].request_id)


def test_a_policy_s_error_about_one_request_reaches_its_consumer_and_no_other(expected):
    @dataclass(frozen=True, kw_only=True, slots=True)
    class Picky(Scheduling):
        def rank(self, seq):
            if seq.request.tenant == "odd":
                raise Fault("an odd tenant")
            return (seq.request.arrival_s,)

    async def scenario(llm):
        asked = [last(llm, prompts()[0]), last(llm, prompts()[1], tenant="odd"), last(llm, prompts()[2])]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, error, other = run_scenario(scenario, scheduling=Picky())
    assert re.search(r"scheduling=Picky .*rank raised Fault: an odd tenant", str(error))
    assert [output.outputs[0].token_ids for output in (first, other)] == [expected[0], expected[2]]


def test_params_of_another_type_are_refused_and_the_engine_goes_on(expected):
    llm = make()
    with pytest.raises(ValueError, match=re.escape("params={'n': 1}: must be SamplingParams")):
        llm.engine.add([1], {"n": 1})
    assert llm.generate(prompts(1), GREEDY)[0].outputs[0].token_ids == expected[0]


def test_an_engine_that_is_forgotten_is_freed_at_once():
    """Ranks and memory end with the engine, without a run of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        engine = make().engine
        ended = weakref.ref(engine)
        del engine
        assert ended() is None
    finally:
        gc.enable()
