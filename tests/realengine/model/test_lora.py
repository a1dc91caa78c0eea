"""Adapters against merged weights; PEFT's folders, read or refused; resident and evicted adapters."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine needs torch")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="reads the package safetensors")

from kernels.lora import Segments  # noqa: E402
from realengine.model.architecture import Architecture  # noqa: E402
from realengine.model.backend import TORCH  # noqa: E402
from realengine.model.decoder import Decoder  # noqa: E402
from realengine.model.kv_cache import KvCache  # noqa: E402
from realengine.model.lora import (  # noqa: E402
    DECODE_TOKENS,
    NO_ADAPTER,
    AdapterBank,
    make_segments,
    num_decode_segments,
)
from realengine.model.lora_adapter import (  # noqa: E402
    Adapter,
    LowRank,
    adapted_weights,
    linear_layers,
)
from realengine.runner.batch import Batch  # noqa: E402
from realengine.weights.load import load_weights  # noqa: E402
from realengine.weights.lora_checkpoint import read_adapter  # noqa: E402
from tests.realengine.adapters import TARGETS, random_adapter  # noqa: E402
from tests.realengine.checkpoints import LLAMA, QWEN2, QWEN3, QWEN3_MOE  # noqa: E402
from tests.realengine.eager import eager_logits  # noqa: E402

CPU = torch.device("cpu")
SPEC = Architecture.from_hf(LLAMA)
Q0 = "model.layers.0.self_attn.q_proj"
torch.set_num_threads(1)


# A folder as PEFT writes it: hidden size 32, 4 heads of 8, 2 KV heads, MLPs of 64, 2 layers.
SIZES = {
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def tensors_of(modules, ranks=4):
    """Pairs for modules such as "0.self_attn.q_proj"; ranks: of all, or by module."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for module in modules:
        num_out, num_in = SIZES[module.partition(".")[2]]
        rank = ranks if isinstance(ranks, int) else ranks[module]
        name = f"base_model.model.model.layers.{module}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, num_in, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(num_out, rank, generator=generator)
    return tensors


QV = [f"{i}.self_attn.{x}_proj" for i in range(2) for x in "qv"]
CONFIG = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "lora_dropout": 0.05,
    "base_model_name_or_path": "some/base",
    "loftq_config": {},
    "modules_to_save": None,
}


def write(folder, config=(), tensors=None):
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **dict(config)}))
    safetensors_torch.save_file(
        tensors_of(QV) if tensors is None else tensors, folder / "adapter_model.safetensors"
    )
    return folder


def delta(adapter, name):
    pair = adapter.layers[name]
    return adapter.scaling * pair.b_NR.double() @ pair.a_RK.double()


# Reading.


