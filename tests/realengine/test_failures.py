"""Requests and launches that fail or are aborted leave nothing behind, and others continue."""

import re
from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.batching.static import Static
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.selective import H2o
from policies.caching.tiered import Tiered
from policies.scheduling.fcfs import Fcfs
from policies.user_code import PolicyError
from realengine.runner.executor import DeviceLostError
from tests.realengine.small_models import GREEDY, make, prompts, tokens_of

torch.set_num_threads(1)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_a_launch_that_fails_ends_its_requests_and_leaves_nothing_in_the_cache(caching, overlap, expected):
    llm = make(caching=caching, overlap=overlap, batching=Chunked(max_num_batched_tokens=24))
    execute, launches = llm.engine.runner.execute, []

    def failing(work):
        launches.append(work)
        if len(launches) == 3:
            raise torch.OutOfMemoryError("out of memory: 1 GiB wanted")
        return execute(work)

    llm.engine.runner.execute = failing
    outputs = llm.generate(prompts(), GREEDY)
    failed = [output for output in outputs if output.error is not None]
    assert 0 < len(failed) < len(outputs)
    assert {output.error for output in failed} == {"out of memory: 1 GiB wanted"}
    assert {output.outputs[0].finish_reason for output in failed} == {"error"}
    for output, tokens in zip(outputs, expected("llama"), strict=True):
        assert output.error is not None or output.outputs[0].token_ids == tokens
    llm.engine.core.check_integrity()
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_an_aborted_request_frees_its_memory_and_leaves_the_others_alone(overlap, expected):
    llm = make(overlap=overlap)
    answers = [llm.engine.add(prompt, GREEDY) for prompt in prompts()]
    for num_steps, given_up in ((3, 1), (4, 6), (1, 11)):
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(answers[given_up].request_id)
    llm.engine.run()
    for place, answer in enumerate(answers):
        tokens = tuple(answer.outputs[0].tokens)
        if place in (1, 6, 11):
            assert answer.outputs[0].finish_reason == "aborted"
            assert tokens == expected("llama")[place][: len(tokens)]
        else:
            assert tokens == expected("llama")[place]
    llm.engine.core.check_integrity()
    assert llm.engine.core.num_unfinished == 0


def test_a_finished_answer_is_not_lost_to_a_failure_that_comes_later(expected):
    llm = make(overlap=True)
    short = llm.engine.add(prompts()[1], replace(GREEDY, max_tokens=2))
    llm.engine.step()
    llm.engine.step()  # both tokens are launched, the second is not read yet
    other = llm.engine.add(prompts()[2], GREEDY)

    def failing(work):
        raise torch.OutOfMemoryError("no room")

    llm.engine.runner.execute = failing
    llm.engine.run()
    assert short.error is None
    assert tuple(short.outputs[0].tokens) == expected("llama")[1][:2]
    assert other.error == "no room"
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("what", ["moves", "lost"])
def test_an_engine_that_cannot_go_on_ends_all_with_the_reason(what):
    llm = make(num_kv_blocks=20, caching=Paged(block_size=4), scheduling=Fcfs(preemption_mode="swap"))
    execute = llm.engine.runner.execute

    def failing(work):
        if work.moves if what == "moves" else work.shape.num_iterations:
            raise torch.OutOfMemoryError("no room") if what == "moves" else DeviceLostError("a rank is gone")
        return execute(work)

    llm.engine.runner.execute = failing
    outputs = llm.generate(prompts(), GREEDY)
    failed = [output for output in outputs if output.error is not None]
    assert failed
    assert {output.error for output in failed} == {"no room" if what == "moves" else "a rank is gone"}
    assert all(output.finished for output in outputs)
    assert llm.engine.num_unfinished == 0
    (later,) = llm.generate([prompts()[0]], GREEDY)
    assert "the engine has failed" in later.error


@pytest.mark.parametrize("num_reads", [1, 4])
def test_tokens_that_cannot_be_read_end_every_request_and_each_end_is_reported(num_reads):
    """A kernel's error shows when its tokens are fetched: nothing is computed after that."""
    llm = make(overlap=True)
    answers = [llm.engine.add(prompt, replace(GREEDY, max_tokens=n)) for n, prompt in enumerate(prompts(), 1)]
    read, reads = llm.engine._read, []

    def failing(launch):
        reads.append(launch)
        if len(reads) > num_reads:
            raise RuntimeError("an illegal memory access")
        return read(launch)

    llm.engine._read = failing
    finished = set()
    while llm.engine.num_unfinished:
        finished |= {answer.request_id for answer in llm.engine.step() if answer.is_finished}
    assert finished == {answer.request_id for answer in answers}
    errors = {answer.error for answer in answers}
    assert "an illegal memory access" in errors
    assert errors <= {None, "an illegal memory access"}


def test_prompts_in_no_shape_leave_nothing_behind():
    llm = make()
    with pytest.raises(ValueError, match="give token ids"):
        llm.generate([[1, 2], "text"])
    with pytest.raises(ValueError, match=re.escape("[[1, 2, 3]] for one prompt of ids")):
        llm.generate([1, 2, 3])
    assert llm.engine.num_unfinished == 0
    (output,) = llm.generate([[1.5]], GREEDY)
    assert "prompt token 0 is 1.5" in output.error


def test_a_bad_request_ends_with_its_error_while_others_go_on(expected):
    llm = make()
    outputs = llm.generate([prompts()[0], [3, 97], [], [1] * 128, prompts()[1]], GREEDY)
    assert [output.error for output in outputs] == [
        None,
        "prompt token 1 is 97: must be >= 0 and < 97",
        "an empty prompt",
        "prompt of 128 tokens: max_model_len is 128",
        None,
    ]
    assert [outputs[i].outputs[0].token_ids for i in (0, 4)] == expected("llama")[:2]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "no GPU was found; device='cpu'"),
        ({"backend": "cuda"}, "backend=cuda: must be one of triton, torch"),
        ({"dtype": "int8"}, "dtype=int8: must be one of float32"),
        ({"max_model_len": 129}, "max_model_len=129: must be <= 128, the model's context length"),
        ({"caching": Tiered(disk_gib=1)}, "keeps KV in host memory, not on disk"),
        (
            {"caching": H2o()},
            "H2o: it drops KV by the attention weights of every token, which the engine's kernels",
        ),
        (
            {"batching": Static(until_last=True)},
            "batching.until_last=true: works in simulations only; set it to false",
        ),
        (
            {"caching": Radix(eviction="belady")},
            "needs to know future requests, so it works in simulations only",
        ),
        ({"max_iterations": 0}, "max_iterations=0: must be >= 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, RuntimeError), match=message):
        make(**settings)


class Failing(Chunked):
    """A user's policy that gives no token, or uses what does not exist."""

    __slots__ = ()

    def fill(self, view, step, now):
        if self.max_num_batched_tokens == 1:
            step.decode_everything()


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        (1, "fill used step.decode_everything, which does not exist"),
        (2, "fill scheduled nothing with 2 waiting"),
    ],
)
def test_a_user_s_policy_that_fails_is_named_with_its_line(budget, sentence):
    llm = make(batching=Failing(max_num_batched_tokens=budget))
    with pytest.raises(
        PolicyError, match=rf"^batching=Failing \(.*Failing\): at .* s in iteration 0, {sentence}"
    ) as raised:
        llm.generate(prompts(1), GREEDY)
    assert "test_failures.py:" in raised.value.quote
    assert not llm.engine.num_unfinished
