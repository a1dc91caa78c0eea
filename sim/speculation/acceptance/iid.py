"""Independent acceptance of every draft token with the same probability (Leviathan et al., ICML 2023).

The number of accepted tokens of a pass is geometric, truncated at K. Its mean length with the target's own
token is (1 - a^(K + 1)) / (1 - a): 3.3616 for a = 0.8 and K = 4.

Published rates by proposer and task are the default of `acceptance=iid`. A rate is the probability that a
draft token is accepted if all earlier ones in its pass are; for a tree, the probability of the first choice.
It is the rate at which the measured draft has the published mean accepted length:
`tests/sim/speculation/test_published.py` recomputes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, OneOf, Share, check
from policies.core.request import Request
from policies.speculation import Proposer, num_places
from sim.speculation import Acceptance, Verdicts
from sim.speculation.acceptance.rates import num_ranks, verdicts_of, with_ranks

TASKS = ("chat", "code", "math", "summarization", "question_answering", "translation", "rag")
"""Tasks of a workload; chat: conversations of mixed content (MT-bench)."""

_SPEC_BENCH = "Vicuna-7B, greedy: EAGLE-2, Table 1; translation and rag: means of Spec-Bench"


class Published(NamedTuple):
    """The rates of a proposer."""

    source: str
    rates: tuple[float, ...]
    """By task, in the order of `TASKS`."""


PUBLISHED: Mapping[str, Published] = MappingProxyType(
    {
        "draft_model": Published(
            f"Vicuna-68M drafts for {_SPEC_BENCH}", (0.595, 0.644, 0.573, 0.612, 0.550, 0.578, 0.578)
        ),
        "ngram": Published(_SPEC_BENCH, (0.405, 0.465, 0.498, 0.635, 0.306, 0.429, 0.429)),
        "medusa": Published(_SPEC_BENCH, (0.375, 0.413, 0.393, 0.252, 0.270, 0.324, 0.324)),
        "lookahead": Published(_SPEC_BENCH, (0.239, 0.265, 0.337, 0.184, 0.208, 0.222, 0.222)),
        "eagle": Published(_SPEC_BENCH, (0.765, 0.813, 0.773, 0.684, 0.648, 0.710, 0.710)),
        "eagle3": Published(
            "Llama-3.1-8B, greedy: chat as a chain of 7 in vLLM (issue 26191); code, math and summarization "
            "by their ratio to it in EAGLE-3, Table 1; the others as summarization",
            (0.743, 0.772, 0.748, 0.700, 0.700, 0.700, 0.700),
        ),
        "mtp": Published(
            "DeepSeek-V3's report, 85 to 90 % of second tokens; code: InferenceX's distribution of DeepSeek",
            (0.85, 0.79, 0.85, 0.85, 0.85, 0.85, 0.85),
        ),
        "suffix": Published(
            f"those of prompt lookup, as none are published by task; {_SPEC_BENCH}",
            (0.405, 0.465, 0.498, 0.635, 0.306, 0.429, 0.429),
        ),
        "specinfer_tree": Published(
            f"those of one draft of the same size; Vicuna-68M drafts for {_SPEC_BENCH}",
            (0.595, 0.644, 0.573, 0.612, 0.550, 0.578, 0.578),
        ),
    }
)
"""By method of the proposer."""

ASSUMED_RATE = 0.8
"""Rate of a method without published values, such as self_speculative."""


def published_rate(method: str, task: str) -> float:
    """Returns the published rate of a method's draft tokens for a task, or `ASSUMED_RATE`."""
    of = PUBLISHED.get(method)
    return ASSUMED_RATE if of is None else of.rates[TASKS.index(task)]


def rate_sentence(method: str, task: str) -> str:
    """Returns a sentence on the source of a run's rate."""
    of, rate = PUBLISHED.get(method), published_rate(method, task)
    if of is None:
        basis = f"is assumed, as no figures are published for speculation={method}"
    else:
        basis = f"is published for speculation={method} and task {task} ({of.source})"
    return (
        f"acceptance=iid: the rate of draft tokens, {rate:.3g}, {basis}; speed-ups depend on it, so set "
        "acceptance.task or acceptance.rate for your requests, or choose acceptance=table, text or "
        "spec_bench."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Iid(Checked):
    """Accepts every draft token with the same probability."""

    rate: Share | None
    """Probability that a draft token is accepted if all tokens before it in its pass are; None: the published
    rate of the proposer and the task.
    """
    task: Annotated[str | None, OneOf(TASKS)] = None
    """Task of the requests, for rate=None: one of `TASKS`; None: the workload's task, else chat."""
    rank_decay: Share = 0.32
    """For trees: the ratio of the rate of further ranks (if earlier ranks missed) to the rate of rank 1."""

    def __post_init__(self) -> None:
        check(self)
        if self.task is not None and self.rate is not None:
            raise ValueError(f"task={self.task}, rate={self.rate:g}: a task has no effect beside a rate")

    def check(self, proposer: Proposer) -> None:
        """Raises no error, because it supports every proposer."""

    def verdicts(self, request: Request, seed: int, num_positions: int, proposer: Proposer) -> Verdicts:
        """Returns the verdicts on drafts that begin at output positions 0 to num_positions - 1."""
        rate = published_rate(proposer.method, self.task or TASKS[0]) if self.rate is None else self.rate
        rates_KR = same_rates(rate, self.rank_decay, num_places(proposer), num_ranks(proposer))
        return verdicts_of(rates_KR, request, seed, num_positions, proposer)


@lru_cache(maxsize=256)
def same_rates(rate: float, rank_decay: float, num_places: int, num_ranks: int) -> NDArray[np.float64]:
    """Returns the rates by place and rank of drafts with the same rate at all places. Must not be changed."""
    return with_ranks(np.full(num_places, rate), num_ranks, rank_decay)


def for_task(acceptance: Acceptance | None, task: str) -> Acceptance | None:
    """Returns the acceptance for a workload's task; published rates use it unless their task is set."""
    if isinstance(acceptance, Iid) and acceptance.rate is None and acceptance.task is None:
        return replace(acceptance, task=task)
    return acceptance
