"""The time of the host per step, without and with draft tokens."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.calibrate.engine import host_time
from experiments.calibrate.engine.draft_host import (
    Measured,
    add_texts,
    engine_of_texts,
    fitted,
    measure_draft_host,
)
from experiments.calibrate.engine.host_time import HostClock, HostTime, measure_host
from policies.speculation.proposers import Ngram

torch.set_num_threads(1)


def test_the_host_time_of_a_step_is_fitted_by_its_sequences(monkeypatch):
    monkeypatch.setattr(host_time, "_step_s", lambda count, *_: 20e-6 + 0.5e-6 * count)
    host = measure_host(256, 16)
    assert min(host.by_batch) == 1
    assert max(host.by_batch) == 256
    assert host.by_batch[256] == 148e-6
    assert (host.iteration_s, host.sequence_s) == (pytest.approx(20e-6), pytest.approx(0.5e-6))


def test_the_host_needs_longer_for_more_sequences(monkeypatch):
    """Time is counted in executed lines of Python here, so that the machine's pace does not matter."""
    lines = 0

    def count(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return count

    monkeypatch.setattr(time, "thread_time", lambda: lines * 1e-6)
    traced = sys.gettrace()
    sys.settrace(count)
    try:
        host = measure_host(64, 16)
    finally:
        sys.settrace(traced)
    assert 0 < host.by_batch[1] < host.by_batch[64]
    assert host.iteration_s + 64 * host.sequence_s == pytest.approx(host.by_batch[64], rel=0.5)


def test_the_host_is_measured_without_the_executor_that_works_in_between(served, monkeypatch):
    run = served.plain.run

    def slow(work):
        end_s = time.thread_time() + 20e-3
        while time.thread_time() < end_s:
            pass
        return run(work)

    monkeypatch.setattr(served.plain, "run", slow)
    host = measure_host(2, 16, served)
    assert set(host.by_batch) == {1, 2}
    assert 0 < host.by_batch[1] < 20e-3
    corrected = measure_host(2, 16, served, usual_s=1e-3)  # the reference step takes at least 20 ms
    assert 0 < corrected.by_batch[1] < 0.25 * host.by_batch[1]


def test_draft_tokens_take_the_host_longer_and_searches_the_longest():
    found = measure_draft_host(HostTime(iteration_s=0.0, sequence_s=0.0, by_batch={}), 16)
    assert set(found) == {"ngram", "suffix", "others"}
    assert found["others"].host.kilotoken_s == 0
    for host, steps, _ in found.values():
        assert host.iteration_s + host.sequence_s + host.token_s > 0
        assert max(step.num_drafts for step in steps) > 1
    assert found["suffix"].steps[-1].seconds > found["others"].steps[-1].seconds


@given(st.floats(0, 1e-3), st.floats(0, 1e-4), st.floats(0, 1e-4), st.floats(0, 1e-5), st.floats(1e-4, 1e-3))
def test_the_host_time_of_drafts_comes_back_from_the_steps_that_it_makes(fixed, each, token, kilo, plain_s):
    plain = HostTime(iteration_s=plain_s, sequence_s=2e-6, by_batch={})
    steps = [
        Measured(
            num_seqs,
            drafts,
            context,
            plain_s + 2e-6 * num_seqs + fixed + each * num_seqs + token * drafts + kilo * 1e-3 * context,
        )
        for num_seqs, drafts, context in (
            (1, 4, 90),
            (1, 8, 2000),
            (4, 3, 300),
            (12, 90, 900),
            (12, 6, 25000),
        )
    ]
    found = fitted(steps, plain, searches=True).host
    for ours, theirs in (
        (found.iteration_s, fixed),
        (found.sequence_s, each),
        (found.token_s, token),
        (found.kilotoken_s, kilo),
    ):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-10)


def test_draft_tokens_are_accepted_as_far_as_they_agree_with_a_text():
    """The stand-in of the executor leaves every request with the beginning of its own text."""
    text = np.arange(60) % 7
    texts = [text, text[3:], np.arange(60)]
    proposer = Ngram(draft=None, num_speculative_tokens=3, prompt_lookup_max=2)
    engine, _ = engine_of_texts(proposer, texts, 20, 16, HostClock(None, None))
    add_texts(engine, texts, 20)
    found = {}
    num_steps = 0
    while engine.num_unfinished:
        found |= {answer.request_id: answer for answer in engine.step() if answer.is_finished}
        num_steps += 1
    assert [found[index].outputs[0].tokens for index in range(3)] == [each[20:].tolist() for each in texts]
    assert [found[index].drafts.num_accepted_tokens > 20 for index in range(2)] == [True, True]
    assert found[2].drafts is None  # nothing repeats
    assert num_steps == 40
