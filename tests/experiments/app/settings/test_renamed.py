"""Old names of settings are accepted for one version."""

import pytest
from omegaconf import OmegaConf

from experiments.app.api import simulate
from experiments.app.cli import main
from experiments.app.settings import renamed
from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.renamed import ADVICE, ALIASES, NEW_NAMES, OTHER_WORDS, with_new_names
from experiments.app.settings.variants import Variants
from sim.settings.errors import ConfigError

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


@pytest.mark.parametrize(("old", "new"), NEW_NAMES.items())
def test_only_the_key_of_an_override_is_renamed(old, new, capsys):
    renamed.note.cache_clear()
    texts = [f"{old}=a", f"++{old}.b=1", f"~{old}", f"{old}s=1", f"engine.{old}=1", f"name={old}"]
    assert with_new_names(texts) == [f"{new}=a", f"++{new}.b=1", f"~{new}", *texts[3:]]
    note = f"windtunnel: {old} is now called {new}; the old name is accepted for one more version.\n"
    assert capsys.readouterr().err == note


def test_old_names_are_accepted_wherever_overrides_are_given(capsys):
    old, new = "handover.overflow_tokens=7", "kv_transfer.overflow_tokens=7"
    assert main(["simulate", old, "--cfg", "job"]) == 0
    assert "overflow_tokens: 7" in capsys.readouterr().out
    assert SOURCE.compose_plain([old]) == SOURCE.compose_plain([new])
    assert Variants(SOURCE).config([old]) == Variants(SOURCE).config([new])
    result = simulate("workload.num_requests=1", handover__overflow_tokens=7)
    assert result.config["kv_transfer"]["overflow_tokens"] == 7
    assert result.command is not None
    assert new in result.command


@pytest.mark.parametrize(("alias", "key"), ALIASES.items())
def test_an_alias_is_the_setting_that_it_abbreviates(alias, key, capsys):
    renamed.note.cache_clear()
    texts = [f"{alias}=2", f"{alias}s=2", f"engine.{alias}=2", f"{alias}.x=2"]
    assert with_new_names(texts) == [f"{key}=2", *texts[1:]]
    assert capsys.readouterr().err == f"windtunnel: {alias} is read as {key}.\n"
    assert with_new_names([f"{alias}=2,4"]) == [f"{key}=2,4"]


def test_aliases_are_settings_and_no_keys_of_their_own():
    config = SOURCE.compose(["workload=poisson"])
    for key in ALIASES.values():
        parent, _, name = key.rpartition(".")
        assert name in (OmegaConf.select(config, parent) if parent else config), key
    assert not {*ALIASES, *ADVICE} & set(config)
    for file in CONFIG_DIR.glob("*.yaml"):
        assert not {*ALIASES} & set(read_yaml(file))


def test_a_model_may_be_named_by_its_hugging_face_id(capsys):
    renamed.note.cache_clear()
    given = [
        "model=meta-llama/Llama-3.1-8B-Instruct",
        "++pools.p.model=qwen/qwen3-8b",
        "model=a/b,llama3_1_8b",
    ]
    assert with_new_names(given) == ["model=llama3_1_8b", "++pools.p.model=qwen3_8b", given[2]]
    assert capsys.readouterr().err == (
        "windtunnel: model=meta-llama/Llama-3.1-8B-Instruct is read as model=llama3_1_8b: 8.03 B parameters, "
        "GQA, 128 KiB of KV per token, context 131,072.\n"
        "windtunnel: ++pools.p.model=qwen/qwen3-8b is read as ++pools.p.model=qwen3_8b: 8.19 B parameters, "
        "GQA, 144 KiB of KV per token, context 40,960.\n"
    )
    assert SOURCE.compose_plain(given[:1]) == SOURCE.compose_plain([])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("deepseek_v3", ["model=deepseek_r1"]),
        ("llama3_3_70b", ["model=llama3_1_70b"]),
        ("llama_3_1_8b", ["model=llama3_1_8b"]),
        ("qwen2_5_coder_7b", ["model=qwen2_5_7b"]),
        ("qwen3_8b_fp8", ["model=qwen3_8b", "model.weights=fp8"]),
        ("qwen3_8b,deepseek_v3_1", ["model=qwen3_8b,deepseek_r1"]),
        ("opt_13b", ["model=opt_13b"]),
        ("nothing_7b", ["model=nothing_7b"]),
    ],
)
def test_a_model_may_be_named_as_its_choice_would_be(given, read):
    assert with_new_names([f"model={given}"]) == read


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("H20", "h20"),
        ("h20-141GB", "h20_141gb"),
        ("A6000", "rtx_a6000"),
        ("rtx-6000-ada", "rtx_6000_ada"),
        ("a800", "a800_sxm"),
        ("dgx_spark", "gb10"),
        ("910B", "ascend_910b"),
        ("H100-SXM", "h100_sxm"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb_sxm"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA B200", "b200_sxm"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_may_be_named_in_other_letters_and_without_its_series(given, choice, capsys):
    assert with_new_names([f"hardware={given}"]) == [f"hardware={choice}"]
    assert with_new_names([f"pools.a.hardware={given}"]) == [f"pools.a.hardware={choice}"]
    assert f"hardware={given} is read as hardware={choice}." in capsys.readouterr().err


def test_a_device_of_which_there_are_several_kinds_is_left_to_the_list_of_choices():
    assert with_new_names(["hardware=h100", "hardware=h20,l40s"]) == ["hardware=h100", "hardware=h20,l40s"]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("batching=continuous,static", "batching=chunked,static"),
        ("engine=TensorRT-LLM", "engine=tensorrt_llm"),
        ("engine=llama.cpp", "engine=llama_cpp"),
        ("++scheduling=SJF", "++scheduling=shortest_job_first"),
        ("workload.rate=3", "workload.arrivals.rate_per_s=3"),
        ("max_num_seqs=64", "engine.max_num_seqs=64"),
    ],
)
def test_the_fields_other_words_are_accepted(given, read):
    assert with_new_names([given]) == [read]


