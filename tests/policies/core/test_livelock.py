"""An engine in which preemptions go on without progress raises an error, and no other does."""

import pytest

from policies.core import safeguards
from policies.core.plan import StepOutcome


def steps_of(core, num_steps):
    for _ in range(num_steps):
        plan = core.plan(0.0)
        if plan is None:
            return
        core.commit(plan, StepOutcome(), 0.0)


def admit_or_preempt(view, step):
    """Computes the first token of a prompt, preempts the sequence, and begins again."""
    for seq in view.prefilling:
        step.preempt(seq)
        return
    for seq in view.waiting:
        step.admit(seq, 1)


def decode_or_preempt(view, step):
    """Preempts the decodes every other step; in between all prompts are computed, so each gets a token."""
    step.decode_all()
    if view.num_decoding and view.num_iterations % 2:
        for seq in view.decoding[1:]:
            step.preempt(seq)
        return
    for seq in view.waiting:
        step.admit(seq, 100)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(safeguards, "MAX_STEPS", 10)


def test_preemptions_without_a_token_are_an_error_that_names_the_policies(make_core, make_request):
    core = make_core(batching=admit_or_preempt)
    core.add(make_request(0, 4), stop_after=2)
    with pytest.raises(RuntimeError, match=r"scheduling=fcfs.*no sequence has got a token.*can be admitted"):
        steps_of(core, 100)


def test_preemptions_with_progress_are_no_error(make_core, make_request):
    core = make_core(batching=decode_or_preempt)
    for number in range(3):
        core.add(make_request(number, 4), stop_after=100)
    steps_of(core, 1000)
    assert not core.num_unfinished
    assert core.num_preemptions > 40