def test_reads_each_pair_and_scales_by_alpha_over_rank(tmp_path):
    adapter = read_adapter(write(tmp_path), SPEC)
    stored = tensors_of(QV)
    assert adapter.scaling == 2.0
    assert set(adapter.layers) == {f"model.layers.{module}" for module in QV}
    for name, pair in adapter.layers.items():
        assert torch.equal(pair.a_RK, stored[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(pair.b_NR, stored[f"base_model.model.{name}.lora_B.weight"])


def test_rslora_scales_by_alpha_over_the_root_of_the_rank(tmp_path):
    assert read_adapter(write(tmp_path, {"use_rslora": True}), SPEC).scaling == 4.0


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_pattern_gives_a_layer_its_own_rank_and_alpha(tmp_path, use_rslora):
    config = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "^q_proj": 3},
        "alpha_pattern": {"v_proj": 3},
        "use_rslora": use_rslora,
    }
    stored = tensors_of(QV, {module: 2 if module == QV[2] else 4 for module in QV})
    adapter = read_adapter(write(tmp_path, config, stored), SPEC)
    root = math.sqrt if use_rslora else float
    scalings = [8 / root(4), 3 / root(4), 8 / root(2), 3 / root(4)]
    for module, scaling in zip(QV, scalings, strict=True):
        name = f"model.layers.{module}"
        a, b = (stored[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
        torch.testing.assert_close(delta(adapter, name), scaling * b @ a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"target_modules": "all-linear"}, [f"{i}.{name}" for i in range(2) for name in SIZES]),
        ({"target_modules": r".*layers\.1\..*(q|down)_proj"}, ["1.self_attn.q_proj", "1.mlp.down_proj"]),
        ({"target_modules": ["model.layers.1.mlp.up_proj"]}, ["1.mlp.up_proj"]),
        ({"target_modules": ["up_proj"], "layers_to_transform": 1}, ["1.mlp.up_proj"]),
        ({"target_modules": ["up_proj"], "layers_to_transform": [0]}, ["0.mlp.up_proj"]),
        (
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["0.self_attn.v_proj"]},
            [QV[0], *QV[2:]],
        ),
        ({"target_modules": "all-linear", "exclude_modules": ".*mlp.*|.*[kvo]_proj"}, [QV[0], QV[2]]),
    ],
)
def test_reads_what_target_modules_name_and_nothing_else(tmp_path, config, modules):
    adapter = read_adapter(write(tmp_path, config, tensors_of(modules)), SPEC)
    assert set(adapter.layers) == {f"model.layers.{module}" for module in modules}
    stray = tensors_of([*modules, "0.self_attn.k_proj"])
    if "0.self_attn.k_proj" not in modules:
        with pytest.raises(ValueError, match=r"k_proj\.lora_A\.weight: not among the target_modules"):
            read_adapter(write(tmp_path, config, stray), SPEC)
    short = {name: x for name, x in tensors_of(modules).items() if modules[-1] not in name}
    with pytest.raises(ValueError, match=f"missing: .*{modules[-1]}"):
        read_adapter(write(tmp_path, config, short), SPEC)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type="IA3": must be LORA'),
        ({"r": 0}, "r=0: must be a whole number >= 1"),
        ({"r": 65}, "rank 65: must be <= 64"),
        ({"rank_pattern": {"q_proj": 65}}, "rank 65: must be <= 64"),
        ({"rank_pattern": {"q_proj": 0.5}}, "rank_pattern.q_proj=0.5: must be a whole number"),
        ({"rank_pattern": {"(": 1}}, "rank_pattern=.*not a regular expression"),
        ({"lora_alpha": None}, "lora_alpha=null: must be a number > 0"),
        ({"bias": "lora_only"}, 'bias="lora_only": biases are not adapted'),
        ({"use_dora": True}, "use_dora=true: DoRA is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*whole modules"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters=.*experts"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.*embeddings"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa".*changed weights'),
        ({"some_new_switch": {"a": 1}}, "some_new_switch=.*unknown option"),
        ({"target_modules": None}, "target_modules=null: must be a list of names, or a regular"),
        ({"target_modules": "[a"}, r"target_modules=\"\[a\": not a regular expression"),
        (
            {"target_modules": ["q_proj", "c_attn"]},
            "target_modules=c_attn: matches no linear layer.*q_proj, k_proj",
        ),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: lm_head: .*not adapted"),
        (
            {"target_modules": r"model\.(embed_tokens|layers\.0\..*q_proj)"},
            "model.embed_tokens: .*not adapted",
        ),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
            "exclude_modules and layers_to_transform exclude all",
        ),
        ({"layers_to_transform": "0"}, 'layers_to_transform="0": must be'),
        ({"layers_to_transform": [7]}, "exclude all of them"),
        ({"layers_to_transform": 0, "layers_pattern": "h"}, "the model's list is called layers"),
        ({"r": 8}, r"q_proj.lora_A.weight has shape \[4, 32\], must have \[8, 32\] for rank 8"),
    ],
)
def test_refuses_what_it_does_not_compute(tmp_path, config, message):
    with pytest.raises(ValueError, match=message) as refused:
        read_adapter(write(tmp_path, config), SPEC)
    assert str(refused.value).startswith(str(tmp_path))


