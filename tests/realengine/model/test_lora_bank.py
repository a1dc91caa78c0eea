"""Slots of adapters on the device: a policy chooses them, and nothing of the adapter before is left."""

from __future__ import annotations

import pytest
import torch

from realengine.model.architecture import Architecture
from realengine.model.lora_adapter import Adapter, LowRank
from tests.realengine.adapters import TARGETS, random_adapter
from tests.realengine.checkpoints import LLAMA
from tests.realengine.model.lora_models import Q0, SIZES, SPEC, make_bank, on_device

torch.set_num_threads(1)


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
