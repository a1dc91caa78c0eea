"""Acceptance from recorded token ids, compared with drafts that are made one by one."""

import json

import numpy as np
import pytest

from policies.speculation.matching import SEPARATOR, SuffixRules, Text, ngram_draft
from policies.speculation.proposers import Ngram, Suffix
from sim.speculation.acceptance.iid import Iid
from sim.speculation.acceptance.text import TextAcceptance
from sim.workload import token_ids
from sim.workload.token_ids import TokenIdsJsonl, kept_token_ids
from tests.sim.speculation.drafts import chain, request

OTHERWISE = Iid(rate=0.5)


def recorded(folder, rows):
    path = folder / "texts.jsonl"
    lines = [
        {"arrival_s": float(n), "prompt_token_ids": list(map(int, p)), "output_token_ids": list(map(int, o))}
        for n, (p, o) in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def random_rows(seed, num_rows=6, vocabulary=4):
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, vocabulary, rng.integers(1, 60)), rng.integers(0, vocabulary, rng.integers(1, 40)))
        for _ in range(num_rows)
    ]


def arrivals(path):
    return list(TokenIdsJsonl(path=path).source(seed=0, max_model_len=10_000).arrivals())


def num_equal(draft, output):
    equal = 0
    while equal < min(len(draft), len(output)) and draft[equal] == output[equal]:
        equal += 1
    return equal


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("reference", [(), (0, 1, 2, 3, 0, 2)])
def test_ngram_verdicts_are_those_of_drafts_made_one_by_one(tmp_path, seed, reference):
    rows = random_rows(seed)
    path = recorded(tmp_path, rows)
    proposer = Ngram(
        draft=None,
        num_speculative_tokens=3,
        prompt_lookup_min=1 + seed % 2,
        prompt_lookup_max=3,
        reference=reference,
    )
    model = TextAcceptance(path=path, otherwise=OTHERWISE)
    model.check(proposer)
    for arrival, (prompt, output) in zip(arrivals(path), rows, strict=True):
        verdicts = model.verdicts(arrival.request, 0, len(output), proposer)
        for position in range(len(output)):
            context = np.concatenate([np.array(reference, np.int64), prompt, output[:position]])
            draft = ngram_draft(context, proposer.min_ngram, 3, 3)
            assert verdicts.proposed[position] == len(draft)
            assert verdicts.accepted[position] == num_equal(draft, output[position:])


@pytest.mark.parametrize("num_cached", [0, 1, 3, 100])
def test_suffix_verdicts_are_those_of_drafts_made_one_by_one(tmp_path, num_cached):
    rows = random_rows(num_cached)
    path = recorded(tmp_path, rows)
    proposer = Suffix(
        draft=None,
        num_speculative_tokens=4,
        suffix_decoding_max_tree_depth=7,
        suffix_decoding_max_cached_requests=num_cached,
        suffix_decoding_min_token_prob=0.2,
    )
    rules = SuffixRules(7, 1.0, 0.2)
    model = TextAcceptance(path=path, otherwise=OTHERWISE)
    for row, (arrival, (prompt, output)) in enumerate(zip(arrivals(path), rows, strict=True)):
        verdicts = model.verdicts(arrival.request, 0, len(output), proposer)
        for position in range(len(output)):
            context = [*prompt.tolist(), *output[:position].tolist()]
            own, answers = Text(), Text()
            own.extend(context)
            for _, earlier in rows[max(0, row - num_cached + 1) : row] if num_cached else ():
                answers.extend([*earlier.tolist(), SEPARATOR])
            answers.extend(output[:position].tolist())
            draft = own.draft(context, 4, rules)
            of_answers = answers.draft(context, 4, rules)
            if num_cached and of_answers.score > draft.score:
                draft = of_answers
            assert verdicts.proposed[position] == len(draft.tokens)
            assert verdicts.accepted[position] == num_equal(draft.tokens, output[position:].tolist())


def test_an_answer_that_repeats_the_prompt_is_drafted_almost_whole(tmp_path):
    prompt = np.arange(100)
    path = recorded(tmp_path, [(prompt, prompt[20:80])])
    proposer = Ngram(draft=None, num_speculative_tokens=8, prompt_lookup_max=2)
    (arrival,) = arrivals(path)
    verdicts = TextAcceptance(path=path, otherwise=OTHERWISE).verdicts(arrival.request, 0, 60, proposer)
    assert verdicts.accepted[:2].tolist() == [0, 0]  # no two tokens of the answer yet
    assert verdicts.accepted[2:53].tolist() == [8] * 51
    assert verdicts.accepted[53:].tolist() == [7, 6, 5, 4, 3, 2, 1]


