"""Published acceptance by proposer and task: the default of `acceptance=iid`.

A rate is the probability that a draft token is accepted if all before it in its pass are; of a tree, that of
the first choice. It is the rate with which the draft of the measurement has the published mean accepted
length: `tests/sim/speculation/test_published.py` computes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

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
"""Rate of a method without published figures, such as self_speculative."""


def published_rate(method: str, task: str) -> float:
    """Returns the published rate of a method's draft tokens for a task, or `ASSUMED_RATE`."""
    of = PUBLISHED.get(method)
    return ASSUMED_RATE if of is None else of.rates[TASKS.index(task)]


def rate_sentence(method: str, task: str) -> str:
    """Returns a sentence on where the rate of a run comes from."""
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
