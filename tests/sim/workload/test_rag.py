"""Retrieval-augmented generation: which documents a prompt has, and what prompts share."""

from collections import Counter

import pytest

from sim.workload.arrivals import Constant
from sim.workload.distributions import Fixed
from sim.workload.prefix_sessions import Rag


def make(**settings):
    given = {
        "arrivals": Constant(rate_per_s=1.0),
        "system_prompt_tokens": Fixed(value=100),
        "document_tokens": Fixed(value=50),
        "question_tokens": Fixed(value=10),
        "output_tokens": Fixed(value=5),
        "num_documents": 20,
        "documents_per_question": 3,
        "num_requests": 2000,
    }
    return Rag(**(given | settings))


def documents_of(workload):
    sent = workload.source(seed=0, max_model_len=4096).arrivals()
    return [[s.content_id - 1 for s in a.request.prompt.segments[1:-1]] for a in sent]


def test_a_prompt_is_the_system_prompt_different_documents_and_its_own_question():
    sent = list(make().source(seed=0, max_model_len=4096).arrivals())
    assert {a.request.prompt.num_tokens for a in sent} == {100 + 3 * 50 + 10}
    assert {a.request.prompt.segments[0].content_id for a in sent} == {0}
    assert len({a.request.prompt.segments[-1].content_id for a in sent}) == len(sent)
    for documents in documents_of(make()):
        assert len(set(documents)) == 3
        assert all(0 <= d < 20 for d in documents)


def test_the_first_document_is_drawn_by_zipfs_law():
    """Of 20 documents with skew 1, the most popular has 1 / H(20) = 27.8 % of the first places."""
    first = Counter(documents[0] for documents in documents_of(make(num_requests=5000)))
    harmonic = sum(1 / k for k in range(1, 21))
    assert first[0] / 5000 == pytest.approx(1 / harmonic, abs=0.02)
    assert first[1] / 5000 == pytest.approx(0.5 / harmonic, abs=0.02)


def test_documents_in_order_of_popularity_share_more_prefixes():
    """The documents of a question are the same, but not their order."""
    by_relevance, by_popularity = documents_of(make()), documents_of(make(order="popularity"))
    assert [sorted(documents) for documents in by_relevance] == by_popularity
    first_two = [
        len({tuple(documents[:2]) for documents in found}) for found in (by_relevance, by_popularity)
    ]
    assert first_two[1] < first_two[0] * 0.6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents_per_question": 21}, "documents_per_question=21: must be >= 1 and <= num_documents=20"),
        ({"num_documents": 0}, "num_documents=0: must be >= 1"),
        ({"num_requests": None}, "at least one must be set"),
        ({"document_skew": -0.1}, "document_skew=-0.1: must be finite and >= 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        make(**wrong)
