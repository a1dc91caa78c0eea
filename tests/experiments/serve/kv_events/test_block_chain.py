"""A block has the hash that vLLM gives it; `test_vllm.py` compares them with vLLM's own functions."""

from experiments.serve.kv_events.block_chain import BlockChain


def test_a_hash_depends_on_all_tokens_before_its_end_and_on_no_others():
    one, other = BlockChain([1, 2, 3, 4, 5, 6, 7, 8], 4), BlockChain([9, 2, 3, 4, 5, 6, 7, 8], 4)
    assert one.external_hash(1) != other.external_hash(1)
    longer = BlockChain([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
    assert [longer.external_hash(block) for block in (1, 0)] == [one.external_hash(1), one.external_hash(0)]


def test_hashes_are_those_of_vllm():
    """The numbers are printed by vLLM 0.32 for blocks of 4 tokens, with its default hash and seed."""
    plain = BlockChain(range(100, 112), 4)
    assert [plain.external_hash(block) for block in range(3)] == [
        11368576285790098258,
        4792304319162787800,
        6650736115905410957,
    ]
    salted = BlockChain(range(100, 112), 4, lora="sql", lora_path="/adapters/sql", cache_salt="mine")
    assert [salted.external_hash(block) for block in range(3)] == [
        9293693504006138812,
        1128714116322393715,
        10451908482480281694,
    ]
