"""Small models, an engine with them, and the tokens that a plain eager model computes."""

import torch

from kernels.sampling import Penalties, Sampling, count_tokens, mark_prompt, sample_reference
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits

torch.set_num_threads(1)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 96,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "tie_word_embeddings": True,
    "attention_bias": False,
}
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 7}
CONFIGS = {
    "even": LLAMA | {"vocab_size": 98},  # what two ranks can share
    "llama": LLAMA,
    "qwen3": QWEN3,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
}

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(num=6):
    """Draws prompts from 1 token to some blocks; the second half extends the first half's prompts."""
    generator = torch.Generator().manual_seed(3)
    first = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in (1, 15, 33, 16, 40, 7)][:num]
    return first + [[*prompt, 5, 6, 7] for prompt in first]


def make(config="llama", **settings):
    settings = {"device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8} | settings
    return LLM(Architecture.from_hf(CONFIGS[config]), seed=1, **settings)


def eager_tokens(llm, prompt, num_tokens, weights=None):
    """Computes greedy tokens by running the whole text for each token, without cache or batch."""
    if weights is None:
        weights = load_weights(None, llm.architecture, torch.float32, "cpu", seed=1)
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = eager_logits(llm.architecture, weights, torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tuple(tokens[len(prompt) :])


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def counted_loads(llm):
    """Returns a list that grows with each load from host memory."""
    loads, moved = [], llm.engine.runner.move

    def move(transfers):
        loads.extend(transfer for transfer in transfers if transfer.target == "gpu")
        moved(transfers)

    llm.engine.runner.move = move
    return loads


def assert_drawn(prompt, token_ids, params, index):
    """Checks that the tokens are those that the eager model's logits and the answer's random numbers give."""
    architecture = Architecture.from_hf(CONFIGS["llama"])
    weights = load_weights(None, architecture, torch.float32, "cpu", seed=1)
    logits = eager_logits(architecture, weights, torch.tensor([*prompt, *token_ids]))
    counts = torch.zeros(1, architecture.vocab_size, dtype=torch.int32)
    mark_prompt(counts, 0, torch.tensor(prompt))
    for place, token in enumerate(token_ids, start=len(prompt)):
        sampling = Sampling(
            temperature=torch.tensor([params.temperature]),
            top_k=torch.zeros(1, dtype=torch.int32),
            top_p=torch.ones(1),
            min_p=torch.zeros(1),
            seed=torch.tensor([params.seed]),
            request=torch.tensor([index]),
            position=torch.tensor([place]),
        )
        penalties = Penalties(
            repetition=torch.tensor([params.repetition_penalty]),
            presence=torch.zeros(1),
            frequency=torch.zeros(1),
            counts=counts,
            row=torch.zeros(1, dtype=torch.int64),
        )
        drawn = sample_reference(logits[place - 1 : place].float(), sampling, penalties)
        assert int(drawn) == token, place
        count_tokens(counts, torch.zeros(1, dtype=torch.int64), drawn)
