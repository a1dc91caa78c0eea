"""The conformance suite: shipped policies pass, each kind of broken promise is caught and described."""

import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from experiments.conformance import admission_promises, draft_promises, promises
from experiments.conformance.claims import PROMISES, BrokenPromise, claims_by_name, claims_of
from experiments.conformance.days import Day
from experiments.conformance.families import FAMILIES, family_of
from experiments.conformance.renamed import NEW_CLAIMS
from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.words import in_words
from experiments.conformance.worlds import Ask, Traffic, World
from policies.adapters.fixed_slots import FixedSlots
from policies.admission import Refusal
from policies.admission.none import AdmitAll
from policies.admission.queue_bound import QueueBound
from policies.admission.tenant_quotas import TenantQuotas
from policies.admission.token_bucket import TokenBucket
from policies.batching.chunked import Chunked
from policies.batching.prefill_only import PrefillOnly
from policies.caching.paged import Paged
from policies.caching.pool import BlockPool
from policies.prediction import LengthPredictor
from policies.routing.round_robin import RoundRobin
from policies.scheduling import Scheduling
from policies.scheduling.fcfs import Fcfs
from policies.speculation.fixed import Fixed
from policies.user_code.failure import PolicyError
from sim.settings.config_groups import CONFIG_DIR
from tests.experiments.conformance.kept import num_kept

ROOT = Path(__file__).resolve().parents[3]


def shipped():
    """Returns the classes that the configs of all families name, once each."""
    files = [file for family in FAMILIES for file in sorted((CONFIG_DIR / family.name).glob("*.yaml"))]
    targets = dict.fromkeys(OmegaConf.load(file).get("_target_") for file in files)
    return [target for target in targets if target]


RUN_ELSEWHERE = ("batching", "scheduling", "caching", "routing")
"""Families of which the random worlds of tests/sim/ draw every policy, for most of the same promises."""


@pytest.mark.parametrize("target", [t for t in shipped() if t.split(".")[1] not in RUN_ELSEWHERE])
def test_shipped_policies_keep_their_promises(target):
    claims = claims_of(get_class(target)())
    assert {claim.name: num_kept(claim, 2) for claim in claims} == {claim.name: 2 for claim in claims}


@pytest.mark.slow
@pytest.mark.parametrize("target", shipped())
def test_shipped_policies_keep_their_promises_in_many_worlds(target):
    claims = claims_of(get_class(target)())
    assert {claim.name: num_kept(claim, 20) for claim in claims} == {claim.name: 20 for claim in claims}


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Decodes, continues prompts, admits in an order: the common part of the broken policies below."""

    max_num_batched_tokens: int = 64

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in self.order(list(view.waiting)):
            if not step.admit(seq, step.tokens_left):
                break

    def order(self, waiting):
        return waiting


class Cheating(Filling):
    def order(self, waiting):
        return sorted(waiting, key=lambda seq: (seq._end_known, seq.request_id))


class Dicing(Filling):
    def order(self, waiting):
        np.random.shuffle(waiting)  # noqa: NPY002
        return waiting


class Looking(Filling):
    """Reads the wall clock."""

    def order(self, waiting):
        return sorted(waiting, key=lambda seq: hash((time.perf_counter_ns() // 100, seq.request_id)))


class Forgetful(Filling):
    """Promises a horizon, although it counts the steps."""

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens)
        if view.num_iterations % 3 == 2 and view.num_decoding > 1:
            step.decode(view.decoding[0])
        else:
            super().fill(view, step, now)
        step.repeat()


class Overconfident(Filling):
    """Declares that all decodes go on, and preempts one now and then."""

    max_unasked_decodes = 64

    def fill(self, view, step, now):
        if view.num_iterations % 4 == 3 and view.decoding:
            step.preempt(view.decoding[-1])
        super().fill(view, step, now)


class Disorderly(Filling):
    """Declares that it admits in order, and admits the last that came first."""

    max_unasked_decodes = 0
    fills_in_order = True

    def fill(self, view, step, now):
        step.budget(16)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in reversed(list(view.waiting)):
            step.admit(seq, step.tokens_left)


class Greedy(Filling):
    def fill(self, view, step, now):
        super().fill(view, replace_budget(step), now)


def replace_budget(step):
    """Returns the step with a budget that does not bind."""
    step.budget(10**6)
    return Unbudgeted(step)


class Unbudgeted:
    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)

    def budget(self, max_num_tokens):
        """Ignores the budget."""


class Starving(Filling):
    """Serves no prompt above 20 tokens."""

    def fill(self, view, step, now):
        super().fill(view, step, now)
        step.wait_until(float("inf"))

    def order(self, waiting):
        return [seq for seq in waiting if seq.num_uncomputed <= 20]


class Leaking(Paged):
    """Frees one block too few."""

    def pool(self, memory):
        pool = LeakingPool(memory.num_blocks, self.block_size)
        return pool


class LeakingPool(BlockPool):
    def release(self, seq, num_tokens, num_planned=0):
        super().release(seq, num_tokens, num_planned)
        self.num_free -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LastComeFirst(Scheduling):
    starvation_bound: ClassVar[int] = 2

    def rank(self, seq):
        return (-seq.request.arrival_s,)


class BeyondTheLast:
    def choose(self, request, replicas, now):
        return -1


class Fortunate:
    """Draws a replica with Python's shared random numbers."""

    def choose(self, request, replicas, now):
        return int(np.random.randint(len(replicas)))  # noqa: NPY002


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """A predictor of a fixed length, which the predictors below replace."""

    needs_truth: ClassVar[bool] = False

    def predict(self, request, true_num_tokens):
        return min(10, request.max_tokens or 10)

    def observe(self, request, num_output_tokens):
        pass


