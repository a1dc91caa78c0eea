"""`windtunnel observe` writes prompts: equal contents are equal tokens, and lengths are right."""

from __future__ import annotations

import json

import pytest

from experiments.observe.dialect import OPTIONS, Dialect
from experiments.observe.prompts import TextLength, TextPrompts, TokenPrompts, text_length
from policies.core.request import Prompt, Request, Segment


def make_request(request_id: int, *segments: tuple[int, int], extra: int = 0) -> Request:
    """Returns a request for segments (content, tokens); extra: unshared tokens behind them."""
    runs = tuple(Segment(*segment) for segment in segments)
    return Request(request_id, 0.0, Prompt(sum(run.num_tokens for run in runs) + extra, runs))


def tokens(prompts: TokenPrompts, request: Request) -> list[int]:
    ids: list[int] = json.loads(prompts.write(request))
    return ids


def make_tokens(seed: int = 0) -> TokenPrompts:
    return TokenPrompts(seed=seed, low=100, end=5000)


def test_equal_contents_are_equal_tokens_and_others_are_not():
    prompts = make_tokens()
    first, second = (
        tokens(prompts, request)
        for request in (make_request(0, (7, 50), extra=20), make_request(1, (7, 30), (8, 9)))
    )
    assert len(first) == 70
    assert len(second) == 39
    assert first[:30] == second[:30]
    assert first[30:39] != second[30:39]
    assert tokens(prompts, make_request(0, extra=70)) != tokens(prompts, make_request(1, extra=70))


def test_tokens_depend_on_the_seed_alone():
    request = make_request(3, (7, 50), extra=5)
    assert tokens(make_tokens(), request) == tokens(make_tokens(), request)
    assert tokens(make_tokens(), request) != tokens(make_tokens(seed=1), request)


def test_tokens_are_in_their_range():
    ids = tokens(TokenPrompts(seed=0, low=3, end=6), make_request(0, extra=400))
    assert set(ids) == {3, 4, 5}


def test_an_answer_is_quoted_as_the_server_gave_it():
    prompts = make_tokens()
    prompts.remember(9, [1, 2, 3], "text")
    ids = tokens(prompts, make_request(1, (7, 4), (9, 3), (11, 2)))
    assert ids[4:7] == [1, 2, 3]
    assert len(ids) == 9
    assert tokens(prompts, make_request(1, (9, 5)))[:3] == [1, 2, 3]  # cut short there, made up behind
    assert len(tokens(prompts, make_request(1, (9, 5)))) == 5


def words(prompts: TextPrompts, request: Request) -> list[str]:
    text: str = json.loads(prompts.write(request))
    return text.split()


def test_a_text_has_as_many_words_as_make_its_tokens():
    prompts = TextPrompts(seed=0, length=TextLength(1.5, 20.0))
    assert len(words(prompts, make_request(0, extra=170))) == 100
    assert len(words(prompts, make_request(0, (1, 95), (2, 75)))) == 100  # rounded once, not run by run
    assert len(words(prompts, make_request(0, extra=3))) == 1


def test_texts_share_their_words_as_tokens_do():
    prompts = TextPrompts(seed=0, length=TextLength())
    first, second = (words(prompts, make_request(i, (7, n), extra=9)) for i, n in ((0, 40), (1, 25)))
    assert first[:25] == second[:25]
    assert first[25:34] != second[25:]


def test_an_answer_is_quoted_by_its_text():
    prompts = TextPrompts(seed=0, length=TextLength())
    prompts.remember(9, [], "the answer")
    assert " ".join(words(prompts, make_request(1, (7, 2), (9, 2), (8, 2)))[2:4]) == "the answer"


def test_the_length_of_a_text_is_learnt_from_two():
    assert text_length((16, 43), (64, 115)) == TextLength(1.5, 19.0)


def make_dialect(api: str = "completions", **settings: object) -> Dialect:
    return Dialect(model="m", api=api, options=frozenset(OPTIONS), **settings)  # type: ignore[arg-type]


def test_a_completion_asks_for_its_exact_length():
    body = json.loads(make_dialect(seed=5).body("[1,2]", 7))
    assert body == {
        "model": "m",
        "stream": True,
        "prompt": [1, 2],
        "max_tokens": 7,
        "min_tokens": 7,
        "ignore_eos": True,
        "seed": 5,
        "temperature": 0.0,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def test_a_chat_holds_one_message():
    body = json.loads(make_dialect("chat").body('"hi \\"you\\""', None))
    assert body["messages"] == [{"role": "user", "content": 'hi "you"'}]
    assert not {"max_tokens", "min_tokens", "prompt"} & body.keys()


@pytest.mark.parametrize("option", OPTIONS)
def test_the_option_that_a_refusal_names_goes_first(option):
    left = make_dialect().without(f"Unrecognized request argument supplied: {option}")
    assert left is not None
    assert set(OPTIONS) - left.options == {option}
    if option != "seed":
        assert option not in json.dumps(json.loads(left.body("[1]", 2, wants_ids=True)))


def test_a_refusal_that_names_none_costs_one_after_the_other_until_none_is_left():
    dialect: Dialect | None = make_dialect()
    dropped = []
    while dialect is not None:
        dropped.append(dialect.options)
        dialect = dialect.without("no")
    assert [len(options) for options in dropped] == list(range(len(OPTIONS), -1, -1))


def test_newer_chat_models_get_their_own_name_of_the_limit():
    left = make_dialect("chat").without("'max_tokens' is not supported. Use 'max_completion_tokens' instead.")
    assert left is not None
    assert json.loads(left.body('"a"', 3))["max_completion_tokens"] == 3
