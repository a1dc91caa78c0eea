"""Speculation on the engine with settings, proposers and requests that cannot be."""

import time

import pytest
import torch

from policies.batching.chunked import Chunked
from policies.batching.splitfuse import SplitFuse
from policies.speculation.draft_lengths import Fixed
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.settings import KEYS, SpeculationSettings
from tests.realengine.small_models import make
from tests.realengine.speculation.test_lossless import GREEDY, NGRAM, prompts, tokens_of

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "magic"}, "method=magic is not known; must be one of draft_model, eagle"),
        ({"num_speculative_tokens": 3}, "method=None is not known"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        (NGRAM | {"num_speculative_tokens": 0}, "num_speculative_tokens=0: must be 1 to 128"),
        (NGRAM | {"num_speculative_tokens": -1}, "num_speculative_tokens=-1: must be 1 to 128"),
        (NGRAM | {"prompt_lookup_min": 9}, "prompt_lookup_min=9: must be 1 to 3"),
        (NGRAM | {"promt_lookup_max": 9}, "promt_lookup_max is not a setting of method=ngram; allowed are"),
        (NGRAM | {"model": "x"}, "model=x: method=ngram drafts without a model; remove it"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "model: method=eagle needs the folder"),
        (
            {"method": "medusa", "model": "x", "speculative_token_tree": "[(0,), (1, 0)]"},
            r"speculative_token_tree=\[\(0,\), \(1, 0\)\] is no tree: path \[1, 0\] continues \[1\]",
        ),
        (
            {"method": "medusa", "model": "x", "speculative_token_tree": "print(1)"},
            r"speculative_token_tree=print\(1\) is no tree",
        ),
        (NGRAM | {"draft_sample_method": "best"}, "draft_sample_method=best: must be one of greedy, prob"),
        (NGRAM | {"skipped_layers": [1]}, r"skipped_layers=\[1\]: only method=self_speculative"),
        (
            {"method": "dflash"},
            "method=dflash is vLLM's, and this engine has it not; must be one of draft_model",
        ),
        (
            NGRAM | {"rejection_sample_method": "synthetic"},
            "rejection_sample_method='synthetic': is vLLM's, and this engine has only 'standard': drafts are",
        ),
        (NGRAM | {"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2: is vLLM's, .* remove it"),
        (NGRAM | {"host_timeout_s": 0}, "host_timeout_s=0: must be > 0 seconds"),
        ("ngram", "speculative_config='ngram': must be a mapping with the keys of vLLM's speculative_config"),
        ({"method": ["ngram"]}, r"method=\['ngram'\] is not known"),
        (NGRAM | {"num_speculative_tokens": "3"}, "num_speculative_tokens='3': must be a whole number"),
        (NGRAM | {"num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5: must be a whole number"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens=True: must be a whole number"),
        (NGRAM | {"prompt_lookup_max": None}, "prompt_lookup_max=None: must be a whole number"),
        (NGRAM | {"reference": "abc"}, "reference='abc': must be a list of whole numbers"),
        (NGRAM | {"reference": [1, 97]}, "reference: token 97 must be < 97, the target's vocabulary"),
        (NGRAM | {"draft_length": "adaptive"}, "draft_length='adaptive': must be a policy, such as"),
        (NGRAM | {"draft_length": Fixed(num_tokens=5)}, "draft_length.num_tokens=5: must be <= 4"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4]]}, "must be a list of .smallest, largest"),
        (NGRAM | {"host": 5}, "host=5: must have the methods draft and forget"),
        (NGRAM | {"host_timeout_s": "x"}, "host_timeout_s='x': must be a number"),
        (NGRAM | {"tpot_s": -1}, "tpot_s=-1: must be > 0 seconds"),
        (
            NGRAM | {"draft_sample_method": "probabilistic"},
            "probabilistic: method=ngram drafts the likeliest",
        ),
        (
            NGRAM | {"speculative_token_tree": "[(0,)]"},
            "speculative_token_tree is not a setting of method=ng",
        ),
        ({"model": 5, "num_speculative_tokens": 3}, "model=5: must be a path, or an Architecture"),
        (
            {"method": "eagle", "model": ["x", "y"], "num_speculative_tokens": 3},
            "drafts with one model, not 2",
        ),
        ({"method": "medusa", "model": "x", "speculative_token_tree": [(-1,)]}, r"path \[-1\] has rank -1"),
        ({"method": "medusa", "model": "x", "speculative_token_tree": [(1,)]}, r"and \[0\] is no path"),
        ({"method": "specinfer_tree", "model": "x"}, "widths is missing; set it, for example to"),
        (
            {"method": "specinfer_tree", "model": "x", "widths": 3},
            "widths=3: must be a list of whole numbers",
        ),
        (
            {"method": "self_speculative", "num_speculative_tokens": 2, "skipped_layers": 3},
            "skipped_layers=3: ",
        ),
        (
            NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 2]], "draft_length": Fixed()},
            "is a draft_length of its own; remove one of them",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make(speculative_config=config)