def changed(of, to):
    tensors = tensors_of(QV)
    key = f"base_model.model.{Q0}.{of}.weight"
    return {**tensors, key: to(tensors[key])}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            changed("lora_B", lambda b: b[:-1]),
            r"q_proj.lora_B.weight has shape \[31, 4\], must have \[32, 4\].*some/base",
        ),
        (
            changed("lora_A", lambda a: a[:, :16]),
            r"q_proj.lora_A.weight has shape \[4, 16\], must have \[4, 32\]",
        ),
        (changed("lora_A", lambda a: a[0]), r"q_proj.lora_A.weight has shape \[32\], must have \[4, 32\]"),
        (changed("lora_A", lambda a: a * math.inf), "q_proj.lora_A.weight: contains infinite numbers or NaN"),
        (changed("lora_A", lambda a: a.to(torch.int8)), "q_proj.lora_A.weight is I8"),
        ({"base_model.model.lm_head.weight": torch.ones(2)}, "lm_head.weight: not supported"),
        (
            {
                **tensors_of(QV),
                "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight": torch.ones(2),
            },
            "layers.0.mlp.experts.1.up_proj: not supported",
        ),
        (tensors_of([*QV, "2.self_attn.q_proj"]), "layers.2.self_attn.q_proj: the model has only 2 layers"),
        (tensors_of(QV[:2]), "missing: .*layers.1.self_attn.q_proj.lora_A.weight.* and 1 more"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=message):
        read_adapter(write(tmp_path, (), {name: x.contiguous() for name, x in tensors.items()}), SPEC)


def test_names_missing_and_truncated_files(tmp_path):
    with pytest.raises(ValueError, match=r"no adapter_config.json; an adapter is a folder"):
        read_adapter(tmp_path, SPEC)
    file = write(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: truncated: .* ends at byte"):
        read_adapter(tmp_path, SPEC)
    file.unlink()
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: no such file"):
        read_adapter(tmp_path, SPEC)


@pytest.mark.parametrize("switches", [{}, {"use_rslora": True}, {"target_modules": "all-linear"}])
def test_merged_weights_equal_those_of_the_peft_library(tmp_path, switches):
    peft = pytest.importorskip("peft", reason="compares with the package peft")
    transformers = pytest.importorskip("transformers", reason="compares with the package transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": r".*(q|k|down)_proj",
        "rank_pattern": {"0.self_attn.q_proj": 3, "down_proj": 2},
        "alpha_pattern": {"k_proj": 5},
        "init_lora_weights": False,  # B is random too
    }
    model = peft.get_peft_model(model, peft.LoraConfig(**config | switches))
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload().state_dict()
    adapter = read_adapter(tmp_path, SPEC)
    for name in linear_layers(SPEC):
        expected = (merged[f"{name}.weight"] - before[f"{name}.weight"]).double()
        found = delta(adapter, name) if name in adapter.layers else torch.zeros_like(expected)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Segments.


def test_segments_are_runs_of_rows_cut_to_size():
    starts, slots = make_segments([1, 1, 0, -1], [1, 1, 1, 5], 2)
    assert starts.tolist() == [0, 2, 3, 5, 7, 8]
    assert slots.tolist() == [1, 0, -1, -1, -1]
    starts, slots = make_segments([2, 2], [1, 3], 8, num_segments=3)
    assert starts.tolist() == [0, 4, 4, 4]
    assert slots.tolist() == [2, NO_ADAPTER, NO_ADAPTER]
    with pytest.raises(ValueError, match="num_segments=1: these rows need 2; sort them by slot"):
        make_segments([0, 1], [1, 1], 16, num_segments=1)


@given(
    rows=st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 40)), max_size=12),
    most=st.integers(1, 20),
    spare=st.integers(0, 3),
)
def test_segments_give_each_token_its_rows_slot(rows, most, spare):
    slots, lengths = zip(*rows, strict=True) if rows else ((), ())
    num_segments = len(make_segments(slots, lengths, most).slots) + spare
    arrays = make_segments(slots, lengths, most, num_segments)
    assert arrays.starts.dtype == arrays.slots.dtype == np.int32
    assert len(arrays.slots) == num_segments
    sizes = np.diff(arrays.starts)
    assert ((sizes >= 0) & (sizes <= most)).all()
    assert np.repeat(arrays.slots, sizes).tolist() == np.repeat(np.array(slots, int), lengths).tolist()


