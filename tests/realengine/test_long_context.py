"""Contexts beyond 32,768 tokens, whose offsets, splits and rotations a short test does not reach.

Of a model of one layer, the last row needs the keys and values of all tokens but the attention of its own row
only, so the expected logits cost little.
"""

from dataclasses import replace

import pytest
import torch

from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH, TRITON
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.small_models import LLAMA
from tests.realengine.steps import batch_of

torch.set_num_threads(1)

LENGTH = 33_001
TINY = LLAMA | {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 65536,
    "rope_theta": 1e6,
}
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def last_logits(spec, weights, tokens):
    """Computes the logits of the last token in float64, from the attention of its row alone."""
    return eager_logits(spec, weights, torch.tensor(tokens), last_only=True)[-1]


@pytest.mark.slow
def test_greedy_tokens_beyond_32k_are_those_of_the_eager_model(tokens):
    llm = LLM(
        Architecture.from_hf(TINY),
        device="cpu",
        seed=1,
        num_kv_blocks=2200,
        batching=Chunked(max_num_batched_tokens=4096),
    )
    weights = load_weights(None, llm.architecture, torch.float32, "cpu", seed=1)
    prompts = [tokens, [*tokens[:32_768], 5]]  # the second one begins as the first: a cache hit
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        text = list(prompt)
        for token in output.outputs[0].token_ids:
            assert token == int(last_logits(llm.architecture, weights, text).argmax())
            text.append(token)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 40])
def test_triton_s_kernels_attend_beyond_32k(tokens, window):
    """One long context beside a short one: a decode and a chunk over keys that torch has written."""
    spec = Architecture.from_hf(TINY | {"model_type": "mistral", "sliding_window": window})
    weights = load_weights(None, spec, torch.float32, "cpu", seed=1)
    texts, most = [tokens, tokens[:50]], LENGTH // 16 + 1
    tables = (torch.randperm(2 * most, generator=torch.Generator().manual_seed(2)) + 1).int().view(2, most)
    cache = KvCache(spec, 2 * most, 16, torch.float32, torch.device("cpu"))
    triton_decoder = Decoder(spec, weights, TRITON, 65536)
    narrow = replace(spec, sliding_window=1)  # in the only layer, KV does not depend on attention
    torch_decoder = Decoder(narrow, weights, TORCH, 65536)
    for first in range(0, LENGTH - 8, 4096):
        size = min(4096, LENGTH - 8 - first)
        torch_decoder.states(batch_of([(0, first, size)], texts, tables, 16), cache)
    torch_decoder.states(batch_of([(1, 0, 49)], texts, tables, 16), cache)
    chunk = triton_decoder.logits(batch_of([(1, 49, 1), (0, LENGTH - 8, 7)], texts, tables, 16), cache)
    decode = triton_decoder.logits(batch_of([(0, LENGTH - 1, 1)], texts, tables, 16), cache)
    for found, text in ((chunk[0], texts[1]), (chunk[-1], tokens[:-1]), (decode[0], tokens)):
        torch.testing.assert_close(found.double(), last_logits(spec, weights, text), rtol=1e-4, atol=1e-4)
