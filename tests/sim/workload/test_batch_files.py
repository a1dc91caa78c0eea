"""`workload=openai_batch`: the input files of OpenAI's Batch API."""

import json

import pytest

from sim.workload.arrivals import AllAtOnce
from sim.workload.untimed_traces import OpenAiBatch
from tests.sim.workload.test_brought_traces import lines

SYSTEM = {"role": "system", "content": "x" * 256}
"""A prompt of 64 tokens, 4 blocks."""


def request(**body):
    return {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}


def chat(question, **body):
    return request(messages=[SYSTEM, {"role": "user", "content": question}], **{"max_tokens": 20} | body)


def batch(folder, *rows, **settings):
    return OpenAiBatch(path=lines(folder, *rows), arrivals=AllAtOnce(), **settings)


def found(workload, seed=0):
    source = workload.source(seed=seed, max_model_len=10**6)
    return list(source.arrivals()), " ".join(source.notes.remarks)


def test_a_batch_is_read_with_its_limits(tmp_path):
    parts = [{"type": "text", "text": "y" * 40}, {"type": "image_url", "image_url": {"url": "http://x"}}]
    rows = [
        request(prompt="Hello, you", max_tokens=7),
        request(prompt=[5, 6, 7], max_tokens=8),
        request(input="z" * 12, max_output_tokens=9),
        request(messages=[{"role": "user", "content": parts}], max_completion_tokens=10, max_tokens=99),
    ]
    arrivals, remarks = found(batch(tmp_path, *rows))
    lengths = [(one.request.prompt.num_tokens, one.num_output_tokens) for one in arrivals]
    assert lengths == [(3, 7), (3, 8), (3, 9), (11, 10)]
    assert {one.at_s for one in arrivals} == {0.0}
    assert "Images and other parts" in remarks
    assert "as long as their limits" in remarks
    assert len(found(batch(tmp_path, *rows, max_requests=2))[0]) == 2


def test_equal_beginnings_of_prompts_are_equal_contents(tmp_path):
    arrivals, _ = found(batch(tmp_path, chat("a" * 64), chat("b" * 64), chat("a" * 64)))
    first, second, third = ([part.content_id for part in one.request.prompt.segments] for one in arrivals)
    assert first == third
    assert first[:4] == second[:4]
    assert first[5] != second[5]


def test_definitions_of_tools_are_part_of_the_prompt(tmp_path):
    tool = {"type": "function", "function": {"name": "f" * 40}}
    plain, with_tools = found(batch(tmp_path, chat("a"), chat("a", tools=[tool])))[0]
    assert with_tools.request.prompt.num_tokens > plain.request.prompt.num_tokens + 10


def test_outputs_are_drawn_and_cut_at_the_limit(tmp_path):
    rows = [chat("a", max_tokens=100)] * 300 + [request(prompt="b")]
    workload = batch(tmp_path, *rows, output_mean=50.0)
    lengths = [one.num_output_tokens for one in found(workload)[0]]
    assert 35 < sum(lengths) / len(lengths) < 55
    assert max(lengths[:300]) == 100
    assert lengths == [one.num_output_tokens for one in found(workload)[0]]
    assert lengths != [one.num_output_tokens for one in found(workload, seed=1)[0]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            request(prompt="a"),
            r"t.jsonl:1:.*body: expected a limit of the output, max_tokens, or workload.output",
        ),
        (request(prompt="a", max_tokens=0), r"body.max_tokens: expected a whole number of tokens from 1"),
        (request(prompt="a", max_tokens="5"), r"body.max_tokens: expected"),
        (request(max_tokens=5), r"body: expected messages, prompt or input, found max_tokens"),
        (request(messages=[], max_tokens=5), r"body.messages: expected a text"),
        (request(messages=[5], max_tokens=5), r"body.messages\[0\]: expected messages with a content"),
        (request(messages=7, max_tokens=5), r"body.messages\[0\]: expected messages with a content"),
        (request(prompt="a", max_tokens=5, n=3), r"expected n=1"),
        ({"custom_id": "a", "body": [1]}, r"body: expected an object"),
        (
            request(input="a", max_tokens=5) | {"url": "/v1/embeddings"},
            r"url: expected a request that generates",
        ),
    ],
)
def test_requests_that_cannot_be_replayed_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        found(batch(tmp_path, row))


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps({"a": 1})])
def test_other_files_end_in_a_sentence(tmp_path, text):
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"b\.jsonl:1:"):
        found(OpenAiBatch(path=path, arrivals=AllAtOnce()))
