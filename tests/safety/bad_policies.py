"""Policies of every family that fail, each in the `way` that it is given; copied to a user's folder."""

import sys
from dataclasses import dataclass
from math import inf, nan

from policies.adapters import AdapterServing
from policies.admission.queue_bound import QueueBound
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import Caching
from policies.scheduling import Scheduling


def helper(value):
    return 1 / value


@dataclass(frozen=True, kw_only=True, slots=True)
class BadBatching(Chunked):
    way: str = "raises"

    def fill(self, view, step, now):
        if self.way == "raises":
            helper(0)
        if self.way == "wrong verb":
            step.decode_everything()
        if self.way == "wrong argument":
            step.decode(7)
        if self.way == "wrong sequence":
            step.decode(next(iter(view.waiting)))
        if self.way == "wrong attribute":
            next(iter(view.waiting)).num_tokenz  # noqa: B018
        if self.way == "exits":
            sys.exit(3)
        if self.way == "waits":
            step.wait_until(inf)
        if self.way == "polls":
            step.wait_until(now + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongSignature:
    max_num_batched_tokens: int = 2048

    def fill(self, view, step):
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class NoMethod:
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class FailsWhenMade:
    max_num_batched_tokens: int = 2048

    def __post_init__(self):
        self.max_num_batched_tokens + None

    def fill(self, view, step, now):
        pass


class NoPolicy:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BadScheduling(Scheduling):
    way: str = "raises"

    def rank(self, seq):
        return {"raises": (1, 0), "none": None, "text": ("a",), "not a number": (nan,), "end": (0,)}[self.way]

    def on_end(self, seq):
        helper(0)

    def before_step(self, view, step, now):
        if self.way == "raises":
            raise LookupError("lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoRank(Scheduling):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BadCaching(Paged):
    way: str = "raises"

    def pool(self, memory):
        return [][1] if self.way == "raises" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPool(Caching):
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRouting:
    way: str = "raises"

    def choose(self, request, replicas, now):
        return {"unknown": 7, "none": None, "text": "a", "half": 0.5}[self.way]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadEnd:
    def choose(self, request, replicas, now):
        return 0

    def on_end(self, request):
        pass


@dataclass(kw_only=True, slots=True)
class BadAdmission(QueueBound):
    way: str = "raises"

    def refusal(self, request, replicas, now):
        return helper(0) if self.way == "raises" else "no"


@dataclass(kw_only=True, slots=True)
class BadScaling:
    way: str = "raises"
    interval_s: float = 1.0
    min_replicas: int = 1
    max_replicas: int = 4

    def target(self, pool, now):
        return {"many": 99, "half": 1.5, "none": None}[self.way]


@dataclass(kw_only=True, slots=True)
class BadPrediction:
    needs_truth = False
    way: str = "raises"

    def predict(self, request, true_num_tokens):
        return {"none": None, "zero": 0}[self.way]

    def observe(self, request, num_output_tokens):
        pass


@dataclass(frozen=True, kw_only=True, slots=True)
class BadDraftLength:
    way: str = "raises"
    needs_cost = False
    reads_sequences = False
    num_repeats = 1

    def num_draft_tokens(self, view):
        return {"none": None, "negative": -1, "half": 0.5, "many": 5, "list": [1, 1]}[self.way]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadAdapters(AdapterServing):
    way: str = "raises"

    def residents(self, registry, pool):
        return helper(0) if self.way == "raises" else None
