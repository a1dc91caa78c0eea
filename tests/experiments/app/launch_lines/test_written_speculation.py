"""The flags of speculative decoding in the launch commands, and speculation as an axis of the search."""

import json
import shlex

import pytest

from experiments.app.launch_lines.written import sglang_launch, vllm_launch
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import build_candidates
from experiments.capacity.settings import CapacitySettings

R1 = ("model=deepseek_r1", "hardware=h200_sxm", "tensor_parallel_size=8")
BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
HEAD = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"


def candidates(*overrides, **settings):
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    return build_candidates(CapacitySettings(**settings), Variants(source, [*overrides]))[0]


def words_of(launch):
    return shlex.split(launch.command.replace("\\\n", " "))


def flags(launch):
    words = words_of(launch)
    return dict(zip(words, [*words[1:], ""], strict=True))


def vllm_config(*overrides):
    [candidate] = candidates(*overrides)
    launch = vllm_launch(candidate)
    return json.loads(flags(launch)["--speculative-config"]), " ".join(launch.notes)


@pytest.mark.parametrize(
    ("overrides", "config"),
    [
        (["eagle3"], {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3}),
        (
            ["eagle3", "draft_length.num_tokens=2"],
            {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 2},
        ),
        (
            ["draft_model", "speculation.draft.tensor_parallel_size=1"],
            {
                "method": "draft_model",
                "model": "meta-llama/Llama-3.2-1B",
                "num_speculative_tokens": 4,
                "draft_tensor_parallel_size": 1,
            },
        ),
        (
            ["ngram", "speculation.prompt_lookup_min=2"],
            {
                "method": "ngram",
                "num_speculative_tokens": 4,
                "prompt_lookup_max": 5,
                "prompt_lookup_min": 2,
            },
        ),
        (["mtp", *R1], {"method": "mtp", "num_speculative_tokens": 1}),
        (
            ["mtp", *R1, "speculation.disable_eagle_block_drop=true"],
            {"method": "mtp", "num_speculative_tokens": 1, "disable_eagle_block_drop": True},
        ),
        (
            ["mtp", *R1, "draft_length=by_batch_size", f"draft_length.{BY_BATCH_SIZE}=[[1,8,1],[9,64,0]]"],
            {
                "method": "mtp",
                "num_speculative_tokens": 1,
                "num_speculative_tokens_per_batch_size": [[1, 8, 1], [9, 64, 0]],
            },
        ),
    ],
)
def test_vllm_gets_the_fields_of_its_speculative_config(overrides, config):
    found, notes = vllm_config(f"speculation={overrides[0]}", *overrides[1:])
    assert found == config
    assert "speculation" not in notes


def test_suffix_decoding_has_fields_of_its_own():
    found, _ = vllm_config("speculation=suffix")
    assert found["suffix_decoding_max_spec_factor"] == 1.0
    assert len(found) == 6


def test_what_vllm_lacks_is_noted():
    found, notes = vllm_config("speculation=eagle", "speculation/tree=eagle_26", "draft_length=backoff")
    assert found["num_speculative_tokens"] == 5
    assert "speculation.tree: vLLM has no flag for it" in notes
    assert "draft_length=backoff: vLLM has no flag for it" in notes
    [candidate] = candidates("speculation=lookahead")
    assert "--speculative-config" not in vllm_launch(candidate).command
    assert "speculation=lookahead: vLLM does not have it" in vllm_launch(candidate).notes
    _, notes = vllm_config("speculation=medusa")
    assert "no checkpoint of its draft is known" in notes


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["eagle3"], ("EAGLE3", HEAD, "3", "1", "4")),
        (
            ["eagle", "speculation/tree=eagle_26"],
            ("EAGLE", "yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "5", "4", "26"),
        ),
        (["draft_model"], ("STANDALONE", "meta-llama/Llama-3.2-1B", "4", "1", "5")),
        (["mtp", *R1], ("NEXTN", None, "1", "1", "2")),
        (["ngram"], ("NGRAM", None, None, None, "5")),
    ],
)
def test_sglang_gets_steps_branches_and_nodes(overrides, expected):
    [candidate] = candidates(f"speculation={overrides[0]}", *overrides[1:])
    found = flags(sglang_launch(candidate))
    names = ("algorithm", "draft-model-path", "num-steps", "eagle-topk", "num-draft-tokens")
    assert tuple(found.get(f"--speculative-{name}") for name in names) == expected


def test_what_sglang_lacks_is_noted():
    [candidate] = candidates("speculation=suffix", "draft_length=backoff")
    launch = sglang_launch(candidate)
    assert "speculation=suffix: SGLang does not have it" in launch.notes
    [candidate] = candidates("speculation=eagle3", "draft_length=backoff")
    assert "draft_length=backoff: SGLang has no flag for it" in sglang_launch(candidate).notes


def test_a_synchronous_proposer_launches_a_synchronous_engine():
    [ngram], [eagle] = candidates("speculation=ngram"), candidates("speculation=eagle3")
    assert "--no-async-scheduling" in words_of(vllm_launch(ngram))
    assert "--disable-overlap-schedule" in words_of(sglang_launch(ngram))
    assert "--async-scheduling" in words_of(vllm_launch(eagle))
    assert "--speculative-config" not in words_of(vllm_launch(candidates()[0]))


def test_capacity_searches_over_speculation():
    found = candidates(more=(("speculation=none", "speculation=eagle3", "speculation=ngram"),))
    assert [one.scenario.speculation and one.scenario.speculation.method for one in found] == [
        None,
        "eagle3",
        "ngram",
    ]
    assert found[1].name == "speculation=eagle3"
