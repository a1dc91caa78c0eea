"""The settings of speculation: every choice is built, memory counts drafts, and what cannot be is refused."""

import numpy as np
import pytest
from omegaconf import OmegaConf

from experiments.app.api import simulate
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, first_comment
from experiments.app.settings.hydra_errors import composed
from hwmodels.speculation.draft import HostDraft
from policies.core.endings import LateEnds
from policies.speculation.proposers import Ngram
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario
from sim.setup.notes import pool_notes
from sim.setup.replica_bounds import Demand, decode_token_seconds, idle_latencies

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("workload=poisson", "workload.num_requests=2")
FILES = sorted((CONFIG_DIR / "speculation").rglob("*.yaml"))
MODEL_OF = {"mtp": "deepseek_r1", "specinfer_drafts": "llama2_7b"}
"""Choices that do not go with the default model."""


def build(*overrides):
    return build_scenario(SOURCE.compose([*SMALL, *overrides]))


def choices(group):
    return [file.stem for file in sorted((CONFIG_DIR / group).glob("*.yaml"))]


@pytest.mark.parametrize("choice", choices("speculation"))
def test_every_choice_of_speculation_builds(choice):
    scenario = build(f"speculation={choice}", f"model={MODEL_OF.get(choice, 'llama3_1_8b')}")
    if choice == "none":
        assert (scenario.speculation, scenario.draft_length, scenario.acceptance) == (None, None, None)
        return
    proposer = scenario.speculation
    assert proposer.method == choice.replace("drafts", "tree")
    tree = proposer.tree
    assert proposer.num_speculative_tokens == (tree.num_nodes if tree else proposer.num_speculative_tokens)
    assert type(scenario.draft_length).__name__ == "Fixed"
    assert type(scenario.acceptance).__name__ == "Iid"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_choice_says_what_it_is(file):
    assert first_comment(file)


@pytest.mark.parametrize(
    ("choice", "nodes", "depth"), [("medusa_64", 63, 4), ("eagle_26", 25, 5), ("widths", 20, 3)]
)
def test_a_tree_sets_the_number_of_draft_tokens(choice, nodes, depth):
    for proposer in ("medusa", "eagle", "eagle3")[depth > 4 :]:  # there are 4 heads
        found = build(f"speculation={proposer}", f"speculation/tree={choice}").speculation
        assert (found.num_speculative_tokens, found.tree.num_nodes, found.tree.depth) == (nodes, nodes, depth)


def test_the_draft_of_a_model_is_chosen_with_the_model():
    """Llama-3.1-8B has a published EAGLE-3 layer; one of Llama-3.2-3B has the model's widths."""
    published = build("speculation=eagle3").speculation
    assert published.model == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert (published.draft.kind, published.draft.vocab_size) == ("eagle3", 32000)
    assert (published.draft.intermediate_size, published.draft.attention) == (14336, None)
    other = build("speculation=eagle3", "model=llama3_2_3b").speculation
    assert (other.model, other.draft.intermediate_size) == (None, None)


DRAFTS = sorted((CONFIG_DIR / "speculation" / "draft").glob("*.yaml"))


@pytest.mark.parametrize("file", DRAFTS, ids=lambda file: file.stem)
def test_every_published_draft_is_chosen_with_its_model(file):
    method, model = file.stem.split("_", 1)
    scenario = build(f"speculation={method}", f"model={model}")
    assert scenario.speculation.model == OmegaConf.load(file).model
    assert scenario.speculation.draft.intermediate_size == OmegaConf.load(file).draft.intermediate_size


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama2_7b", 0.24),
        ("llama2_13b", 0.37),
        ("llama2_70b", 0.99),
        ("vicuna_7b", 0.24),
        ("vicuna_13b", 0.37),
        ("vicuna_33b", 0.56),
    ],
)
def test_eagle_layers_have_their_published_parameters(model, billions):
    """Figures of the README of SafeAILab/EAGLE; two bytes each."""
    scenario = build("speculation=eagle", f"model={model}")
    weight_bytes = scenario.speculation.draft.weight_bytes(scenario.model, scenario.layout)
    assert round(weight_bytes / 2e9, 2) == billions