def test_keys_of_vllm_that_ask_for_what_the_engine_does_are_accepted():
    neutral = {key: each.value for key, each in KEYS.items()}
    assert SpeculationSettings.of(NGRAM | neutral) == SpeculationSettings.of(NGRAM)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"method": "suffix"}, ("num_speculative_tokens", 24)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, ("num_speculative_tokens", 9)),
        ({"method": "mtp"}, ("num_speculative_tokens", 1)),
        ({"method": "mtp", "num_nextn_predict_layers": 2}, ("num_speculative_tokens", 2)),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2},
            ("prompt_lookup_max", 2),
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}, ("min_ngram", 3)),
        ({"method": "ngram", "num_speculative_tokens": 2}, ("min_ngram", 5)),
    ],
)
def test_settings_that_are_not_given_have_vllm_s_defaults(config, expected):
    name, value = expected
    assert getattr(SpeculationSettings.of(config).proposer, name) == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batching": SplitFuse()}, "speculation=ngram, batching=splitfuse: pauses sequences by the blocks"),
        (
            {"batching": Chunked(max_num_batched_tokens=4)},
            "max_num_batched_tokens=4: must be >= 5 for the pass",
        ),
        (
            {"batching": Chunked(long_prefill_token_threshold=4)},
            "long_prefill_token_threshold=4: must be 0 or >= 5",
        ),
    ],
)
def test_policies_that_the_simulator_refuses_are_refused_here(settings, message):
    with pytest.raises(ValueError, match=f"speculative_config: .*{message}"):
        make(**settings, speculative_config=NGRAM)


def test_several_answers_to_a_prompt_are_refused():
    (output,) = make(speculative_config=NGRAM).generate([prompts()[1]], SamplingParams(n=2, max_tokens=3))
    assert "an engine that speculates serves one answer per request" in output.error


class Drafts:
    """Drafts wrongly for the request with the largest first token."""

    def __init__(self, way):
        self._way = way

    def draft(self, request_id, prompt, output, num_tokens):
        if prompt[0] != 3:
            return [5] * num_tokens
        return self._way(num_tokens)

    def forget(self, request_id, output):
        pass


def raising(num_tokens):
    raise KeyError("no such text")


def hanging(num_tokens):
    time.sleep(60)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (raising, "Drafts raised KeyError: 'no such text'"),
        (hanging, r"Drafts has not returned within 2.5 s (host_timeout_s)"),
        (lambda num: [200], "Drafts.draft returned token 200: must be >= 0 and < 97"),
        (lambda num: [-1], "Drafts.draft returned token -1: must be >= 0 and < 97"),
        (lambda num: [1] * (num + 1), "Drafts.draft returned 5 tokens: must be at most num_tokens=4"),
        (lambda num: None, "Drafts.draft returned None: must be a list of token ids"),
    ],
    ids=["raises", "hangs", "beyond the vocabulary", "negative", "too many", "nothing"],
)
def test_a_proposer_that_fails_ends_its_request_with_the_reason(way, reason):
    config = NGRAM | {"host": Drafts(way), "host_timeout_s": 2.5 if way is hanging else 600.0}
    outputs = make(speculative_config=config).generate(prompts(), GREEDY)
    assert [output.error for output in outputs] == [reason if index == 3 else None for index in range(6)]
    wanted = tokens_of(make().generate(prompts(), GREEDY))
    assert [output.outputs[0].token_ids for output in outputs if not output.error] == [
        tokens for index, tokens in enumerate(wanted) if index != 3
    ]
    assert outputs[3].outputs[0].finish_reason == "error"


def test_a_draft_length_policy_that_fails_is_named():
    class Failing:
        needs_cost = False
        reads_sequences = False
        num_repeats = 1

        def num_draft_tokens(self, view):
            raise KeyError("k")

    with pytest.raises(Exception, match="draft_length=Failing"):
        make(speculative_config=NGRAM | {"draft_length": Failing()}).generate(prompts(), GREEDY)
