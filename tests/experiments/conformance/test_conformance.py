"""The conformance suite: shipped policies pass, families are recognised, worlds are described in words."""

from dataclasses import dataclass, field

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.conformance.claims import FAMILIES, BrokenPromise, claims_by_name, claims_of, family_of
from experiments.conformance.words import in_words
from experiments.conformance.worlds import Ask, World
from policies.adapters.fixed_slots import FixedSlots
from policies.admission import AdmitAll
from policies.admission.queue_bound import QueueBound
from policies.admission.tenant_quotas import TenantQuotas
from policies.admission.token_bucket import TokenBucket
from policies.batching.chunked import Chunked
from policies.batching.disaggregated import PrefillOnly
from policies.caching.paged import Paged
from policies.prediction import LengthPredictor
from policies.routing.load_balancing import RoundRobin
from policies.scheduling.fcfs import Fcfs
from policies.speculation.draft_lengths import Fixed
from policies.user_code import PolicyError
from tests.experiments.conformance.kept import num_kept
from tests.experiments.conformance.sound_policies import Filling, Guessing, Scales


def shipped():
    """Returns the classes that the configs of all families name, once each."""
    files = [file for family in FAMILIES for file in sorted((CONFIG_DIR / family.name).glob("*.yaml"))]
    targets = dict.fromkeys(OmegaConf.load(file).get("_target_") for file in files)
    return [target for target in targets if target]


RUN_ELSEWHERE = ("batching", "scheduling", "caching", "routing")
"""Families of which the random worlds of tests/sim/ draw every policy, for most of the same promises."""


@pytest.mark.sampled(fast=6, slow=10)
@pytest.mark.parametrize("target", [t for t in shipped() if t.split(".")[1] not in RUN_ELSEWHERE])
def test_shipped_policies_keep_their_promises(target):
    claims = claims_of(get_class(target)())
    assert {claim.name: num_kept(claim, 2) for claim in claims} == {claim.name: 2 for claim in claims}


@pytest.mark.sampled(slow=16)
@pytest.mark.slow
@pytest.mark.parametrize("target", shipped())
def test_shipped_policies_keep_their_promises_in_many_worlds(target):
    claims = claims_of(get_class(target)())
    assert {claim.name: num_kept(claim, 20) for claim in claims} == {claim.name: 20 for claim in claims}


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