@given(slots=st.lists(st.integers(-1, 3), min_size=1, max_size=200))
def test_decodes_in_order_of_their_slots_fit_the_segments_of_a_graph(slots):
    room = num_decode_segments(len(slots), max_loras=4)
    arrays = make_segments(sorted(slots), [1] * len(slots), DECODE_TOKENS, room)
    assert len(arrays.slots) == room
    assert np.repeat(arrays.slots, np.diff(arrays.starts)).tolist() == sorted(slots)


# What adapters add.


def on_device(slots, num_tokens, most=1 << 30):
    arrays = make_segments(slots, num_tokens, most)
    return Segments(torch.from_numpy(arrays.starts), torch.from_numpy(arrays.slots), most)


def make_bank(spec=SPEC, dtype=torch.float32, **given):
    return AdapterBank(spec, TORCH, dtype, CPU, **{"max_loras": 2, "max_rank": 8} | given)


def mixed_adapters(spec):
    """Returns adapters of unequal ranks, targets and scalings, large enough to change every answer."""
    return {
        "all": random_adapter(spec, 8, seed=1, scaling=400.0),
        "qd": random_adapter(spec, 3, ["q_proj", "down_proj"], seed=2, scaling=900.0),
        "v": random_adapter(spec, 5, ["v_proj", "o_proj", "gate_proj"], seed=3, scaling=500.0),
    }


def merged(weights, spec, adapter):
    """Returns the engine's weights with W + scaling * B @ A in place of W, in float64."""
    own = {name: tensor.double().clone() for name, tensor in weights.items()}
    for (layer, projection), weight in adapted_weights(spec).items():
        for part in weight.parts:
            name = part.name.removesuffix(".weight")
            if adapter is not None and name in adapter.layers:
                own[f"layers.{layer}.{projection}.weight"][part.into] += delta(adapter, name)
    return own


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("projection", ["qkv", "o", "gate_up", "down"])
def test_a_layer_adds_what_merged_weights_would_on_any_number_of_ranks(world_size, projection):
    adapters = mixed_adapters(SPEC)
    slots, lengths = [1, -1, 0, 1], [1, 2, 1, 3]
    whole = adapted_weights(SPEC)[1, projection]
    x = torch.randn(7, whole.shape[1], generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(7, whole.shape[0], dtype=torch.float64)
    for slot, name in enumerate(["all", "qd"]):
        changes = merged(
            {f"layers.{i}.{p}.weight": torch.zeros(w.shape) for (i, p), w in adapted_weights(SPEC).items()},
            SPEC,
            adapters[name],
        )
        rows = torch.from_numpy(np.repeat(slots, lengths) == slot)
        expected[rows] = x[rows].double() @ changes[f"layers.1.{projection}.weight"].T
    total = torch.zeros_like(expected)
    for rank in range(world_size):
        bank = make_bank(rank=rank, world_size=world_size)
        for slot, name in enumerate(("all", "qd")):
            bank.load(name, adapters[name])
            bank.put(name, slot)
        (share,) = (w for at, w in adapted_weights(SPEC, rank, world_size).items() if at == (1, projection))
        mine = x[:, share.parts[0].take[1]] if projection in ("o", "down") else x
        out = torch.zeros(7, share.shape[0])
        bank.apply(1, projection, mine, out, on_device(slots, lengths))
        for part, there in zip(share.parts, whole.parts, strict=True):
            first = there.into[0].start
            columns = slice(first + part.take[0].start, first + part.take[0].stop)
            total[:, columns] += out[:, part.into[0]].double()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-3)
    assert float(expected.abs().max()) > 1


