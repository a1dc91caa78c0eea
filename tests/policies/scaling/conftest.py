"""Pools as an autoscaler sees them, made by hand."""

from types import SimpleNamespace

import pytest

IDLE = {
    "num_starting": 0,
    "num_draining": 0,
    "cold_start_s": 0.0,
    "max_concurrency": 10,
    "num_outstanding": 0,
    "num_outstanding_tokens": 0,
    "num_running": 0,
    "num_waiting": 0,
    "kv_usage": 0.0,
    "busy_share": 0.0,
    "num_arrivals": 0,
    "num_arrived_tokens": 0,
    "num_ended": 0,
    "num_met": 0,
}


@pytest.fixture
def make_pool():
    """Returns a maker of an idle pool of that many replicas; `counts` replace single figures."""

    def make(num_replicas, **counts):
        return SimpleNamespace(**{**IDLE, "num_replicas": num_replicas, **counts})

    return make