def test_other_words_are_of_choices_that_exist_and_are_no_choices_themselves():
    groups = find_groups([CONFIG_DIR])
    for group, words in OTHER_WORDS.items():
        choices = {choice.name for choice in groups[group]}
        assert {*words.values()} <= choices
        assert not words.keys() & choices


def test_the_weights_in_an_id_are_a_setting_unless_another_is_given(capsys):
    renamed.note.cache_clear()
    name = "model=neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8"
    assert with_new_names([name, "seed=1"]) == ["model=llama3_1_8b", "model.weights=fp8", "seed=1"]
    assert "is read as model=llama3_1_8b model.weights=fp8: 8.03 B" in capsys.readouterr().err
    assert with_new_names([name, "model.weights=int8"]) == ["model=llama3_1_8b", "model.weights=int8"]
    assert SOURCE.compose_plain([name]) == SOURCE.compose_plain(["model.weights=fp8"])
    result = simulate("workload.num_requests=1", model="Qwen/Qwen3-8B-AWQ")
    assert result.config["model"]["name"] == "qwen3-8b"
    assert result.config["model"]["weights"] == "int4_wo"


@pytest.mark.parametrize("override", ["pools.p.model=Qwen/Qwen3-8B-AWQ", "model=Qwen/Qwen3-8B-AWQ,qwen3_14b"])
def test_quantised_ids_are_refused_where_their_weights_cannot_be_set(override):
    with pytest.raises(ConfigError, match="Qwen3-8B-AWQ: choose qwen3_8b and set weights=int4_wo of it"):
        with_new_names([override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=llama3", "nearest: llama3_1_8b, llama3_8b, llama3_70b; all: windtunnel list model"),
        (
            "model=mistralai/Mistral-7B-v0.4",
            "nearest: mistral_7b, mistral_7b_v0_2, mistral_7b_v0_1; all: windtunnel list model",
        ),
        ("model=someone/no-model", "model=someone/no-model: no such choice; all: windtunnel list model"),
        ("hardware=a100", "nearest: a100_80gb_sxm, a100_pcie, a100_40gb_sxm; all: windtunnel list hardware"),
        ("hardware=b200", "hardware=b200: no such choice; nearest: b200_sxm, "),
        ("rooting=random", "nearest: routing; all: windtunnel simulate --help"),
        ("long_prefill_token_threshold=5", "no such group or setting; nearest: "),
        ("concurrency=5", "concurrency: no such group or setting; choose workload=closed_loop"),
        ("sort=true", "sort: no such group or setting; nearest: workload.sort, with workload="),
        ("dp=2", "dp: no such group or setting; set replicas=N "),
        ("gpus=2", "gpus: no such group or setting; set replicas=N or tensor_parallel_size=N"),
        ("gpu=h100", "set hardware=NAME; all: windtunnel list hardware"),
        ("rate=5", "workload.arrivals.rate_per_s: no such setting; these arrivals have no rate; "),
    ],
)
def test_what_is_not_accepted_is_answered_with_the_canonical_name(override, message):
    with pytest.raises(ConfigError) as error:
        composed(SOURCE, [override])
    assert message in str(error.value)
    assert len(str(error.value)) < 250


def test_an_id_of_quantised_weights_says_what_quantization_does():
    for model, name, weights in (
        ("Qwen/Qwen3-32B-AWQ", "awq_marlin", "int4_wo"),
        ("Qwen/Qwen3-32B-FP8", "fp8", "fp8_block"),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "modelopt", "fp8"),
        ("RedHatAI/Llama-3.1-8B-Instruct-FP8", "compressed-tensors", "fp8"),
    ):
        texts = with_new_names([f"model={model}", f"quantization={name}"])
        kv = ["model.kv_cache_dtype=fp8"] if model.startswith("nvidia") else []
        assert texts[1:] == [f"model.weights={weights}", *kv]
    assert with_new_names(["model=Qwen/Qwen3-32B", "quantization=awq"])[1:] == ["model.weights=awq"]
    with pytest.raises(ConfigError, match="quantization=gptq: Qwen/Qwen3-32B-FP8 is stored in fp8_block"):
        with_new_names(["model=Qwen/Qwen3-32B-FP8", "quantization=gptq"])


def test_names_of_engines_are_those_of_weights():
    for name in ("awq", "gptq_marlin", "moe_wna16"):
        assert main(["roofline", "model=llama3_1_8b", f"quantization={name}", "--cfg", "job"]) == 0
    assert main(["roofline", "model=llama3_1_8b", "quantization=squeezellm", "out=null"]) == 2
