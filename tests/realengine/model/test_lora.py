"""Batches with adapters against models with merged weights, and the segments of their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.lora import DECODE_TOKENS, NO_ADAPTER, make_segments, num_decode_segments
from realengine.model.lora_adapter import adapted_weights
from realengine.runner.batch import Batch
from realengine.weights.load import load_weights
from tests.realengine.adapters import random_adapter
from tests.realengine.checkpoints import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from tests.realengine.eager import eager_logits
from tests.realengine.model.lora_models import CPU, SPEC, make_bank, merged, on_device

torch.set_num_threads(1)


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


def mixed_adapters(spec):
    """Returns adapters of unequal ranks, targets and scalings, large enough to change every answer."""
    return {
        "all": random_adapter(spec, 8, seed=1, scaling=400.0),
        "qd": random_adapter(spec, 3, ["q_proj", "down_proj"], seed=2, scaling=900.0),
        "v": random_adapter(spec, 5, ["v_proj", "o_proj", "gate_proj"], seed=3, scaling=500.0),
    }


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