def test_an_answer_that_was_given_before_is_drafted_from_earlier_answers(tmp_path):
    answer = np.arange(1000, 1050)
    path = recorded(tmp_path, [(np.arange(20), answer), (np.arange(100, 130), answer)])
    proposer = Suffix(draft=None, num_speculative_tokens=8)
    first, second = arrivals(path)
    model = TextAcceptance(path=path, otherwise=OTHERWISE)
    assert model.verdicts(first.request, 0, 50, proposer).accepted.max() == 0
    accepted = model.verdicts(second.request, 0, 50, proposer).accepted
    assert accepted[9:40].tolist() == [8] * 31
    alone = Suffix(draft=None, num_speculative_tokens=8, suffix_decoding_max_cached_requests=0)
    assert model.verdicts(second.request, 0, 50, alone).accepted.max() == 0


def test_a_request_without_a_recorded_text_has_the_other_acceptance(tmp_path):
    path = recorded(tmp_path, random_rows(0))
    model = TextAcceptance(path=path, otherwise=OTHERWISE)
    proposer = Ngram(draft=None, num_speculative_tokens=3)
    expected = OTHERWISE.verdicts(request(2), 5, 100, proposer).accepted.tolist()
    assert model.verdicts(request(2), 5, 100, proposer).accepted.tolist() == expected
    longer = arrivals(path)[2].request
    assert model.verdicts(longer, 5, 100, proposer).accepted.tolist() == expected


def test_requests_are_found_by_their_prompt_in_a_window_of_the_file(tmp_path):
    rows = random_rows(3)
    path = recorded(tmp_path, rows)
    model = TextAcceptance(path=path, otherwise=OTHERWISE)
    proposer = Ngram(draft=None, num_speculative_tokens=3, prompt_lookup_max=2)
    whole = arrivals(path)[4].request
    window = list(TokenIdsJsonl(path=path, start_s=4).source(seed=0, max_model_len=10_000).arrivals())
    assert window[0].request.request_id == 0
    num_positions = len(rows[4][1])
    expected = model.verdicts(whole, 0, num_positions, proposer)
    found = model.verdicts(window[0].request, 0, num_positions, proposer)
    assert found.accepted.tolist() == expected.accepted.tolist()


def test_rejects_a_proposer_that_matches_no_tokens(tmp_path):
    model = TextAcceptance(path=recorded(tmp_path, random_rows(0)), otherwise=OTHERWISE)
    with pytest.raises(ValueError, match=r"only speculation=ngram and suffix draft .* is draft_model"):
        model.check(chain(3))


def test_the_workload_replays_lengths_and_shared_blocks(tmp_path):
    shared = np.arange(40)
    path = recorded(tmp_path, [(shared, [1, 2]), (np.concatenate([shared[:32], [7]]), [3])])
    first, second = arrivals(path)
    assert [first.request.arrival_s, second.request.arrival_s] == [0.0, 1.0]
    assert [first.num_output_tokens, second.num_output_tokens] == [2, 1]
    assert [segment.num_tokens for segment in first.request.prompt.segments] == [16, 16, 8]
    ids = [[segment.content_id for segment in a.request.prompt.segments] for a in (first, second)]
    assert ids[0][:2] == ids[1][:2]
    assert ids[0][2] != ids[1][2]
    assert [row.output.tolist() for row in kept_token_ids(path)] == [[1, 2], [3]]


def test_a_trace_may_have_more_tokens_than_the_texts_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "MAX_KEPT_TOKENS", 5)
    path = recorded(tmp_path, [([1, 2], [3]), ([4], [5]), ([6], [7])])
    assert TokenIdsJsonl(path=path).source(seed=0, max_model_len=100).num_requests == 3
    with pytest.raises(ValueError, match=r"texts.jsonl:3:1: must have at most 5 tokens"):
        TextAcceptance(path=path, otherwise=OTHERWISE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "texts.jsonl:1:1: expected JSON lines with arrival_s, prompt_token_ids, output_token_ids"),
        ("[1]\n", ":1:1: expected a JSON object, found"),
        ("{\n", ":1:1: expected one JSON object per line"),
        ("[" * 100_000 + "\n", ":1:1: nests values too deeply"),
        ('{"arrival_s": 0, "prompt_token_ids": [1]}', ":1:1: no key output_token_ids; expected arrival_s"),
        ('{"arrival_s": "a", "prompt_token_ids": [1], "output_token_ids": [1]}', "arrival_s: expected a fin"),
        ('{"arrival_s": 0, "prompt_token_ids": [], "output_token_ids": [1]}', "prompt_token_ids: expected a"),
        ('{"arrival_s": 0, "prompt_token_ids": [1], "output_token_ids": [-1]}', "output_token_ids: expected"),
        ('{"arrival_s": 0, "prompt_token_ids": [1], "output_token_ids": [1.5]}', "output_token_ids: expect"),
        ('{"arrival_s": 0, "prompt_token_ids": [4294967296], "output_token_ids": [1]}', "prompt_token_ids: "),
    ],
)
def test_rejects_files_without_token_ids(tmp_path, text, message):
    path = tmp_path / "texts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        TextAcceptance(path=path, otherwise=OTHERWISE)


def test_rejects_arrivals_that_are_no_times(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"arrival_s": -1, "prompt_token_ids": [1], "output_token_ids": [1]}\n')
    with pytest.raises(ValueError, match=r":1:2: arrival_s: expected a finite number of seconds >= 0"):
        arrivals(path)
