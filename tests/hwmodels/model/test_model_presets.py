"""The models of configs/model against published figures and their own notes."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR, first_comment
from experiments.app.settings.hydra_errors import composed
from hwmodels.model import (
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    NoAttention,
)
from hwmodels.model.attention import CompressedAttention
from hwmodels.model.recurrent import (
    BesideAttention,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from sim.settings.build import build
from sim.settings.errors import ConfigError

PRESETS = sorted(file for file in (CONFIG_DIR / "model").glob("*.yaml") if file.stem != "hf")
FIGURES = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "models" / "models.csv"
KNOWN = Path(__file__).resolve().parents[1] / "hf" / "known_models.csv"
SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    {
        "baichuan2_13b": 13_896_668_160,
        "codellama_13b": 13_016_028_160,
        "codellama_34b": 33_743_970_304,
        "codellama_7b": 6_738_546_688,
        "codestral_22b": 22_247_282_688,
        "command_r_35b": 34_980_831_232,
        "deepseek_coder_33b": 33_342_991_360,
        "deepseek_coder_6_7b": 6_740_512_768,
        "deepseek_llm_7b": 6_910_365_696,
        "deepseek_r1": 671_026_419_200,
        "deepseek_r1_distill_qwen_14b": 14_770_033_664,
        "deepseek_r1_distill_qwen_1_5b": 1_777_088_000,
        "deepseek_r1_distill_qwen_32b": 32_763_876_352,
        "deepseek_r1_distill_qwen_7b": 7_615_616_512,
        "deepseek_v2_lite": 15_706_484_224,
        "devstral_small_24b": 23_572_403_200,
        "gemma3_1b": 999_885_952,
        "gemma3_27b": 27_009_346_304,
        "gemma_2_27b": 27_227_128_320,
        "gemma_2_2b": 2_614_341_888,
        "gemma_2_9b": 9_241_705_984,
        "gemma_2b": 2_506_172_416,
        "gemma_7b": 8_537_680_896,
        "gpt_oss_120b": 116_829_156_672,
        "gpt_oss_20b": 20_914_757_184,
        "granite_3_1_8b": 8_170_848_256,
        "hy3": 295_033_543_488,
        "internlm2_20b": 19_861_149_696,
        "internlm2_5_7b": 7_737_708_544,
        "lfm2_5_1_2b": 1_170_340_608,
        "lfm2_5_350m": 354_483_968,
        "llama2_13b": 13_015_864_320,
        "llama2_70b": 68_976_648_192,
        "llama2_7b": 6_738_415_616,
        "llama3_1_405b": 405_853_388_800,
        "llama3_1_70b": 70_553_706_496,
        "llama3_1_8b": 8_030_261_248,
        "llama3_2_1b": 1_235_814_400,
        "llama3_2_3b": 3_212_749_824,
        "llama3_70b": 70_553_706_496,
        "llama3_8b": 8_030_261_248,
        "llama_160m": 162_417_408,
        "llama_68m": 68_030_208,
        "minicpm5_1b": 1_080_632_832,
        "ministral_8b": 8_019_808_256,
        "mistral_7b": 7_248_023_552,
        "mistral_7b_v0_1": 7_241_732_096,
        "mistral_7b_v0_2": 7_241_732_096,
        "mistral_large_2407": 122_610_069_504,
        "mistral_nemo_12b": 12_247_782_400,
        "mistral_small_24b": 23_572_403_200,
        "mixtral_8x22b": 140_620_634_112,
        "mixtral_8x7b": 46_702_792_704,
        "nemotron_nano_9b_v2": 8_888_227_328,
        "phi3_mini": 3_821_079_552,
        "phi_3_5_mini": 3_821_079_552,
        "phi_3_medium": 13_960_238_080,
        "phi_4": 14_659_507_200,
        "phi_4_mini": 3_836_021_760,
        "phi_4_reasoning": 14_659_507_200,
        "qwen1_5_0_5b": 463_987_712,
        "qwen1_5_110b": 111_209_914_368,
        "qwen1_5_14b": 14_167_290_880,
        "qwen1_5_1_8b": 1_836_828_672,
        "qwen1_5_32b": 32_512_218_112,
        "qwen1_5_4b": 3_950_369_280,
        "qwen1_5_72b": 72_287_920_128,
        "qwen1_5_7b": 7_721_324_544,
        "qwen1_5_moe_a2_7b": 14_315_784_192,
        "qwen2_5_0_5b": 494_032_768,
        "qwen2_5_14b": 14_770_033_664,
        "qwen2_5_math_72b": 72_706_203_648,
        "qwen2_5_math_7b": 7_615_616_512,
        "qwen2_5_1_5b": 1_543_714_304,
        "qwen2_5_32b": 32_763_876_352,
        "qwen2_5_3b": 3_085_938_688,
        "qwen2_5_72b": 72_706_203_648,
        "qwen2_5_7b": 7_615_616_512,
        "qwen3_0_6b": 596_049_920,
        "qwen3_14b": 14_768_307_200,
        "qwen3_1_7b": 1_720_574_976,
        "qwen3_235b_a22b": 235_093_634_560,
        "qwen3_235b_a22b_2507": 235_093_634_560,
        "qwen3_30b_a3b": 30_532_122_624,
        "qwen3_30b_a3b_2507": 30_532_122_624,
        "qwen3_32b": 32_762_123_264,
        "qwen3_4b": 4_022_468_096,
        "qwen3_4b_2507": 4_022_468_096,
        "qwen3_8b": 8_190_735_360,
        "qwen3_coder_480b_a35b": 480_154_875_392,
        "qwq_32b": 32_763_876_352,
        "smollm2_135m": 134_515_008,
        "smollm2_1_7b": 1_711_376_384,
        "smollm2_360m": 361_821_120,
        "solar_10_7b": 10_731_524_096,
        "tinyllama_1_1b": 1_100_048_384,
        "vicuna_13b": 13_015_864_320,
        "vicuna_13b_v1_5": 13_015_864_320,
        "vicuna_33b": 32_528_943_616,
        "vicuna_7b": 6_738_415_616,
        "vicuna_7b_v1_5": 6_738_415_616,
        "yi_1_5_9b": 8_829_407_232,
        "yi_34b": 34_388_917_248,
        "yi_6b": 6_061_035_520,
    }.items(),
)
def test_has_exactly_the_parameters_of_the_checkpoint(models, name, num_parameters):
    assert models[name].num_parameters == num_parameters


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    {
        "deepseek_llm_67b": 6.7425e10,
        "deepseek_ocr": 3.336e09,
        "deepseek_v2_5": 2.3574e11,
        "gemma3_12b": 1.2187e10,
        "gemma3_4b": 4.3001e09,
        "glm_4_5": 3.528e11,
        "glm_4_5_air": 1.0685e11,
        "glm_4_6": 3.528e11,
        "glm_4_7": 3.528e11,
        "glm_4_9b": 9.4e09,
        "gpt_neox_20b": 2.0555e10,
        "kimi_k2_thinking": 1.026e12,
        "llama4_maverick": 4.007e11,
        "ernie_4_5_300b_a47b": 2.995e11,
        "ministral_3_14b": 1.395e10,
        "ministral_3_3b": 3.861e09,
        "ministral_3_8b": 8.92e09,
        "glm_4_1v_9b": 1.029e10,
        "glm_4_5v": 1.0771e11,
        "glm_4_6v": 1.0771e11,
        "glm_4_6v_flash": 1.029e10,
        "granite_3_1_2b": 2.5335e09,
        "intern_s1": 2.407e11,
        "internvl3_5_241b_a28b": 2.407e11,
        "internvl3_5_8b": 8.53e09,
        "lfm2_5_230m": 2.297e08,
        "ling_1t": 9.997e11,
        "mellum2_12b_a2_5b": 1.215e10,
        "mistral_medium_3_5_128b": 1.277e11,
        "mistral_small_4_119b": 1.1897e11,
        "nemotron_3_nano_4b": 3.973e09,
        "qwen3_5_0_8b": 8.53e08,
        "qwen3_5_2b": 2.213e09,
        "qwen3_5_4b": 4.539e09,
        "qwen3_5_9b": 9.41e09,
        "ring_1t": 9.997e11,
        "pixtral_12b": 1.268e10,
        "qwen2_vl_7b": 8_291_375_616,
        "mimo_7b": 7.83e09,
        "mistral_small_3_1_24b": 2.4011e10,
        "moonlight_16b_a3b": 1.596e10,
        "olmo_2_13b": 1.3716e10,
        "olmo_2_32b": 3.2234e10,
        "olmoe_1b_7b": 6.9192e09,
        "opt_125m": 1.2524e08,
        "opt_13b": 1.2853e10,
        "opt_1_3b": 1.3158e09,
        "opt_30b": 2.9975e10,
        "opt_66b": 6.57e10,
        "nemotron_3_5_lightning_30b_a3b": 3.16e10,
        "qwen2_57b_a14b": 5.7409e10,
        "qwen2_5_vl_32b": 3.3453e10,
        "qwen2_5_vl_3b": 3.7546e09,
        "qwen2_5_vl_72b": 7.3411e10,
        "qwen3_vl_30b_a3b": 3.107e10,
        "qwen3_vl_32b": 3.336e10,
        "qwen3_vl_4b": 4.44e09,
        "starcoder2_15b": 1.5958e10,
    }.items(),
)
def test_has_nearly_the_parameters_of_the_checkpoint(models, name, num_parameters):
    """Not counted are norms of towers, biases, a few tables, and MiMo's layer of multi-token prediction.

    The figures of Qwen3.5 are without that layer: 9.65 - 0.24 = 9.41 B.
    """
    assert models[name].num_parameters == pytest.approx(
        num_parameters, rel={"mimo_7b": 0.03, "deepseek_ocr": 0.003}.get(name, 0.002)
    )


def test_presets_have_the_parameters_of_the_table_of_known_models(models):
    """The presets with a row of tests/hwmodels/hf/known_models.csv, by their repository."""
    with KNOWN.open(newline="") as lines:
        stated = {row["source"]: float(row["parameters_billion"]) for row in csv.DictReader(lines)}
    sources = {file.stem: re.search(r"^source: (\S+)", file.read_text(), re.M)[1] for file in PRESETS}
    both = [stem for stem, source in sources.items() if source in stated]
    assert len(both) > 50
    for stem in both:
        assert models[stem].num_parameters / 1e9 == pytest.approx(stated[sources[stem]], rel=0.02), stem


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("chinchilla_70b", 70e9, 70e9),
        ("deepseek_r1", 671e9, 37e9),
        ("gemma4_12b", 12e9, 12e9),
        ("gemma4_e2b", 5.1e9, 2.3e9),
        ("gemma4_e4b", 8e9, 4.5e9),
        ("glm_5", 744e9, 40e9),
        ("gpt_oss_120b", 117e9, 5.1e9),
        ("hy3", 295e9, 21e9),
        ("internvl3_5_38b", 38.4e9, 32.8e9),
        ("inkling", 975e9, 41e9),
        ("kimi_k2_5", 1.03e12, 32e9),
        ("laguna_m_1", 225e9, 23e9),
        ("laguna_s_2_1", 118e9, 8e9),
        ("laguna_xs_2_1", 33e9, 3e9),
        ("lfm2_5_vl_1_6b", 1.6e9, 1.17e9),
        ("lfm2_5_vl_450m", 450e6, 354e6),
        ("ling_1t", 1e12, 50e9),
        ("ling_3_flash", 124e9, 5.5e9),
        ("llama4_scout", 109e9, 17e9),
        ("mellum2_12b_a2_5b", 12.1e9, 2.5e9),
        ("mimo_v2_5", 310e9, 15e9),
        ("mimo_v2_5_pro", 1.02e12, 42e9),
        ("minimax_m2_5", 229e9, 10e9),
        ("muse_glimmer_30b", 29.6e9, 29.6e9),
        ("mistral_large_3_675b", 675e9, 41e9),
        ("mistral_small_4_119b", 119e9, 6.5e9),
        ("mixtral_8x7b", 46.7e9, 12.9e9),
        ("qwen3_235b_a22b", 235e9, 22e9),
        ("qwen3_30b_a3b", 30.5e9, 3.3e9),
        ("qwen3_5_397b_a17b", 397e9, 17e9),
        ("trinity_large", 398e9, 13e9),
        ("trinity_mini", 26e9, 3.5e9),
        ("trinity_nano", 6.1e9, 1e9),
    ],
)
def test_has_about_the_parameters_that_its_makers_state(models, name, total, active):
    """Makers count towers, or leave the tables out (gpt-oss), so active ones agree within 15 %."""
    assert models[name].num_parameters == pytest.approx(total, rel=0.02)
    assert models[name].num_active_parameters == pytest.approx(active, rel=0.15)


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3_2",
        "kimi_k2",
        "mistral_large_3_675b",
        "mistral_medium_3_5_128b",
        "mistral_small_4_119b",
        "ministral_3_3b",
        "ministral_3_14b",
        "devstral_2_123b",
        "devstral_small_2_24b",
    ],
)
def test_checkpoints_that_are_published_in_8_bits_are_read_so(models, name):
    model = models[name]
    assert model.weight_bytes_per_rank() < 1.3 * model.num_parameters


def test_the_draft_of_chinchilla_has_4_billion_parameters(models):
    assert round(models["chinchilla_4b"].num_parameters / 1e9) == 4
    assert models["chinchilla_4b"].vocab_size == models["chinchilla_70b"].vocab_size


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("gpt_oss_120b", 65.2),
        ("gpt_oss_20b", 13.8),
        ("kimi_k2", 1029),
        ("kimi_k2_thinking", 594),
        ("minimax_m2_5", 230),
        ("mistral_large_3_675b", 681.5),
    ],
)
def test_weighs_what_the_checkpoint_weighs(models, name, gigabytes):
    assert models[name].weight_bytes_per_rank() / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_first_line_says_what_the_numbers_say(models, file):
    model, line = models[file.stem], first_comment(file)
    assert line == described(model)


def described(model):
    total, unit = (
        (model.num_parameters / 1e9, "B")
        if model.num_parameters < 9.995e11
        else (
            model.num_parameters / 1e12,
            "T",
        )
    )
    windowed = Counter()
    for block in model.blocks:
        windowed[block.attention.window] += block.count
    sharing = sum(block.count for block in model.blocks if getattr(block.attention, "shares_kv", False))
    kv_kib = model.kv_bytes_per_token() / 1024
    return ", ".join(
        [
            f"{total:.3g} {unit} parameters",
            *([f"{model.num_active_parameters / 1e9:.3g} B active"] if model.has_experts else []),
            " + ".join(dict.fromkeys(kind_of(block.attention) for block in model.blocks)),
            f"{kv_kib:,.0f} KiB of KV per token" if kv_kib >= 1000 else f"{kv_kib:.3g} KiB of KV per token",
            *([f"shared by {sharing} of {model.num_layers} layers"] if sharing else []),
            *(
                f"window {window:,} in {count} of {model.num_layers} layers"
                for window, count in windowed.items()
                if window
            ),
            f"context {model.max_position_embeddings:,}",
        ]
    )


def kind_of(attention):
    if isinstance(attention, LinearAttention | KimiDeltaAttention | LightningAttention):
        return "linear"
    if isinstance(attention, Mamba1):
        return "Mamba"
    if isinstance(attention, ShortConvolution):
        return "convolution"
    if isinstance(attention, BesideAttention):
        return f"{kind_of(attention.attention)} beside {kind_of(attention.recurrent)}"
    if isinstance(attention, Mamba2):
        return "Mamba-2"
    if isinstance(attention, NoAttention):
        return "MLP alone"
    if isinstance(attention, CompressedAttention):
        return "window" if not attention.ratio else f"MQA of {attention.ratio} tokens per entry"
    if isinstance(attention, LatentAttention):
        return "MLA, sparse" if attention.sparse_top_k else "MLA"
    if attention.num_kv_heads == 1 < attention.num_heads:
        return "MQA"
    if attention.sparse_top_k:
        return "GQA, sparse"
    return "MHA" if attention.num_heads == attention.num_kv_heads else "GQA"


def figures():
    if not FIGURES.exists():
        return []
    with FIGURES.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.skipif(not FIGURES.exists(), reason="the measured data is not beside this checkout")
def test_agrees_with_the_figures_that_come_with_the_measurements(models):
    """A model there is a preset here, by its name; every figure that both have is the same."""
    by_name = {model.name: model for model in models.values()}
    rows = figures()
    assert len(rows) == 22
    for row in rows:
        model, attention = by_name[row["model"]], by_name[row["model"]].blocks[-1].attention
        mlp = model.blocks[-1].mlp
        has_experts = isinstance(mlp, MixtureOfExperts)
        ours = {
            "num_hidden_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_position_embeddings": model.max_position_embeddings,
            "num_attention_heads": attention.num_heads,
            "experts": mlp.num_experts if has_experts else "",
            "num_experts_per_tok": mlp.top_k if has_experts else "",
        }
        if isinstance(attention, GroupedQueryAttention):
            ours["num_key_value_heads"] = attention.num_kv_heads
            ours["head_dim"] = attention.head_dim if row["head_dim"] else ""
        else:
            names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            ours |= {name: getattr(attention, name) for name in names}
        width = row["moe_intermediate_size"] if has_experts else ""
        ours["moe_intermediate_size" if width else "intermediate_size"] = mlp.intermediate_size
        assert {name: row[name] for name in ours} == {name: str(value) for name, value in ours.items()}


def test_every_setting_can_be_overridden_on_the_command_line():
    overrides = ["model=gpt_oss_20b", "model.weights=fp8", "model.moe_weights=bf16", "model.dtype=fp16"]
    more = ["model.kv_cache_dtype=fp8", "model.config.num_hidden_layers=16"]
    model = build(SOURCE.compose([*overrides, *more]).model, "model")
    assert (model.weights, model.moe_weights, model.dtype) == ("fp8", "bf16", "fp16")
    assert (model.kv_dtype, model.num_layers) == ("fp8", 16)


def built(name, **changes):
    """Builds a preset with other values, given by dotted key."""
    node = OmegaConf.load(CONFIG_DIR / "model" / f"{name}.yaml")
    for key, value in changes.items():
        OmegaConf.update(node, key, value, merge=False)
    return build(node, "model")


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Fields with the number of layers; a configuration has one of them, or only a list of its layers."""


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_half_the_layers_of_any_preset_is_a_model(models, file):
    config = OmegaConf.to_container(OmegaConf.load(file))["config"]
    stated = next((config[name] for name in LAYERS if name in config), models[file.stem].num_layers)
    halves = {f"config.{name}": stated // 2 for name in LAYERS if name in config}
    if "num_kv_shared_layers" in config:
        halves["config.num_kv_shared_layers"] = config["num_kv_shared_layers"] // 2
    for name, value in config.items():
        if isinstance(value, list) and len(value) == stated:
            halves[f"config.{name}"] = value[: stated // 2]
    if by_layer := config.get("per_layer_config"):
        kept = {number: own for number, own in by_layer.items() if int(number) < stated // 2}
        halves["config.per_layer_config"] = kept
    assert built(file.stem, **halves).num_layers == models[file.stem].num_layers * (stated // 2) // stated


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weights", "int3", "model.weights=int3: must be one of fp32, bf16"),
        ("moe_weights", "fp8", "model.moe_weights=fp8: qwen3-8b has no experts"),
        ("kv_cache_dtype", "fp4", "model.kv_cache_dtype=fp4: must be one of auto, "),
        ("config.num_key_value_heads", 3, "model.config.num_key_value_heads=3: must divide"),
        ("config.vocab_size", None, "model.config.vocab_size: missing; Qwen3ForCausalLM needs"),
        ("config.num_local_experts", 8, "model.config.num_local_experts=8: not understood"),
    ],
)
def test_rejects_a_wrong_setting_where_it_stands(key, value, message):
    with pytest.raises(ConfigError) as error:
        built("qwen3_8b", **{key: value})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("file", PRESETS, ids=lambda file: file.stem)
def test_names_its_source_and_leaves_the_choice_of_formats_open(file):
    preset = OmegaConf.load(file)
    assert preset.source.count("/") == 1
    open_choices = (preset.dtype, preset.weights, preset.moe_weights, preset.kv_cache_dtype)
    assert open_choices == ("auto", None, None, "auto")


def test_gemma_3n_shares_the_cache_of_fifteen_layers(models):
    """20 of 35 layers have KV, 4 of them full: 2 x 2 heads x 256 x 2 bytes = 2 KiB per layer and token."""
    model = models["gemma3n_e4b"]
    assert model.kv_bytes_per_token() == 20 * 2048
    assert model.kv_bytes_of_sequence(10_240) == (4 * 10_240 + 16 * 512) * 2048
    whole = built("gemma3n_e4b", **{"config.num_kv_shared_layers": 0})
    assert whole.kv_bytes_per_token() / model.kv_bytes_per_token() == 35 / 20


TRANSFORMS = sorted(file.stem for file in (CONFIG_DIR / "model" / "transform").glob("*.yaml"))


@pytest.mark.sampled(fast=7, slow=14)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("model", ["llama3_1_8b", "deepseek_r1", "qwen3_5_397b_a17b", "gpt_oss_20b"])
def test_every_transformation_is_a_choice_for_every_kind_of_model(models, model, transform):
    node = SOURCE.compose([f"model={model}", f"model/transform={transform}"]).model
    built, whole = build(node, "model"), models[model]
    assert ("transform" in node) == (transform != "none")
    assert (built == whole) == (transform == "none")
    assert (
        built.weight_bytes_per_rank() < whole.weight_bytes_per_rank()
        or "none" in transform
        or transform in ("sparse_unstructured", "shared_kv")  # which leaves MLA as it is
    )


def test_2_4_sparsity_of_a_preset():
    """2:4 of bf16: half of the values and two bits for each, 0.5625 of the matrices' bytes."""
    models = [
        build(SOURCE.compose(["model=llama3_1_8b", f"model/transform={transform}"]).model, "model")
        for transform in ("none", "sparse_2_4")
    ]
    dense, sparse = (model.weight_bytes_per_rank() for model in models)
    matrices = 32 * (4096 * (4096 + 2048) + 4096 * 4096 + 3 * 4096 * 14336) * 2
    assert dense - sparse == matrices * (1 - 0.5625)


def test_the_student_of_a_distillation_is_any_preset_with_settings_of_its_own():
    chosen = [
        "model/transform=distill",
        "model@model.transform.student=qwen3_8b",
        "model.transform.student.weights=fp8",
    ]
    student = build(SOURCE.compose(chosen).model, "model")
    assert (student.name, student.weights) == ("qwen3-8b", "fp8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.transform.keep=1.5", "model.transform.keep=1.5: must be a share, > 0 and <= 1"),
        ("model.transform.keep=half", "model.transform.keep=half: must be a number"),
    ],
)
def test_rejects_a_wrong_setting_of_a_transformation(override, message):
    cfg = SOURCE.compose(["model/transform=prune_depth", override])
    with pytest.raises(ConfigError) as error:
        build(cfg.model, "model")
    assert str(error.value) == message


def test_a_transformation_is_chosen_as_a_group():
    with pytest.raises(ConfigError) as error:
        composed(SOURCE, ["model.transform=prune_depth"])
    assert "must be written model/transform=prune_depth" in str(error.value)


def test_pools_may_serve_transformations_of_one_model():
    chosen = ["pools.whole.replicas=2", "pools.pruned={model/transform: prune_depth}"]
    found = SOURCE.compose(chosen).pools
    names = [build(found[pool].model, "model").name for pool in ("whole", "pruned")]
    assert names == ["llama-3.1-8b", "llama-3.1-8b-16-layers"]
