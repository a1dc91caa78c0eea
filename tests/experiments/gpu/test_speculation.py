"""The coin that accepts draft tokens in timings, and what the parts on speculation measure."""

# ruff: noqa: E402  what is imported below needs torch and triton

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments.gpu.engine_models import TINY, params_of, random_requests
from experiments.gpu.scripted_acceptance import Coin, CopiedStream, accepting
from experiments.gpu.speculation_correct import variants
from experiments.gpu.speculation_kernels import verify_case
from experiments.gpu.speculation_speed import LLAMA_1B
from experiments.gpu.speed_cases import decode_case
from kernels.rejection import match_drafts_reference
from policies.speculation.proposers.ngram import Ngram
from realengine.serving.llm import LLM
from realengine.speculation.settings import SpeculationSettings
from realengine.weights.table import expected

torch.set_num_threads(1)


def verdict(rate, num_drafts):
    """Returns the coin's verdict over sequences with so many drafts each, none of which is right."""
    starts = torch.tensor([0, *(1 + num for num in num_drafts)]).cumsum(0)
    tokens, drawn = torch.zeros(int(starts[-1]), dtype=torch.int64), torch.arange(1, 1 + int(starts[-1]))
    coin = Coin(rate)
    found = coin.match(match_drafts_reference, tokens, drawn, starts, max(num_drafts))
    return found, drawn


def test_a_sure_coin_accepts_all_drafts_of_a_sequence_and_no_more():
    found, drawn = verdict(1.0, (2, 0, 3))
    assert found.accepted_B.tolist() == [2, 0, 3]
    assert found.rows_BD.tolist() == [[0, 1, 2, 2], [3, 3, 3, 3], [4, 5, 6, 7]]
    assert torch.equal(found.tokens_BD, drawn[found.rows_BD])
    assert verdict(0.0, (2, 0, 3))[0].accepted_B.tolist() == [0, 0, 0]


def test_a_sure_coin_accepts_no_padding_and_its_rate_can_be_changed():
    starts, drawn = torch.tensor([0, 4, 8]), torch.arange(8)
    tokens = torch.tensor([0, 5, 5, -1, 0, -1, -1, -1])  # two draft tokens, and none
    coin = Coin(1.0)
    with torch.inference_mode():  # as the engine does
        assert coin.match(match_drafts_reference, tokens, drawn, starts, 3).accepted_B.tolist() == [2, 0]
    coin.rate = 0.0
    assert coin.match(match_drafts_reference, tokens, drawn, starts, 3).accepted_B.tolist() == [0, 0]


def test_the_coin_accepts_with_its_rate_until_it_rejects():
    """Of 4 drafts at rate 0.6: 0.6 + 0.36 + 0.216 + 0.1296 = 1.3056 are accepted on average."""
    torch.manual_seed(0)
    found, _ = verdict(0.6, (4,) * 20_000)
    assert float(found.accepted_B.double().mean()) == pytest.approx(1.3056, abs=0.04)  # four deviations
    assert float((found.accepted_B == 4).double().mean()) == pytest.approx(0.1296, abs=0.01)


def test_the_coin_refuses_trees():
    with pytest.raises(ValueError, match="the coin accepts chains only"):
        Coin(0.5).match(match_drafts_reference, None, None, None, 1, torch.zeros(1))


def test_engines_built_within_accept_by_the_coin_and_others_do_not():
    requests = random_requests(3, 2, (20, 20), 12, TINY.vocab_size)
    config = {"method": "draft_model", "model": replace(TINY, num_layers=1), "num_speculative_tokens": 4}
    make = partial(LLM, TINY, device="cpu", max_model_len=128, num_kv_blocks=40, speculative_config=config)

    def accepted(llm):
        outputs = llm.generate([r.prompt for r in requests], [params_of(r) for r in requests])
        assert all(len(output.outputs[0].token_ids) == 12 for output in outputs), outputs
        return [output.drafts.num_accepted_tokens for output in outputs]

    with accepting(Coin(1.0)):
        scripted = make()
    assert min(accepted(scripted)) >= 8
    assert max(accepted(make())) < 8


def test_a_lookup_in_a_copied_stream_finds_what_the_prompt_has_next():
    proposer = Ngram(draft=None, num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
    stream, prompt = CopiedStream(proposer), [10, 11, 12, 13, 14, 15, 16]
    assert stream.draft(0, prompt, [90, 91], 4) == [12, 13, 14, 15]
    assert stream.draft(0, prompt, [90, 91, 92], 2) == [13, 14]
    stream.forget(0, [90, 91, 92])
    assert stream.draft(0, prompt, [90], 3) == [11, 12, 13]


def test_a_pass_with_drafts_reads_the_kv_of_a_decode_once():
    decode, verify = decode_case(8, 1024), verify_case(8, 1024, 3)
    rows = 8 * 32 * 128 * 4.0  # bytes of the queries and outputs of one row of each sequence
    assert verify.bytes_moved - decode.bytes_moved == 3 * rows
    assert verify.flops == pytest.approx(4 * decode.flops, rel=2e-3)


def test_every_variant_has_its_own_name_and_valid_settings():
    found = list(variants(TINY, quick=False))
    assert len({name for name, _, _ in found}) == len(found)
    for _, config, _ in found:
        SpeculationSettings.of(config)
    quick = [name for name, _, _ in variants(TINY, quick=True)]
    assert quick == [name for name, _, _ in found][: len(quick)]


def test_the_draft_model_has_the_sizes_of_llama_1b():
    """Llama-3.2-1B: 1,235,814,400 parameters."""
    sizes = {weight.name: torch.Size(weight.shape).numel() for weight in expected(LLAMA_1B)}
    sizes.pop("head.weight", None)
    assert sum(sizes.values()) == 1_235_814_400


def test_the_simulator_prices_the_attention_of_a_pass():
    """H100: the KV of 64 x 4,096 tokens, 1.074e9 bytes at 0.82 of 3.35e12 bytes/s, takes a decode 391 us."""
    simulated = pytest.importorskip("experiments.gpu.speculation_simulated")
    decode_s = simulated.attention_s("h100_sxm", 64, 4096, 0)
    assert decode_s == pytest.approx(403e-6, rel=0.03)  # with its start and its merge
    assert simulated.attention_s("h100_sxm", 64, 4096, 4) == pytest.approx(decode_s, rel=0.05)  # read once
    assert simulated.attention_s("h100_sxm", 64, 32768, 8) > 7 * decode_s
