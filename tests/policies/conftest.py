"""Makers with defaults: a test states only what its claim needs."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request
from policies.scheduling.fcfs import Fcfs


@dataclass(frozen=True)
class Scripted:
    """A batching policy out of a function of (view, step)."""

    script: Any

    def fill(self, view, step, now):
        self.script(view, step)


def _make_core(
    *,
    batching=None,
    scheduling=None,
    num_blocks=100,
    block_size=4,
    watermark=0.0,
    presume_cached=False,
    max_num_seqs=8,
    max_model_len=4096,
    predictor=None,
    num_swap_blocks=0,
):
    """Returns an engine with room for everything; `batching` may be a function of (view, step)."""
    if callable(batching):
        batching = Scripted(batching)
    return EngineCore(
        batching=batching or Chunked(),
        scheduling=scheduling or Fcfs(),
        block_pool=Paged(block_size=block_size, watermark=watermark, presume_cached=presume_cached).pool(
            KvMemory(num_blocks)
        ),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        predictor=predictor,
        num_swap_blocks=num_swap_blocks,
    )


def _make_request(request_id=0, num_prompt_tokens=4, arrival_s=0.0, **settings):
    return Request(request_id, arrival_s, Prompt(num_prompt_tokens), **settings)


def _run_step(core, num_iterations=1, ended=()):
    """Plans and commits; returns the tokens computed, by request id, and the core's progress."""
    plan = core.plan(0.0)
    tokens = plan.tokens_by_request
    return tokens, core.commit(plan, StepOutcome(num_iterations, tuple(ended)), 0.0)


def _run_out(core):
    """Steps until nothing is left; logs tokens by request, preempted ids and blocks in use."""
    decision_log = []
    while (plan := core.plan(0.0)) is not None:
        preempted = [seq.request_id for seq in plan.preempted]
        decision_log.append((plan.tokens_by_request, preempted, core.block_pool.num_used))
        core.commit(plan, StepOutcome(), 0.0)
        core.check_integrity()
    return decision_log


def _bytes_held(policy):
    """Returns the pickled size of a policy with its memory, in bytes."""
    return len(pickle.dumps(policy))


@pytest.fixture(scope="session")
def bytes_held():
    """Returns a function for the pickled size of a policy with its memory, in bytes."""
    return _bytes_held


@pytest.fixture(scope="session")
def make_core():
    """Returns a maker of an EngineCore, with room for everything unless the test says otherwise."""
    return _make_core


@pytest.fixture(scope="session")
def make_request():
    """Returns a maker: make_request(request_id, num_prompt_tokens, arrival_s, ...)."""
    return _make_request


@pytest.fixture(scope="session")
def run_step():
    """Returns a function that plans and commits one step: (tokens by request, progress)."""
    return _run_step


@pytest.fixture(scope="session")
def run_out():
    """Returns a function that steps to the end: [(tokens by request, preempted ids, blocks in use)]."""
    return _run_out