class Overshooting(Guessing):
    def predict(self, request, true_num_tokens):
        return 1000


class Peeking(Guessing):
    def predict(self, request, true_num_tokens):
        return min(true_num_tokens or 10, request.max_tokens or 10)


SHARED = []


class Sharing(Guessing):
    def predict(self, request, true_num_tokens):
        return 1 + len(SHARED) % 2 if request.max_tokens != 1 else 1

    def observe(self, request, num_output_tokens):
        SHARED.append(request)


class Mumbling:
    """Refuses a request without a reason."""

    def refusal(self, request, replicas, now):
        return True


class Spying:
    """Reads signals that it has not declared."""

    def refusal(self, request, replicas, now):
        return None if replicas[0].num_waiting < 3 else Refusal("full")


class Whimsical:
    def refusal(self, request, replicas, now):
        return Refusal("heads") if np.random.random() < 0.5 else None  # noqa: NPY002


@dataclass(kw_only=True, slots=True)
class Jamming:
    """Counts every request that comes in, but of those that leave only the answered ones."""

    num_outstanding: int = 0
    _answered: set = field(init=False, default_factory=set)

    def refusal(self, request, replicas, now):
        if self.num_outstanding >= 4:
            return Refusal("full")
        self.num_outstanding += 1
        return None

    def on_first_token(self, request, now):
        self._answered.add(request.request_id)

    def on_end(self, request, now):
        if request.request_id in self._answered:
            self._answered.remove(request.request_id)
            self.num_outstanding -= 1


class Rash:
    """Says "never" to a request that it would admit later."""

    def refusal(self, request, replicas, now):
        return Refusal("too many", inf) if sum(r.num_outstanding for r in replicas) > 2 else None


@dataclass(kw_only=True, slots=True)
class Promising(TokenBucket):
    """Names half of the time after which it will admit the request."""

    rate_per_s: float = 0.5

    def refusal(self, request, replicas, now):
        refusal = TokenBucket.refusal(self, request, replicas, now)
        return refusal and refusal._replace(retry_after_s=refusal.retry_after_s / 2)