def batch_of(rows, segments, block_size=4, blocks_per_row=10):
    """Returns a batch of rows (table, tokens, first position), decodes first, each with blocks of its own."""
    tokens, positions, kv_slots, tables, lengths, contexts = [], [], [], [], [], []
    for table, row_tokens, first in rows:
        places = torch.arange(first, first + len(row_tokens))
        blocks = torch.arange(blocks_per_row) + 1 + table * blocks_per_row
        tokens += row_tokens
        positions.append(places)
        kv_slots.append(blocks[places // block_size] * block_size + places % block_size)
        tables.append(blocks)
        lengths.append(len(row_tokens))
        contexts.append(first + len(row_tokens))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    num_decodes = sum(first > 0 and length == 1 for (_, _, first), length in zip(rows, lengths, strict=True))
    return Batch(
        tokens_T=torch.tensor(tokens),
        positions_T=torch.cat(positions),
        slots_T=torch.cat(kv_slots),
        block_tables_BM=torch.stack(tables).int(),
        chunk_starts=starts[num_decodes:].int() - num_decodes,
        context_lens_B=torch.tensor(contexts, dtype=torch.int32),
        sampled_rows_S=starts[1:] - 1,
        num_decodes=num_decodes,
        max_query_len=max(lengths[num_decodes:], default=0),
        max_context_len=max(contexts),
        adapters=segments,
    )


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, QWEN3_MOE], ids=lambda config: config["model_type"])
def test_a_mixed_batch_has_the_logits_of_models_with_merged_weights(config):
    """Two adapters and none, in one batch of decodes and chunks; then a third in the slot of the second."""
    spec = Architecture.from_hf(config)
    weights = load_weights(None, spec, torch.float32, CPU, seed=4)
    adapters = (
        mixed_adapters(spec)
        if not spec.num_experts
        else {
            name: random_adapter(spec, 4, ["q_proj", "v_proj", "o_proj", "up_proj"], seed=seed, scaling=600.0)
            for seed, name in enumerate(["all", "qd", "v"])
        }
    )
    bank = make_bank(spec)
    decoder = Decoder(spec, weights, TORCH, 128, adapters=bank)
    cache = KvCache(spec, 50, 4, torch.float32, CPU)
    for name, adapter in adapters.items():
        bank.load(name, adapter)
    for slot, name in enumerate(("qd", "all")):
        bank.put(name, slot)
    prompts = torch.randint(0, 40, (5, 20), generator=torch.Generator().manual_seed(5)).tolist()
    of_row = ["qd", None, "all", "all", "qd"]
    for row, length in enumerate([9, 5, 13]):  # what the decodes and the last chunk go on from
        slot = NO_ADAPTER if of_row[row] is None else bank.resident[of_row[row]]
        segments = on_device([slot], [length])
        decoder.logits(batch_of([(row, prompts[row][:length], 0)], segments), cache)
    rows = [(0, prompts[0][9:10], 9), (1, prompts[1][5:6], 5), (2, prompts[2][13:14], 13)]
    rows += [(3, prompts[3][:11], 0), (4, prompts[4][:7], 0)]
    slots = [NO_ADAPTER if name is None else bank.resident[name] for name in of_row]
    segments = on_device(slots, [len(tokens) for _, tokens, _ in rows])
    logits = decoder.logits(batch_of(rows, segments), cache)
    plain = []
    for row, (_, tokens, first) in enumerate(rows):
        context_tokens = torch.tensor(prompts[row][: first + len(tokens)])
        own = merged(weights, spec, adapters.get(of_row[row]))
        torch.testing.assert_close(
            logits[row].double(), eager_logits(spec, own, context_tokens)[-1], rtol=1e-3, atol=1e-4
        )
        plain.append(eager_logits(spec, weights, context_tokens)[-1])
    different = (logits.double() - torch.stack(plain)).abs().amax(1)
    assert [float(far) > 0.05 for far in different] == [True, False, True, True, True]
    bank.put("v", 0)
    segments = on_device([0], [6])
    (logits_again,) = decoder.logits(batch_of([(3, prompts[3][:6], 0)], segments), cache)
    own = merged(weights, spec, adapters["v"])
    expected = eager_logits(spec, own, torch.tensor(prompts[3][:6]))[-1]
    torch.testing.assert_close(logits_again.double(), expected, rtol=1e-3, atol=1e-4)


