"""Expert parallelism: tokens are those of one rank, also while experts move between the ranks."""

import pytest
import torch

from policies.placement.experts import Eplb
from realengine.model.architecture import Architecture
from realengine.model.moe import ExpertSlots
from realengine.runner.expert_balance import staying
from realengine.serving.llm import LLM
from realengine.weights.load import load_weights
from realengine.weights.table import ExpertShare
from tests.realengine.small_models import GREEDY, LLAMA, prompts, tokens_of

MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 98,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
}
TWO = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
CPU = torch.device("cpu")


def engine(config=MOE, **settings):
    return LLM(
        Architecture.from_hf(config), seed=1, device="cpu", num_kv_blocks=200, max_num_seqs=8, **settings
    )


def test_two_ranks_with_different_experts_give_the_tokens_of_one_while_these_move():
    """Two copies of the most popular experts; every five steps all experts are placed anew."""
    two = engine(**TWO, expert_placement=Eplb(num_redundant_experts=2, step_interval=5))
    one = engine()
    assert tokens_of(two.generate(prompts(), GREEDY)) == tokens_of(one.generate(prompts(), GREEDY))
    balance = two.engine.runner.execute.args[0].balance
    assert balance.num_moved > 0
    placed = [experts.slots.slots for experts in balance._experts.values()]
    assert len(placed) == 2
    assert all(sorted({e for rank in slots for e in rank}) == [*range(6)] for slots in placed)
    again = two.generate(prompts()[:3], GREEDY)
    assert tokens_of(again) == tokens_of(one.generate(prompts()[:3], GREEDY)), "the moved weights are right"


def test_the_shares_of_ranks_are_slices_of_the_experts():
    """Three slots of a rank, with a copy, and the second half of the intermediate values."""
    architecture = Architecture.from_hf(MOE)
    whole = load_weights(None, architecture, torch.float32, CPU, seed=1)
    share = load_weights(None, architecture, torch.float32, CPU, seed=1, experts=ExpertShare((4, 1, 4), 1, 2))
    down = "layers.0.experts_down.weight"
    assert torch.equal(share[down], whole[down][[4, 1, 4]][..., 16:])
    gate_up = "layers.1.experts_gate_up.weight"
    of_experts = whole[gate_up][[4, 1, 4]]
    assert torch.equal(share[gate_up], torch.cat([of_experts[:, 16:32], of_experts[:, 48:]], 1))
    assert torch.equal(share["layers.0.qkv.weight"], whole["layers.0.qkv.weight"])


def test_tokens_take_the_copies_of_an_expert_in_turn():
    """Expert 0 has slots on both ranks; rank 1 has the slots 2 and 3."""
    slots = ExpertSlots(((0, 1), (2, 0)), 1, 3, CPU)
    experts_TJ = torch.tensor([[0, 1], [0, 2], [2, 0]], dtype=torch.int32)
    assert slots.chosen(experts_TJ).tolist() == [[0, 1], [3, 2], [2, 0]]
    assert slots.here(slots.chosen(experts_TJ)).tolist() == [[-1, -1], [1, 0], [0, -1]]
    assert slots.loads_E.tolist() == [6, 2, 4]
    slots.place(((2, 1), (0, 1)))
    assert slots.loads_E.tolist() == [0, 0, 0]
    assert slots.here(slots.chosen(experts_TJ)).tolist() == [[0, -1], [0, -1], [-1, 0]]


def test_experts_that_stay_keep_their_slots():
    assert staying((0, 1, 2), (2, 3, 0)) == (0, 3, 2)
    assert staying((0, 0, 1), (0, 1, 1)) == (0, 1, 1)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (LLAMA, TWO, "expert_parallel_size=2: the model has no experts; must be 1"),
        (
            MOE,
            TWO | {"expert_placement": Eplb(num_redundant_experts=1)},
            r"expert_parallel_size=2: must divide the 7 slots, num_experts=6 \+ num_redundant_experts=1",
        ),
        (
            MOE,
            {"tensor_parallel_size": 2, "expert_parallel_size": 3},
            "expert_parallel_size=3: must divide the 2 devices of a stage",
        ),
        (
            MOE,
            {"expert_placement": Eplb(num_redundant_experts=2)},
            "expert_placement: num_redundant_experts=2 must be 0 with expert_parallel_size=1",
        ),
        (MOE, {"expert_parallel_size": 0}, "expert_parallel_size=0: must be >= 1"),
    ],
)
def test_rejects_experts_that_cannot_be_divided(config, settings, message):
    with pytest.raises(ValueError, match=message):
        engine(config, **settings)
