"""Requests that ask for admission, and replicas with given loads."""

from types import SimpleNamespace

from policies.core.request import Prompt, Request


def ask(request_id=0, num_tokens=1, arrival_s=0.0, **more):
    return Request(request_id, arrival_s, Prompt(num_tokens), **more)


def fleet(*num_outstanding, **more):
    """Returns replicas with these outstanding requests; `more` are lists of other counts."""
    return [
        SimpleNamespace(num_outstanding=count, **{name: values[i] for name, values in more.items()})
        for i, count in enumerate(num_outstanding)
    ]


ONE = fleet(0)


def admitted(policy, requests, replicas=ONE, now=0.0):
    """Returns whether each of these requests is admitted when all are asked at once."""
    return [policy.refusal(request, replicas, now) is None for request in requests]