def test_the_dtype_of_the_activations_is_the_adapters():
    bank = make_bank(dtype=torch.bfloat16)
    bank.load("a", random_adapter(SPEC, 4, scaling=100.0))
    bank.put("a", 1)
    x, out = torch.ones(2, 32).bfloat16(), torch.zeros(2, 32).bfloat16()
    bank.apply(0, "o", x, out, on_device([1, -1], [1, 1]))
    assert [bool((row != 0).any()) for row in out] == [True, False]


# Residence.


def bank_with(*names, max_loras=2):
    bank = make_bank(max_loras=max_loras)
    for seed, name in enumerate(names):
        bank.load(name, random_adapter(SPEC, 2, ["q_proj"], seed=seed))
    return bank


def test_a_policy_chooses_the_slot():
    bank = bank_with("a", "b", "c")
    bank.put("a", 1)
    assert dict(bank.resident) == {"a": 1}
    bank.put("b", 1)
    assert dict(bank.resident) == {"b": 1}
    bank.put("b", 0)
    assert dict(bank.resident) == {"b": 0}
    bank.evict(0)
    bank.evict(0)
    assert not bank.resident
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="must be >= 0 and < max_loras=2"):
            bank.put("a", slot)
    bank.unload("a")
    assert bank.names == ("b", "c")


def test_an_adapter_in_a_slot_leaves_nothing_of_the_one_before():
    bank = make_bank(max_loras=1)
    bank.load("large", random_adapter(SPEC, 8, scaling=3.0))
    bank.load("small", random_adapter(SPEC, 2, ["k_proj"], seed=1, scaling=7.0))
    fresh = make_bank(max_loras=1)
    fresh.load("small", random_adapter(SPEC, 2, ["k_proj"], seed=1, scaling=7.0))
    bank.put("large", 0)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    outs = []
    for one in (bank, fresh):
        one.put("small", 0)
        out = torch.zeros(3, 64)
        one.apply(0, "qkv", x, out, on_device([0], [3]))
        outs.append(out)
    assert torch.equal(*outs)
    assert outs[0].ne(0).all(0).tolist() == [32 <= column < 48 for column in range(64)]


def test_the_bank_refuses_what_it_cannot_hold():
    bank = bank_with("a")
    with pytest.raises(ValueError, match="adapter b: not loaded; the loaded adapters are a"):
        bank.put("b", 0)
    with pytest.raises(ValueError, match="adapter a: loaded already"):
        bank.load("a", random_adapter(SPEC, 2))
    with pytest.raises(ValueError, match="adapter b: rank 9 exceeds max_rank=8; raise max_rank, up to 64"):
        bank.load("b", random_adapter(SPEC, 9))
    deeper = Architecture.from_hf({**LLAMA, "num_hidden_layers": 3})
    with pytest.raises(ValueError, match=r"adapter b: model.layers.2.*the model has only 2 layers"):
        bank.load("b", random_adapter(deeper, 2))
    wider = Architecture.from_hf({**LLAMA, "hidden_size": 48, "head_dim": 8})
    with pytest.raises(
        ValueError, match=r"adapter b: .*q_proj.lora_A.weight has shape \[2, 48\], must have \[2, 32\]"
    ):
        bank.load("b", random_adapter(wider, 2))
    huge = Adapter(scaling=1.0, layers={Q0: LowRank(torch.full((1, 32), 1e6), torch.ones(32, 1))})
    with pytest.raises(ValueError, match="adapter b: contains infinite numbers"):
        make_bank(dtype=torch.float16).load("b", huge)
    for wrong, message in (({"max_loras": 0}, "max_loras=0"), ({"max_rank": 65}, "max_rank=65: must be")):
        with pytest.raises(ValueError, match=message):
            make_bank(**wrong)
    assert bank.names == ("a",)
    assert set(TARGETS) == {name.partition(".")[2] for name in SIZES}
