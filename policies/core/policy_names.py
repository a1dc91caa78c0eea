"""Names of policies as users write them, for messages."""

from __future__ import annotations

import re

OTHERWISE_NAMED = {
    "AdmitAll": "none",
    "BestFitDecreasing": "best_fit",
    "BucketClassifier": "buckets",
    "EarliestDeadlineFirst": "edf",
    "FastGen": "fastgen",
    "FirstFitDecreasing": "first_fit",
    "InFlight": "inflight",
    "NoDrafts": "none",
    "OracleWithNoise": "oracle",
    "PrefixCaching": "prefix",
    "PromptLengthRegression": "regression",
    "RunningHistogram": "histogram",
    "SnapKv": "snapkv",
    "SplitFuse": "splitfuse",
    "Stay": "none",
}
"""Classes with a choice of another name in configs/ -> the choice."""

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_of(policy: object) -> str:
    """Returns the choice that a policy's class is, by its name: LongestPrefix -> longest_prefix."""
    return name_of_class(type(policy))


def name_of_class(cls: type) -> str:
    """Returns the choice that a class is, by its name."""
    name = cls.__name__
    return OTHERWISE_NAMED.get(name) or _WORD.sub("_", name).lower()