@dataclass(kw_only=True, slots=True)
class Hoarding(TokenBucket):
    """Keeps a bucket for every tenant that ever sent a request."""

    per: str = "tenant"

    def _sweep(self, now):
        pass


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A draft-length policy of one token, which the policies below replace."""

    needs_cost: ClassVar[bool] = False
    reads_sequences: ClassVar[bool] = False
    num_repeats: int = 1

    def num_draft_tokens(self, view):
        return 1


class Exceeding(Drafting):
    def num_draft_tokens(self, view):
        return view.max_draft_tokens + 1


class Foreseeing(Drafting):
    """Drafts only for sequences with a short answer."""

    def num_draft_tokens(self, view):
        return np.array([int(seq._end_known < 30) for seq in view.sequences], int)


@dataclass(frozen=True, kw_only=True)
class Overpromising(Drafting):
    """Promises to draft the same in 50 steps, and drafts nothing in every fifth one."""

    num_repeats: int = 50

    def num_draft_tokens(self, view):
        return int(view.num_iterations % 5 > 0)


BROKEN = [
    (Exceeding(), "draft_lengths_within_limits"),
    (Foreseeing(), "independent_of_true_lengths"),
    (Overpromising(), "leap_equals_step"),
    (Mumbling(), "returns_none_or_refusal"),
    (Spying(), "returns_none_or_refusal"),
    (Whimsical(), "admission_is_reproducible"),
    (Jamming(), "admits_when_idle"),
    (Rash(), "permanent_refusals_stay"),
    (Promising(), "retry_after_holds"),
    (Hoarding(), "forgets_ended_requests"),
    (Cheating(), "independent_of_true_lengths"),
    (Dicing(), "run_is_reproducible"),
    (Looking(), "run_is_reproducible"),
    (Forgetful(), "leap_equals_step"),
    (Overconfident(), "unasked_decodes_equal_fill"),
    (Disorderly(), "lane_equals_engine"),
    (Greedy(), "budget_respected"),
    (Starving(), "every_request_ends"),
    (Leaking(), "no_leaked_blocks"),
    (LastComeFirst(), "starvation_bound_holds"),
    (BeyondTheLast(), "chooses_a_replica"),
    (Fortunate(), "run_is_reproducible"),
    (Overshooting(), "predicts_within_limits"),
    (Peeking(), "needs_truth_is_declared"),
    (Sharing(), "copies_share_nothing"),
]


@pytest.mark.parametrize(
    ("policy", "name"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_promise_is_caught(policy, name, monkeypatch):
    monkeypatch.setattr("experiments.conformance.claims.MAX_SHRINKING_S", 0.0)
    (claim,) = (claim for claim in claims_of(policy) if claim.name == name)
    with pytest.raises(BrokenPromise, match=rf"^{name}: [^\n]*\nBroken in this world:\n\n\d+ engine"):
        claim.check(num_worlds=60)


class Losing(SpeculatingWorld):
    """Its engines lose the last token of every answer."""

    def _source(self):
        return Traffic([ask._replace(num_output_tokens=ask.num_output_tokens - 1) for ask in self.asks])


def test_a_lost_token_is_caught():
    asks = (Ask(0.0, 4, 9),)
    draft_promises.answers_are_complete(SpeculatingWorld(asks=asks))
    with pytest.raises(AssertionError, match="the answer of request 0 has 8 tokens, and 9 without drafts"):
        draft_promises.answers_are_complete(Losing(asks=asks))


@pytest.mark.parametrize(
    "policy",
    [
        TokenBucket(rate_per_s=3, burst=12, count="tokens", per="tenant"),
        QueueBound(max_outstanding=3, count="tokens", per="fleet", retry_after_s=1.0),
        QueueBound(max_outstanding=30, count="queued_tokens"),
        TenantQuotas(max_outstanding=2, max_outstanding_tokens=30, tenant_weights={"a": 3.0}),
    ],
    ids=repr,
)
def test_admission_by_other_counts_keeps_its_promises(policy):
    fixed = ("max_outstanding", "burst")
    claims = claims_of(policy, fixed)
    assert {claim.name: num_kept(claim, 5) for claim in claims} == {claim.name: 5 for claim in claims}


def test_a_refusing_world_is_reported_with_its_policy():
    text = in_words(World(asks=(), admission=QueueBound(max_outstanding=3)))
    assert "\nadmission QueueBound(max_outstanding=3, count='requests', " in text


def test_a_bug_of_the_policy_is_a_sentence_and_its_line():
    class Buggy(Filling):
        def order(self, waiting):
            return waiting[0].no_such_thing

    claim = claims_of(Buggy())[0]
    said = r"fill used Sequence.no_such_thing, which does not exist; (.|\n)*return waiting\[0\]"
    with pytest.raises(BrokenPromise, match=said) as caught:
        claim.check_in(World(asks=(Ask(0.0, 4, 3),), batching=Buggy()))
    assert isinstance(caught.value.__cause__, PolicyError)
    assert "AttributeError" in caught.value.__cause__.trace


def test_a_world_in_words():
    world = World(
        asks=(Ask(0.0, 4, 30), Ask(0.5, 1, 2, priority=1, max_tokens=9, tenant="a")),
        batching=Chunked(max_num_batched_tokens=7),
        num_blocks=5,
        num_users=1,
        think_s=0.25,
        patience_s=3.0,
    )
    text = in_words(world).splitlines()
    assert text[0] == (
        "1 engine with 5 KV blocks of 4 tokens and 8 slots; contexts of at most 4096 tokens; "
        "an iteration takes 0.125 s"
    )
    assert text[1].startswith("batching Chunked(max_num_batched_tokens=7")
    assert text[-3:] == [
        "clients give up 3 s after the arrival of their request",
        "request arrives at 0 s: 4 prompt tokens, 30 output tokens",
        "request arrives 0.25 s after the end of another: 1 prompt token, 2 output tokens, max_tokens 9, "
        "priority 1, tenant a",
    ]


def test_the_family_is_known_by_the_methods():
    policies = [
        Chunked(),
        Fcfs(),
        Paged(),
        RoundRobin(),
        AdmitAll(),
        Scales(),
        Guessing(),
        FixedSlots(),
        Fixed(),
    ]
    assert [family_of(policy) for policy in policies] == [family.name for family in FAMILIES]
    assert LengthPredictor  # a protocol: no base class to inherit from


@dataclass
class Ranking:
    def rank(self, seq):
        return (0,)


@dataclass
class Everything(Ranking):
    def fill(self, view, step, now):
        pass


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (object(), "object: must have the methods of one family, but has those of none"),
        (Everything(), "but has those of batching and scheduling"),
        (
            Ranking(),
            "Ranking: a policy of the family scheduling must inherit from policies.scheduling.Scheduling",
        ),
    ],
)
def test_rejects_what_is_a_policy_of_no_family(policy, message):
    with pytest.raises(ValueError, match=message):
        claims_of(policy)


def test_a_worker_that_does_not_serve_alone_need_not_end_requests():
    names = {claim.name for claim in claims_of(PrefillOnly())}
    assert "every_request_ends" not in names
    assert {"leap_equals_step", "no_leaked_blocks"} <= names


def test_settings_that_are_given_are_not_varied():
    seen = set()

    @dataclass(frozen=True)
    class Noting(Filling):
        _own: int = field(init=False, default=0)

        def fill(self, view, step, now):
            seen.add(self.max_num_batched_tokens)
            super().fill(view, step, now)

    for fixed in (["max_num_batched_tokens"], []):
        seen.clear()
        claim = next(
            c for c in claims_of(Noting(max_num_batched_tokens=33), fixed) if c.name == "every_request_ends"
        )
        claim.check(num_worlds=5)
        assert (seen == {33}) == bool(fixed)


def test_a_policy_is_found_by_name_with_its_settings_checked():
    claims = claims_by_name("policies.batching.static.Static", {"batch_size": 3})
    assert "leap_equals_step" in {claim.name for claim in claims}


POLICY = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    max_num_batched_tokens: int = 64
    slack: int = 0

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens + self.slack)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in view.waiting:
            if not step.admit(seq, step.tokens_left):
                break
        step.repeat()
"""