def test_a_pool_has_its_own_speculation():
    pools = build("pools=two_gpus", "pools.large.speculation=ngram").pools
    assert {name: getattr(pool.speculation, "method", None) for name, pool in pools.items()} == {
        "large": "ngram",
        "small": None,
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speculation=eagle3"], None),
        (["speculation=none", "pools.decode.speculation=ngram"], None),
        (["speculation=none", "pools.decode.speculation=self_speculative"], None),
        (
            ["speculation=none", "pools.decode.speculation=eagle3"],
            "pools.decode.speculation: its draft has KV of its own, which pools.prefill does not compute .*"
            "such as ngram",
        ),
    ],
)
def test_a_draft_with_kv_needs_prompts_with_it(overrides, message):
    if message is None:
        build("pools=disaggregated", *overrides)
        return
    with pytest.raises(ConfigError, match=message):
        build("pools=disaggregated", *overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["ngram", "speculation.num_speculative_tokens=-1"],
            r"^speculation.num_speculative_tokens=-1: must be 1",
        ),
        (["ngram", "speculation.num_speculative_tokens=0"], r"=0: must be 1 to 128; set speculation=none to"),
        (["eagle", "speculation.num_speculative_tokens=129"], "=129: must be 1 to 128$"),
        (
            ["medusa", "speculation.num_speculative_tokens=5"],
            r"^speculation.num_speculative_tokens=5: must be <= speculation.draft.num_heads=4",
        ),
        (
            ["medusa", "speculation/tree=eagle_26"],
            "^speculation.tree: its depth 5: must be <= speculation.draft.num_heads=4",
        ),
        (
            ["mtp", "model=deepseek_r1", "speculation.num_nextn_predict_layers=2"],
            r"num_nextn_predict_layers=2: must be <= 1, the modules of deepseek-r1",
        ),
        (
            [
                "mtp",
                "model=minimax_m2_5",
                "speculation.num_nextn_predict_layers=3",
                "speculation.num_speculative_tokens=4",
            ],
            "num_speculative_tokens=4: must be a multiple of num_nextn_predict_layers=3, or less",
        ),
        (["mtp"], "^speculation=mtp: llama-3.1-8b has no layers for .*such as deepseek_r1$"),
        (
            ["eagle", "speculation/tree=widths", "speculation.num_speculative_tokens=4"],
            "num_speculative_tokens=4: must be 20, the nodes of the tree; set it, or set tree=null",
        ),
        (
            ["eagle", "speculation/tree=widths", "speculation.tree.widths=[2,0]"],
            r"tree.*widths=\[2, 0\]: must",
        ),
        (["medusa", "speculation/tree=medusa_64", "speculation.tree.paths=[[0],[1,0]]"], "which is no path"),
        (
            ["draft_model", "model@speculation.draft.model=qwen3_0_6b"],
            r"^speculation.draft.model=qwen3-0.6b: has 151,936 tokens in its vocabulary, .*has 128,256",
        ),
        (["eagle3", "speculation.draft.vocab_size=200000"], "draft.vocab_size=200000: must be <= 128256"),
        (["eagle3", "model=mixtral_8x7b"], "^speculation.draft.intermediate_size=null: .*give its width"),
        (
            ["eagle", "model=vicuna_33b", "tensor_parallel_size=2"],
            "^speculation.draft.attention: tensor_parallel_size=2: must divide .*of eagle of vicuna-33b-v1.3",
        ),
        (
            ["self_speculative", "speculation.draft.num_layers=32"],
            "draft.num_layers=32: must be < 32, the lay",
        ),
        (["eagle", "latency=speculative"], "speculation=eagle, latency=speculative: .*latency=calibrated"),
        (
            ["draft_model", "batching.max_num_batched_tokens=5"],
            r"max_num_batched_tokens=5: must be >= 6 .* lower speculation.num_speculative_tokens=4",
        ),
        (
            ["ngram", "batching.long_prefill_token_threshold=4"],
            "batching.long_prefill_token_threshold=4: must be 0 or >= 5, the tokens of a pass",
        ),
        (
            ["ngram", "batching=tgi", "batching.max_batch_prefill_tokens=4"],
            "batching.max_batch_prefill_tokens=4: must be >= 5, the tokens of a pass",
        ),
        (
            ["ngram", "adapters=unified_paging"],
            "adapters=unified_paging: .*choose adapters=fixed_slots, exchange or merged",
        ),
        (["ngram", "~acceptance"], "acceptance"),
        (
            ["eagle3", "batching=splitfuse"],
            "^speculation=eagle3, batching=splitfuse: .*choose batching=chunked",
        ),
        (
            ["ngram", "draft_length=slo_aware", "slo=none"],
            "draft_length=slo_aware: needs a TPOT to keep; .* or draft_length.tpot_s",
        ),
        (
            ["ngram", "draft_length.num_tokens=5"],
            "draft_length.num_tokens=5: must be <= 4, speculation.num_speculative_tokens, or null for all",
        ),
        (
            ["medusa", "speculation/tree=medusa_64", "draft_length=backoff", "draft_length.num_tokens=5"],
            "draft_length.num_tokens=5: must be <= 4, the levels of the tree, or null",
        ),
        (["ngram", "draft_length.num_tokens=-1"], "draft_length.num_tokens=-1: must be >= 0"),
        (["ngram", "acceptance.rate=1.5"], "acceptance.rate=1.5: must be"),
    ],
    ids=str,
)
def test_rejects_drafts_that_cannot_be(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build_scenario(composed(SOURCE, [*SMALL, f"speculation={overrides[0]}", *overrides[1:]]))


@pytest.mark.parametrize("caching", ["contiguous", "buddy", "streaming_llm", "h2o", "snapkv", "fastgen"])
def test_rejects_a_cache_that_cannot_carry_drafts(caching):
    message = r"speculation=eagle, caching=\w+: cannot keep .*; choose caching=paged, prefix, radix or tiered"
    with pytest.raises(ConfigError, match=message):
        build("speculation=eagle", f"caching={caching}", "engine.max_model_len=2048")


@pytest.mark.parametrize(
    "caching", ["paged", "paged_watermark", "prefix", "prefix_pinned", "radix", "tiered"]
)
def test_other_caches_carry_drafts(caching):
    assert build("speculation=eagle", f"caching={caching}").speculation is not None


def test_drafts_take_memory_of_the_kv_cache():
    """Llama-3.2-1B: 2.3 GiB of weights and 32 KiB of KV per token beside the 128 KiB of Llama-3.1-8B."""
    plain, drafted = (build(f"speculation={name}").plan_memory() for name in ("none", "draft_model"))
    assert drafted.draft_bytes == pytest.approx(2 * 1.2358e9, rel=1e-3)
    assert drafted.weights_bytes == plain.weights_bytes
    assert drafted.kv_bytes_per_token - plain.kv_bytes_per_token == 32 * 1024
    left = plain.num_blocks * 16 * plain.kv_bytes_per_token - drafted.draft_bytes
    assert drafted.num_blocks == pytest.approx(left / 16 / drafted.kv_bytes_per_token, abs=2)


@pytest.mark.parametrize("choice", ["ngram", "suffix", "lookahead", "self_speculative"])
def test_a_draft_without_weights_leaves_all_blocks(choice):
    plain = build("speculation=none").plan_memory()
    assert build(f"speculation={choice}").plan_memory() == plain


def test_a_draft_that_does_not_fit_says_how_much_is_missing():
    """16.1 GB of weights of 24 GB; a second model as large does not fit in the 5 GiB left for KV."""
    with pytest.raises(
        ConfigError,
        match=r"^speculation: llama-3.1-8b and its draft of 15.0 GiB need 3\d.\d GiB on each RTX 4090, "
        r"\d+.\d GiB more than the 21.7 GiB it may use, and the model alone fits; choose a smaller draft; ",
    ):
        build_run(
            SOURCE.compose(
                [
                    *SMALL,
                    "hardware=rtx_4090",
                    "speculation=draft_model",
                    "model@speculation.draft.model=llama3_1_8b",
                    "batching.max_num_batched_tokens=2048",
                    "engine.max_num_seqs=256",
                ]
            )
        )


@pytest.mark.parametrize(("choice", "overlaps"), [("eagle3", True), ("ngram", False), ("medusa", False)])
def test_the_engine_is_synchronous_if_drafts_need_the_tokens_first(choice, overlaps):
    scenario = build(f"speculation={choice}")
    assert scenario.engine.host.overlapped
    assert scenario.host.overlapped is scenario.replica.host.overlapped is overlaps
    assert isinstance(scenario.core(100)._ends, LateEnds) == overlaps
    notes = " ".join(pool_notes(scenario, scenario.iteration_model(), None, scenario.workload))
    assert (f"speculation={choice}: is not run with asynchronous scheduling" in notes) is not overlaps


def test_a_setting_that_nothing_uses_is_noted_once(capsys):
    composed(SOURCE, [*SMALL, "acceptance.rate=0.71"])
    composed(SOURCE, [*SMALL, "acceptance.rate=0.71", "speculation=ngram"])
    assert capsys.readouterr().err == "windtunnel: acceptance.rate=0.71 is not used with speculation=none.\n"


def test_no_bound_on_latency_excludes_what_speculation_can_reach():
    """A pass gives a sequence up to 4 tokens, so the bound on TPOT is a fourth of that of a decode."""
    plain, drafted = (build(f"speculation={name}") for name in ("none", "eagle3"))
    demand = Demand(
        arrival_s=np.array([0.0, 1.0]),
        prompt_tokens=np.array([100.0, 2000.0]),
        output_tokens=np.array([10.0, 200.0]),
        reusable=False,
        has_branches=False,
    )
    model = plain.iteration_model()
    alone, with_drafts = (idle_latencies(one, model, demand) for one in (plain, drafted))
    assert with_drafts.tpot_s == pytest.approx(alone.tpot_s / 4)
    assert with_drafts.ttft_s == pytest.approx(alone.ttft_s)
    slo = plain.slo
    assert decode_token_seconds(model, 1, slo, 4) == decode_token_seconds(model, 1, slo) / 4


def test_an_object_of_ones_own_is_built_with_draft_length_and_acceptance(capsys):
    proposer = Ngram(draft=HostDraft(), num_speculative_tokens=2)
    run = ("workload=poisson", "workload.num_requests=2", "model=smollm2_135m")
    result = simulate(*run, speculation=proposer, acceptance__rate=0.53)
    assert any(note.startswith("speculation=ngram: is not run") for note in result.summary["notes"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stages", [1, 2])
def test_only_the_last_stage_of_a_pipeline_has_the_kv_of_the_draft(stages):
    """32 layers of the target and one of the draft, each 2 x 8 heads x 128 x 2 bytes."""
    scenario = build("speculation=eagle", f"pipeline_parallel_size={stages}")
    assert scenario.kv_bytes_per_token == 33 * 4096


def test_a_cold_start_loads_the_draft_too():
    plain, drafted = (build(f"speculation={name}") for name in ("none", "draft_model"))
    assert drafted.cold_start_s > plain.cold_start_s
