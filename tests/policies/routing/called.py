"""Requests and replicas with given loads, of which routers choose."""

from types import SimpleNamespace

from policies.core.request import Prompt, Request, Segment


def replicas(*num_outstanding, **more):
    """Returns replicas with these outstanding requests; `more` are lists of other counts."""
    return [
        SimpleNamespace(index=i, num_outstanding=count, **{name: values[i] for name, values in more.items()})
        for i, count in enumerate(num_outstanding)
    ]


def idle(num_replicas):
    return replicas(*[0] * num_replicas)


def ask(request_id, *pieces, session_id=None):
    """Returns a request whose prompt is (content, tokens) pieces."""
    prompt = Prompt(sum(n for _, n in pieces), tuple(Segment(*piece) for piece in pieces))
    return Request(request_id, 0.0, prompt, session_id=session_id)


def choices(routing, views, make_request, num_requests, **settings):
    return [
        routing.choose(make_request(request_id, **settings), views, 0.0) for request_id in range(num_requests)
    ]