@pytest.fixture
def run_pytest(pytester):
    """Runs pytest in a folder with a policy and no test; returns its exit code and what it printed."""
    pytester.makepyfile(whole=POLICY)

    def run(*arguments):
        plugins = ("-p", "experiments.conformance.plugin", "-p", "no:cacheprovider", "-p", "no:xdist")
        done = pytester.runpytest_inprocess(*plugins, *arguments)
        return done.ret, done.stdout.str() + done.stderr.str()

    return run


def test_pytest_checks_a_policy_in_a_plain_file(run_pytest):
    code, printed = run_pytest("--policy", "whole.Whole", "--policy-worlds", "3")
    assert (code, "6 passed" in printed) == (0, True), printed


def test_an_old_name_of_a_claim_selects_it_with_a_note(run_pytest, capfd):
    code, printed = run_pytest("--policy", "whole.Whole", "--policy-worlds", "1", "-k", "everybody_ends")
    assert (code, "1 passed" in printed) == (0, True), printed
    assert "the claim everybody_ends is now called every_request_ends" in printed + capfd.readouterr().err


def test_every_old_name_of_a_claim_stands_for_a_promise():
    names = {promise.__name__ for family in PROMISES.values() for promise in family}
    bounded = {"starvation_bound_holds", "starvation_bound_s_holds"}
    assert set(NEW_CLAIMS.values()) <= names | bounded
    for old, new in NEW_CLAIMS.items():
        module = admission_promises if hasattr(admission_promises, new) else promises
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
            assert getattr(module, old) is getattr(module, new)
    assert not hasattr(promises, "no_such_promise")


