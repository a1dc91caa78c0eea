"""The parts of the simulated back end: the approximate tokenizer, contents, outputs and their lengths."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.serve.approximate_tokenizer import ApproximateTokenizer
from experiments.serve.simulated.answers import Answers, OutputLengths
from experiments.serve.simulated.contents import ContentIndex
from policies.core.request import Prompt, Request
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.listed import ListedSource

TOKENIZER = ApproximateTokenizer()
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(texts)
def test_tokens_keep_the_text(text):
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert all(0 <= token < TOKENIZER.vocab_size for token in tokens)
    assert all(len(TOKENIZER.decode([token]).encode()) <= TOKENIZER.max_token_bytes for token in tokens)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20))
def test_every_token_id_has_a_text(tokens):
    text = TOKENIZER.decode(tokens)
    assert len(text.encode()) <= len(tokens) * TOKENIZER.max_token_bytes


@given(texts, texts)
def test_tokens_of_whole_words_stay_when_a_text_is_continued(first, second):
    before, whole = TOKENIZER.encode(first + "\n"), TOKENIZER.encode(first + "\n" + "The " + second)
    kept = 0
    while kept < len(before) and before[kept] == whole[kept]:
        kept += 1
    assert len(before) - kept <= 1


few = st.lists(st.integers(0, 2), min_size=1, max_size=70)


@given(st.lists(st.tuples(few, few, st.booleans()), max_size=8))
def test_equal_contents_at_equal_places_have_equal_tokens(requests):
    """A turn follows the request before it, or begins anew; equal (place, id) always means equal tokens."""
    index, known, history = ContentIndex(), {}, []
    for answer_id, (prompt, output, follows) in enumerate(requests):
        prompt = history + prompt if follows else prompt
        segments = index.segments(prompt)
        assert sum(segment.num_tokens for segment in segments) == len(prompt)
        index.finish(prompt, segments, answer_id, output)
        history = prompt + output
        start = 0
        for content_id, num_tokens in (*segments, (answer_id, len(output))):
            tokens = history[start : start + num_tokens]
            before = known.setdefault((start, content_id), tokens)
            shorter = min(len(before), len(tokens))
            assert before[:shorter] == tokens[:shorter]
            start += num_tokens


def test_next_turn_repeats_the_name_of_the_output():
    index, prompt, output = ContentIndex(), list(range(40)), list(range(100, 120))
    segments = index.segments(prompt)
    index.finish(prompt, segments, 7, output)
    following = index.segments([*prompt, *output, 5, 6])
    assert following[: len(segments) + 1] == (*segments, (7, 20))
    assert index.segments([*prompt, *output[:-1], 999]) != following[:-1]
    assert index.segments([*prompt, *output, 5, 6], "salt") != following
    assert index.segments(prompt, "salt") != segments


def write(kind, num_tokens, **options):
    answers = Answers(kind, TOKENIZER, 0)
    return answers.write(3, TOKENIZER.encode("Good day."), num_tokens, ends=True, seed=None, **options)


def text_of(answer):
    return answer.text(0, answer.num_tokens)


@pytest.mark.parametrize("kind", ["random", "echo"])
@given(st.lists(st.integers(0, 100), max_size=5))
def test_texts_of_tokens_make_up_the_text_however_they_are_read(kind, places):
    answer, again = write(kind, 100), write(kind, 100)
    borders = [0, *sorted(places), 100]
    parts = [(answer.token_ids(*pair), answer.text(*pair)) for pair in pairwise(borders)]
    tokens = [token for part, _ in parts for token in part]
    assert len(tokens) == 100
    assert "".join(text for _, text in parts) == TOKENIZER.decode(tokens) == text_of(again)
    assert again.token_ids(0, 100) == tuple(tokens)


def test_a_long_output_is_drawn_as_it_is_read():
    answer = write("random", 10**15)
    assert answer.num_tokens == 10**15
    assert len(answer.token_ids(0, 3)) == 3


def test_echo_repeats_the_prompt():
    assert text_of(write("echo", 9)).startswith("Good day.Good day.")


def test_dataset_is_repeated_in_order(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(json.dumps({"text": text}) for text in ("naïve", "日本語")))
    answers = Answers("dataset", TOKENIZER, 0, file)
    written = [text_of(answers.write(i, [1], 6, ends=True, seed=None)) for i in range(3)]
    assert written[0].startswith("naïve")
    assert written[1].startswith("日本語")
    assert written[2] == written[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no line"), ("{", ":1: expected"), ('{"text": 5}', ":1: expected"), ('{"text": "a"}\n[]', ":2: ")],
)
def test_bad_dataset_is_refused_with_its_line(tmp_path, content, message):
    file = tmp_path / "texts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Answers("dataset", TOKENIZER, 0, file)
    with pytest.raises(ValueError, match="cannot be read"):
        Answers("dataset", TOKENIZER, 0, tmp_path / "none")


@given(st.integers(1, 30), st.integers(0, 30), st.data())
def test_stop_string_ends_an_output_at_its_first_place(num_tokens, min_tokens, data):
    whole = text_of(write("random", num_tokens))
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 8))]
    answer = asyncio.run(write("random", num_tokens).stopped([stop, "@@"], min_tokens))
    text = text_of(answer)
    assert len(answer.token_ids(0, num_tokens)) == answer.num_tokens
    assert whole.startswith(text)
    if answer.num_tokens == num_tokens and answer.stop_reason is None:
        assert text == whole
        assert min_tokens >= 1
    else:
        assert answer.num_tokens > min_tokens
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert whole[len(text) :].startswith(stop)


def test_a_long_output_is_searched_for_stop_strings_too():
    answer = write("random", 5000)
    word = text_of(write("random", 5000)).split()[7]
    assert asyncio.run(answer.stopped([word, "@@"], 0)).num_tokens <= 8


class Workload:
    """Three requests per source; the seed shows in their output lengths."""

    def source(self, *, seed, max_model_len):
        arrivals = [Arrival(Request(i, i, Prompt(4)), 10 * seed + i + 1) for i in range(3)]
        return ListedSource(arrivals, notes=WorkloadNotes())


def test_lengths_go_on_with_new_requests_after_the_last():
    lengths = OutputLengths("workload", Workload(), 0, 100)
    drawn = [lengths.draw(100, 0, ignore_eos=False)[0] for _ in range(6)]
    assert drawn == [1, 2, 3, 11, 12, 13]


@given(st.integers(1, 50), st.integers(0, 50), st.booleans())
def test_length_is_within_the_limits(max_tokens, min_tokens, ignore_eos):
    min_tokens = min(min_tokens, max_tokens)
    lengths = OutputLengths("workload", Workload(), 2, 100)  # the first output has 21 tokens
    num_tokens, ends = lengths.draw(max_tokens, min_tokens, ignore_eos=ignore_eos)
    assert min_tokens <= num_tokens <= max_tokens
    assert ends == (not ignore_eos and max(21, min_tokens) <= max_tokens)


def test_pairs_of_words_differ_between_requests():
    answers = Answers("random", TOKENIZER, 0)
    written = [answers.write(i, [1], 20, ends=True, seed=None).token_ids(0, 20) for i in range(5)]
    assert all(a != b for a, b in pairwise(written))
