"""A workload on a real engine: requests come at their times, with their content and lengths."""

import numpy as np
import torch

from experiments.validate.engine.drive import Drive, PromptTokens
from experiments.validate.engine.recording import Recorder
from experiments.validate.engine.replay import replay
from policies.core.request import Prompt, Segment
from realengine.clock import ThreadTimeClock
from sim.workload.base import WorkloadNotes
from sim.workload.chunks import TableSource
from tests.experiments.validate.engine.test_recording import fresh_core
from tests.realengine.small_models import make

torch.set_num_threads(1)


def source_of(arrival_s, patience_s=None):
    num = len(arrival_s)
    return TableSource(
        arrival_s=np.asarray(arrival_s, float),
        prompt_tokens=np.arange(num) % 20 + 17,
        output_tokens=np.arange(num) % 5 + 3,
        notes=WorkloadNotes(),
        max_tokens="exact",
        segments=lambda row, num_tokens: (Segment(row % 2, 16), Segment(10 + row, num_tokens - 16)),
        patience_s=patience_s,
    )


class SteppedClock:
    """A clock that advances with every reading."""

    def __init__(self, step_s):
        self.time_s, self.step_s = 0.0, step_s

    def now(self):
        self.time_s += self.step_s
        return self.time_s

    def sleep(self, seconds):
        self.time_s += seconds


def drive(clock, source, **settings):
    llm = make(**settings)
    llm.engine.clock = clock
    recorder = Recorder(llm.engine.core)
    llm.engine.observer = recorder
    run = Drive(llm.engine, source, PromptTokens(llm.architecture.vocab_size))
    run.run()
    return llm, run, recorder.recording({})


def test_every_request_comes_at_its_time_and_gets_its_tokens():
    arrival_s = np.arange(12) * 0.5
    llm, run, recording = drive(ThreadTimeClock(), source_of(arrival_s))
    requests = recording.requests
    begin = requests["arrival_s"].iloc[0]
    np.testing.assert_allclose(requests["arrival_s"] - begin, arrival_s, atol=1e-9)
    assert (requests["known_s"] >= requests["arrival_s"]).all()
    assert (requests["known_s"] - requests["arrival_s"]).median() < 0.1
    assert [len(run.answers[i].outputs[0].tokens) for i in range(12)] == [i % 5 + 3 for i in range(12)]
    # Half of the prompts begin alike: the cache finds it, as in the simulator.
    assert requests["cached_tokens"].tolist() == [0, 0] + [16] * 10
    assert replay(recording, fresh_core(llm, {})).difference is None


def test_a_crowd_is_served_side_by_side_and_decided_again():
    llm, run, recording = drive(SteppedClock(1e-4), source_of(np.zeros(30)), num_kv_blocks=12, overlap=True)
    assert all(answer.outputs[0].finish_reason == "length" for answer in run.answers.values())
    assert recording.steps["running"].max() > 3
    assert replay(recording, fresh_core(llm, {})).difference is None


def test_a_client_that_loses_patience_leaves():
    _, run, recording = drive(SteppedClock(1e-3), source_of(np.zeros(30), patience_s=0.05))
    reasons = {answer.outputs[0].finish_reason for answer in run.answers.values()}
    assert reasons == {"length", "aborted"}
    assert set(recording.requests["status"]) == {"finished", "aborted"}


def test_equal_names_are_equal_tokens_and_answers_are_quoted():
    tokens = PromptTokens(1000)
    short = tokens.of(Prompt(5, (Segment(7, 5),)))
    long = tokens.of(Prompt(12, (Segment(7, 9), Segment(8, 3))))
    assert long[:5] == short
    assert tokens.of(Prompt(3, (Segment(8, 3),))) == long[9:]
    assert tokens.of(Prompt(4)) != tokens.of(Prompt(4))
    tokens.learn(8, [1, 2, 3, 4])
    assert tokens.of(Prompt(8, (Segment(7, 5), Segment(8, 3)))) == [*short, 1, 2, 3]