def test_the_old_name_of_a_days_simulation_works():
    day = Day(scaling=Scales(), rates_per_s=(1.0,), num_intervals=2)
    with pytest.warns(DeprecationWarning, match=r"use Day\.simulate"):
        assert day.live() == day.simulate()


def test_pytest_tells_the_smallest_world_of_a_policy_that_exceeds_its_budget(run_pytest, monkeypatch):
    monkeypatch.setattr("experiments.conformance.claims.MAX_SHRINKING_S", 0.5)
    arguments = ["--policy-settings", "slack=1", "--policy-worlds", "20", "-k", "budget"]
    code, printed = run_pytest("--policy", "whole.Whole", *arguments)
    assert (code, "1 failed" in printed) == (1, True), printed
    assert "Broken in this world:" in printed
    assert "max_num_batched_tokens is" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "whole.Hole"], "policy._target_=whole.Hole: module whole has no Hole; nearest: Whole"),
        (
            ["--policy", "whole.Whole", "--policy-settings", "slak=1"],
            "policy.slak: no such setting; nearest: policy.slack",
        ),
        (
            ["--policy", "whole.Whole", "--policy-settings", "slack"],
            "--policy-settings slack: must be key=value",
        ),
    ],
)
def test_pytest_rejects_a_policy_that_cannot_be_built(run_pytest, arguments, message):
    code, printed = run_pytest(*arguments)
    assert (code, message in printed) == (4, True), printed


def test_the_plugin_is_registered_under_its_own_name_and_hypothesis_is_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = "experiments.conformance.plugin"
    assert project["entry-points"]["pytest11"] == {name: name}
    assert any(need.startswith("hypothesis") for need in project["optional-dependencies"]["conformance"])


def test_the_plugin_alone_imports_nothing_heavy():
    code = "import sys, experiments.conformance.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"simpy", "omegaconf", "numpy", "policies.core.engine"} & set(done.stdout.split())


@dataclass(kw_only=True)
class Scales:
    """Wants as many replicas as there are."""

    interval_s: float = 10.0
    min_replicas: int = 1
    max_replicas: int = 4

    def target(self, pool, now):
        return min(4, pool.num_replicas + pool.num_starting)


class ScalesBeyond(Scales):
    def target(self, pool, now):
        return pool.num_waiting // 10 + 1


class ScalesAShare(Scales):
    def target(self, pool, now):
        return 4 * pool.busy_share


class ScalesInTurns(Scales):
    """Scales by a counter that all pools share."""

    num_askings = 0

    def target(self, pool, now):
        type(self).num_askings += 1
        return 1 + self.num_askings % 4


@pytest.mark.parametrize(
    ("policy", "broken", "message_part"),
    [
        (Scales(), [], ""),
        (ScalesBeyond(), ["target_within_bounds"], "must be a whole number from 1 to 4"),
        (ScalesAShare(), ["target_within_bounds"], "target() returned 0.0"),
        (ScalesInTurns(), ["target_is_reproducible"], "in another pool at 10 s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Scales) else "",
)
def test_broken_promises_of_autoscalers_are_caught_and_reported(policy, broken, message_part):
    found = {}
    for claim in claims_of(policy):
        try:
            claim.check(num_worlds=50)
        except BrokenPromise as error:
            found[claim.name] = str(error)
    assert list(found) == broken
    for message in found.values():
        assert message_part in message
        assert "a pool of initially" in message
