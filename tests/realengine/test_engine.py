"""The engine against a plain eager model: same tokens whatever the policies do with batches and memory."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.sampling import Penalties, Sampling, count_tokens, mark_prompt, sample_reference
from policies.batching.chunked import Chunked
from policies.batching.dynamic import Dynamic
from policies.batching.prefill_first import PrefillFirst
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Static
from policies.caching.paged import Paged
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.selective import H2o
from policies.caching.tiered import Tiered
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from policies.scheduling.virtual_token_counter import VirtualTokenCounter
from policies.user_code.failure import PolicyError
from realengine.model.architecture import Architecture
from realengine.runner.executor import DeviceLostError
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights
from tests.realengine.adapters import random_adapter
from tests.realengine.eager import eager_logits
from tests.realengine.model.test_lora import merged

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


@pytest.fixture(scope="module")
def expected():
    """Returns a function that gives the eager tokens of every prompt, by config."""
    known = {}

    def of(config):
        if config not in known:
            llm = make(config)
            known[config] = [eager_tokens(llm, prompt, 12) for prompt in prompts()]
        return known[config]

    return of


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "even"])
def test_a_mixed_batch_gives_each_the_tokens_of_the_eager_model(config, expected):
    llm = make(config, batching=Chunked(max_num_batched_tokens=24))
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected(config)


@pytest.mark.parametrize(
    "batching",
    [
        Chunked(max_num_batched_tokens=9),
        PrefillFirst(max_num_batched_tokens=32),
        SplitFuse(max_num_batched_tokens=16),
        Static(batch_size=3),
        Dynamic(batch_size=4, max_queue_delay_s=0.01),
    ],
    ids=lambda batching: type(batching).__name__,
)
def test_whatever_the_batches(batching, expected):
    assert tokens_of(make(batching=batching).generate(prompts(), GREEDY)) == expected("llama")


@pytest.mark.parametrize(
    "caching",
    [Paged(block_size=4), PrefixCaching(block_size=4), Radix(block_size=4), Radix(block_size=1)],
    ids=lambda caching: f"{type(caching).__name__}{caching.block_size}",
)
@pytest.mark.parametrize("tokens_of_kv", [800, 100])
def test_whatever_the_cache_also_where_it_is_too_small_for_all(caching, tokens_of_kv, expected):
    llm = make(
        caching=caching,
        num_kv_blocks=tokens_of_kv // caching.block_size,
        batching=Chunked(max_num_batched_tokens=32),
    )
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    llm.engine.core.check_integrity()
    if tokens_of_kv == 100:
        assert llm.engine.core.num_preemptions > 0


@pytest.mark.parametrize("scheduling", [Priority(), Mlfq(quantum_tokens=4, num_levels=3)])
def test_whatever_the_order(scheduling, expected):
    llm = make(scheduling=scheduling, num_kv_blocks=12)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")


def test_two_engines_of_one_policy_object_share_none_of_its_memory(expected):
    given = VirtualTokenCounter()
    served, idle = (make(scheduling=given) for _ in range(2))
    assert tokens_of(served.generate(prompts(), GREEDY)) == expected("llama")
    assert served.engine.core.scheduling.counter("") > 0
    assert idle.engine.core.scheduling.counter("") == given.counter("") == 0
    given = Mlfq(quantum_tokens=3, num_levels=3)
    for _ in range(2):
        assert tokens_of(make(scheduling=given).generate(prompts(), GREEDY)) == expected("llama")


SWAPPING = {
    "Fcfs": Fcfs(preemption_mode="swap"),
    "Mlfq": Mlfq(quantum_tokens=3, num_levels=3, preemption_mode="swap"),
}


@pytest.mark.parametrize(
    ("scheduling", "overlap"),
    [
        pytest.param(SWAPPING["Fcfs"], False, id="Fcfs-in turn"),
        pytest.param(SWAPPING["Mlfq"], True, id="Mlfq-overlapped"),
        pytest.param(SWAPPING["Fcfs"], True, id="Fcfs-overlapped", marks=pytest.mark.slow),
        pytest.param(SWAPPING["Mlfq"], False, id="Mlfq-in turn", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("caching", [Paged(block_size=4), PrefixCaching(block_size=4), Radix(block_size=4)])
def test_what_was_swapped_to_host_memory_comes_back_as_it_was(scheduling, caching, overlap, expected):
    llm = make(scheduling=scheduling, caching=caching, overlap=overlap, num_kv_blocks=20)
    loads = counted_loads(llm)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    assert len(loads) > 3
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=5)
    for prompt, output in zip(prompts(), llm.generate(prompts(), params), strict=True):
        for one in output.outputs:
            assert_drawn(prompt, one.token_ids, params, one.index)


def counted_loads(llm):
    """Returns a list that grows with each load from host memory."""
    loads, moved = [], llm.engine.runner.move

    def move(transfers):
        loads.extend(transfer for transfer in transfers if transfer.target == "gpu")
        moved(transfers)

    llm.engine.runner.move = move
    return loads


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("host_blocks", [12, 100])
def test_what_the_gpu_evicts_is_found_in_host_memory(write, host_blocks, expected):
    block_bytes = 2 * 2 * 2 * 16 * 4 * 4  # keys and values, layers, heads, head_dim, tokens, float32
    caching = Tiered(block_size=4, host_gib=host_blocks * block_bytes / 2**30, write=write, min_load_tokens=4)
    llm = make(caching=caching, num_kv_blocks=30, overlap=True)
    loads = counted_loads(llm)
    for _ in range(2):
        for prompt, tokens in zip(prompts(), expected("llama"), strict=True):
            assert tokens_of(llm.generate([prompt], GREEDY)) == [tokens]
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    assert loads
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_the_next_turn_finds_prompt_and_answer_of_the_last(caching):
    llm = make(caching=caching)
    (first,) = llm.generate([prompts()[2]], GREEDY)
    turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 9, 8]
    found = {}
    answer = llm.engine.add(turn, GREEDY)
    while not answer.is_finished:
        llm.engine.step()
        seq = llm.engine.core.find(answer.request_id)
        if seq is not None:
            found["tokens"] = seq.num_found
    assert found["tokens"] == (len(turn) - 3) // 4 * 4  # the last answer token's KV was never computed
    assert tuple(answer.outputs[0].tokens) == eager_tokens(llm, turn, 12)


def test_the_same_tokens_are_drawn_whatever_else_is_in_the_batch():
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    alone = make().generate([prompts()[1]], params)[0].outputs[0].token_ids
    beside = make(batching=Chunked(max_num_batched_tokens=16)).generate(
        [prompts()[4], prompts()[1], prompts()[2]], params
    )
    assert beside[1].outputs[0].token_ids == alone
    other = SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=12, ignore_eos=True)
    assert make().generate([prompts()[1]], other)[0].outputs[0].token_ids != alone


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("max_iterations", [1, 3, 16])
@pytest.mark.parametrize("num_kv_blocks", [200, 9])
def test_whatever_runs_ahead_of_the_tokens(overlap, max_iterations, num_kv_blocks, expected):
    llm = make(overlap=overlap, max_iterations=max_iterations, num_kv_blocks=num_kv_blocks)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")
    llm.engine.core.check_integrity()
    # An answer that ends by a token: tokens computed beyond it are not emitted, and its memory is free again.
    stops = [
        SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(tokens[4],))
        for tokens in expected("llama")
    ]
    outputs = llm.generate(prompts(), stops)
    for output, tokens in zip(outputs, expected("llama"), strict=True):
        end = tokens.index(tokens[4]) + 1
        assert output.outputs[0].token_ids == tokens[:end]
        assert output.outputs[0].finish_reason == "stop"
    assert llm.engine.core.num_unfinished == 0
    llm.engine.core.check_integrity()


def test_sampled_tokens_depend_on_seed_and_place_alone():
    params = [SamplingParams(max_tokens=9, ignore_eos=True, seed=seed, top_k=20) for seed in range(12)]
    alone = [make().generate([prompt], one)[0] for prompt, one in zip(prompts(), params, strict=True)]
    together = make(num_kv_blocks=9, overlap=True, max_iterations=4).generate(prompts(), params)
    assert tokens_of(together) == tokens_of(alone)
    others = make().generate(prompts(), [replace(one, seed=one.seed + 50) for one in params])
    assert sum(a != b for a, b in zip(tokens_of(others), tokens_of(alone), strict=True)) > 9


@pytest.mark.parametrize("num_kv_blocks", [200, 8])
def test_answers_to_one_prompt_share_its_kv_and_are_drawn_each_by_itself(num_kv_blocks):
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=5, repetition_penalty=1.2)
    llm = make(num_kv_blocks=num_kv_blocks, overlap=True)
    outputs = llm.generate(prompts(), params)
    assert (llm.engine.core.num_preemptions > 0) == (num_kv_blocks == 8)
    llm.engine.core.check_integrity()
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({one.token_ids for one in output.outputs}) == 3
        for one in output.outputs:  # each is the likeliest continuation's sibling: its KV was its own
            assert_drawn(prompt, one.token_ids, params, one.index)


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


def test_of_several_answers_each_ends_by_itself():
    params = SamplingParams(n=4, max_tokens=30, seed=2, stop_token_ids=tuple(range(12)))
    llm = make(overlap=True)
    (output,) = llm.generate([prompts()[1]], params)
    lengths = {len(one.token_ids) for one in output.outputs}
    assert len(lengths) > 1
    for one in output.outputs:
        assert one.finish_reason == "stop"
        assert one.token_ids[-1] < 12
        assert min(one.token_ids[:-1], default=12) >= 12
        assert_drawn(prompts()[1], one.token_ids, params, one.index)
    # Some end by a token at the very step at which the others reach their limit.
    first = min(lengths)
    (cut,) = llm.generate([prompts()[1]], replace(params, max_tokens=first))
    assert {one.finish_reason for one in cut.outputs} == {"stop", "length"}
    assert [one.token_ids for one in cut.outputs] == [one.token_ids[:first] for one in output.outputs]
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("max_loras", [1, 2])
def test_requests_with_adapters_and_without_go_through_one_batch(max_loras, expected):
    architecture = Architecture.from_hf(LLAMA)
    weights = load_weights(None, architecture, torch.float32, "cpu", seed=1)
    adapters = {
        name: random_adapter(architecture, 4, seed=seed, scaling=40.0) for seed, name in enumerate("ab")
    }
    names = [None, "a", "b", "a", None, "b", "a", "a", "b", None, "b", "a"]
    llm = make(lora_adapters=adapters, max_loras=max_loras, overlap=True, num_kv_blocks=9)
    wanted = list(expected("llama"))
    for place, name in enumerate(names):
        if name is not None:
            own = merged(weights, architecture, adapters[name])
            wanted[place] = eager_tokens(llm, prompts()[place], 12, own)
    assert tokens_of(llm.generate(prompts(), GREEDY, names)) == wanted
    assert sum(a != b for a, b in zip(wanted, expected("llama"), strict=True)) == 9
    # What one has computed is not found by another.
    again = llm.generate([prompts()[2]] * 3, GREEDY, [None, "a", "b"])
    assert again[0].outputs[0].token_ids == expected("llama")[2]
    assert again[2].outputs[0].token_ids == wanted[2]
    (unknown,) = llm.generate([prompts()[0]], GREEDY, "c")
    assert unknown.error == "adapter=c: must be one of the served adapters: a, b"


def test_penalties_survive_a_preemption():
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.7, frequency_penalty=0.4
    )
    calm = make().generate(prompts(), params)
    tight = make(num_kv_blocks=9)
    assert tokens_of(tight.generate(prompts(), params)) == tokens_of(calm)
    assert tight.engine.core.num_preemptions > 0
    assert tokens_of(calm) != tokens_of(make().generate(prompts(), GREEDY))


def test_logprobs_are_the_eager_model_s():
    llm = make()
    weights = load_weights(None, llm.architecture, torch.float32, "cpu", seed=1)
    prompt = prompts()[1]
    asked, silent = replace(GREEDY, logprobs=3), GREEDY
    output, other = llm.generate([prompt, prompts()[2]], [asked, silent])
    assert other.outputs[0].logprobs is None
    tokens = [*prompt, *output.outputs[0].token_ids]
    truth = eager_logits(llm.architecture, weights, torch.tensor(tokens)).log_softmax(-1)
    for place, logprob in enumerate(output.outputs[0].logprobs):
        row = truth[len(prompt) + place - 1]
        assert logprob.logprob == pytest.approx(float(row[tokens[len(prompt) + place]]), abs=1e-4)
        top = row.topk(3)
        assert list(logprob.top) == top.indices.tolist()
        assert list(logprob.top.values()) == pytest.approx(top.values.tolist(), abs=1e-4)
    assert len(output.outputs[0].logprobs) == 12


def test_an_end_token_ends_an_answer_and_is_its_last():
    llm = make()
    (free,) = llm.generate([prompts()[1]], GREEDY)
    third = free.outputs[0].token_ids[2]
    stopping = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    (output,) = llm.generate([prompts()[1]], stopping)
    first = free.outputs[0].token_ids.index(third)
    assert output.outputs[0].token_ids == free.outputs[0].token_ids[: first + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_triton_kernels_give_the_same_tokens(expected):
    """In Triton's interpreter: chunks and decodes, copies on write, swaps, sampling, an adapter."""
    settings = {"backend": "triton", "num_kv_blocks": 20, "scheduling": Fcfs(preemption_mode="swap")}
    settings |= {"caching": PrefixCaching(block_size=4), "batching": Chunked(max_num_batched_tokens=24)}
    short = replace(GREEDY, max_tokens=5)
    llm = make(**settings)
    loads = counted_loads(llm)
    places = (0, 1, 2, 5, 7, 8)
    asked = [prompts()[place] for place in places]
    assert tokens_of(llm.generate(asked, short)) == [expected("llama")[place][:5] for place in places]
    assert loads
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True, seed=3, top_k=9, presence_penalty=0.5)
    (output,) = llm.generate([prompts()[1]], params)
    (wanted,) = make().generate([prompts()[1]], params)
    assert output.outputs == wanted.outputs


def test_two_ranks_give_the_tokens_of_one():
    one, two = make("even"), make("even", tensor_parallel_size=2)
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3)
    assert tokens_of(two.generate(prompts(), GREEDY)) == tokens_of(one.generate(prompts(), GREEDY))
    assert two.generate(prompts()[:2], params)[1].outputs == one.generate(prompts()[:2], params)[1].outputs


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_a_launch_that_fails_ends_its_requests_and_leaves_nothing_in_the_cache(caching, overlap, expected):
    llm = make(caching=caching, overlap=overlap, batching=Chunked(max_num_batched_tokens=24))
    execute, launches = llm.engine.runner.execute, []

    def failing(work):
        launches.append(work)
        if len(launches) == 3:
            raise torch.OutOfMemoryError("out of memory: 1 GiB wanted")
        return execute(work)

    llm.engine.runner.execute = failing
    outputs = llm.generate(prompts(), GREEDY)
    failed = [output for output in outputs if output.error is not None]
    assert 0 < len(failed) < len(outputs)
    assert {output.error for output in failed} == {"out of memory: 1 GiB wanted"}
    assert {output.outputs[0].finish_reason for output in failed} == {"error"}
    for output, tokens in zip(outputs, expected("llama"), strict=True):
        assert output.error is not None or output.outputs[0].token_ids == tokens
    llm.engine.core.check_integrity()
    assert tokens_of(llm.generate(prompts(), GREEDY)) == expected("llama")


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_the_next_turn_finds_what_an_aborted_request_has_computed(overlap):
    """An overlapped engine has computed one token more, which it has not read."""
    llm = make(caching=PrefixCaching(block_size=4), num_kv_blocks=30, overlap=overlap)
    prompt = prompts()[4][:30]
    answer = llm.engine.add(prompt, replace(GREEDY, max_tokens=24))
    while len(answer.outputs[0].tokens) < 11:
        llm.engine.step()
    num_computed = llm.engine.core.find(answer.request_id).num_computed
    llm.engine.abort(answer.request_id)
    assert num_computed == 40 + overlap
    turn = prompt + answer.outputs[0].tokens + [5, 6, 7]
    second = llm.engine.add(turn, GREEDY)
    llm.engine.step()
    assert llm.engine.core.find(second.request_id).num_found == 40
    llm.engine.run()
    assert tuple(second.outputs[0].tokens) == eager_tokens(llm, turn, 12)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_an_aborted_request_frees_its_memory_and_leaves_the_others_alone(overlap, expected):
    llm = make(overlap=overlap)
    answers = [llm.engine.add(prompt, GREEDY) for prompt in prompts()]
    for num_steps, given_up in ((3, 1), (4, 6), (1, 11)):
        for _ in range(num_steps):
            llm.engine.step()
        llm.engine.abort(answers[given_up].request_id)
    llm.engine.run()
    for place, answer in enumerate(answers):
        tokens = tuple(answer.outputs[0].tokens)
        if place in (1, 6, 11):
            assert answer.outputs[0].finish_reason == "aborted"
            assert tokens == expected("llama")[place][: len(tokens)]
        else:
            assert tokens == expected("llama")[place]
    llm.engine.core.check_integrity()
    assert llm.engine.core.num_unfinished == 0


def test_a_finished_answer_is_not_lost_to_a_failure_that_comes_later(expected):
    llm = make(overlap=True)
    short = llm.engine.add(prompts()[1], replace(GREEDY, max_tokens=2))
    llm.engine.step()
    llm.engine.step()  # both tokens are launched, the second is not read yet
    other = llm.engine.add(prompts()[2], GREEDY)

    def failing(work):
        raise torch.OutOfMemoryError("no room")

    llm.engine.runner.execute = failing
    llm.engine.run()
    assert short.error is None
    assert tuple(short.outputs[0].tokens) == expected("llama")[1][:2]
    assert other.error == "no room"
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("what", ["moves", "lost"])
def test_an_engine_that_cannot_go_on_ends_all_with_the_reason(what):
    llm = make(num_kv_blocks=20, caching=Paged(block_size=4), scheduling=Fcfs(preemption_mode="swap"))
    execute = llm.engine.runner.execute

    def failing(work):
        if work.moves if what == "moves" else work.shape.num_iterations:
            raise torch.OutOfMemoryError("no room") if what == "moves" else DeviceLostError("a rank is gone")
        return execute(work)

    llm.engine.runner.execute = failing
    outputs = llm.generate(prompts(), GREEDY)
    failed = [output for output in outputs if output.error is not None]
    assert failed
    assert {output.error for output in failed} == {"no room" if what == "moves" else "a rank is gone"}
    assert all(output.finished for output in outputs)
    assert llm.engine.num_unfinished == 0
    (later,) = llm.generate([prompts()[0]], GREEDY)
    assert "the engine has failed" in later.error


@pytest.mark.parametrize("num_reads", [1, 4])
def test_tokens_that_cannot_be_read_end_every_request_and_each_end_is_reported(num_reads):
    """A kernel's error shows when its tokens are fetched: nothing is computed after that."""
    llm = make(overlap=True)
    answers = [llm.engine.add(prompt, replace(GREEDY, max_tokens=n)) for n, prompt in enumerate(prompts(), 1)]
    read, reads = llm.engine._read, []

    def failing(launch):
        reads.append(launch)
        if len(reads) > num_reads:
            raise RuntimeError("an illegal memory access")
        return read(launch)

    llm.engine._read = failing
    finished = set()
    while llm.engine.num_unfinished:
        finished |= {answer.request_id for answer in llm.engine.step() if answer.is_finished}
    assert finished == {answer.request_id for answer in answers}
    errors = {answer.error for answer in answers}
    assert "an illegal memory access" in errors
    assert errors <= {None, "an illegal memory access"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1 << 64}, "seed=18446744073709551616: must be a whole number of 64 bits"),
        ({"seed": 1.5}, "seed=1.5: must be"),
        ({"top_k": 1 << 31}, "top_k=2147483648: must be a whole number"),
        ({"temperature": float("inf")}, "temperature=inf: must be"),
        ({"frequency_penalty": "x"}, "frequency_penalty='x': must be a number"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: must be a whole number"),
        ({"n": 2.0}, "n=2.0: must be a whole number"),
        ({"n": 10**9}, "n=1000000000: must be a whole number >= 1 and <= 1024"),
        ({"stop_token_ids": 3}, "stop_token_ids=3: must be a sequence of token ids"),
        ({"stop": ""}, "stop='': must be a sequence of strings"),
        ({"logprobs": 101}, "logprobs=101: must be a whole number >= 0 and <= 100"),
    ],
)
def test_sampling_params_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)


def test_every_seed_of_64_bits_draws():
    seeds = [SamplingParams(max_tokens=3, seed=seed) for seed in (-(1 << 63), -1, 0, (1 << 64) - 1)]
    outputs = make().generate([prompts()[1]] * 4, seeds)
    assert all(output.error is None for output in outputs)
    assert outputs[1].outputs[0].token_ids == outputs[3].outputs[0].token_ids  # the same 64 bits


def test_each_gets_as_many_logprobs_as_it_asked_for():
    llm = make()
    asked = [replace(GREEDY, logprobs=num) for num in (1, 5, 0)]
    outputs = llm.generate([prompts()[1]] * 3, asked)
    assert [len(output.outputs[0].logprobs[3].top) for output in outputs] == [1, 5, 0]
    assert outputs[0].outputs[0].logprobs[3].top.items() <= outputs[1].outputs[0].logprobs[3].top.items()
    too_many, fine = llm.generate([prompts()[1]] * 2, [replace(GREEDY, logprobs=98), GREEDY])
    assert too_many.error == "logprobs=98: must be <= 97, the size of the vocabulary"
    assert fine.error is None


@pytest.mark.parametrize("caching", [PrefixCaching(block_size=4), Radix(block_size=4)])
def test_logprobs_behind_a_hit_are_those_without(caching):
    llm = make(caching=caching)
    params = replace(GREEDY, logprobs=5)
    (cold,), (warm,) = llm.generate([prompts()[4]], params), llm.generate([prompts()[4]], params)
    for before, after in zip(cold.outputs[0].logprobs, warm.outputs[0].logprobs, strict=True):
        assert list(before.top) == list(after.top)
        assert list(before.top.values()) == pytest.approx(list(after.top.values()), abs=1e-5)


def test_prompts_in_no_shape_leave_nothing_behind():
    llm = make()
    with pytest.raises(ValueError, match="give token ids"):
        llm.generate([[1, 2], "text"])
    with pytest.raises(ValueError, match=re.escape("[[1, 2, 3]] for one prompt of ids")):
        llm.generate([1, 2, 3])
    assert llm.engine.num_unfinished == 0
    (output,) = llm.generate([[1.5]], GREEDY)
    assert "prompt token 0 is 1.5" in output.error


def test_a_bad_request_ends_with_its_error_while_others_go_on(expected):
    llm = make()
    outputs = llm.generate([prompts()[0], [3, 97], [], [1] * 128, prompts()[1]], GREEDY)
    assert [output.error for output in outputs] == [
        None,
        "prompt token 1 is 97: must be >= 0 and < 97",
        "an empty prompt",
        "prompt of 128 tokens: max_model_len is 128",
        None,
    ]
    assert [outputs[i].outputs[0].token_ids for i in (0, 4)] == expected("llama")[:2]
    assert all(output.finished for output in outputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda"}, "no GPU was found; device='cpu'"),
        ({"backend": "cuda"}, "backend=cuda: must be one of triton, torch"),
        ({"dtype": "int8"}, "dtype=int8: must be one of float32"),
        ({"max_model_len": 129}, "max_model_len=129: must be <= 128, the model's context length"),
        ({"caching": Tiered(disk_gib=1)}, "keeps KV in host memory, not on disk"),
        (
            {"caching": H2o()},
            "H2o: it drops KV by the attention weights of every token, which the engine's kernels",
        ),
        (
            {"batching": Static(until_last=True)},
            "batching.until_last=true: works in simulations only; set it to false",
        ),
        (
            {"caching": Radix(eviction="belady")},
            "needs to know future requests, so it works in simulations only",
        ),
        ({"max_iterations": 0}, "max_iterations=0: must be >= 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, RuntimeError), match=message):
        make(**settings)


class Failing(Chunked):
    """A user's policy that gives no token, or uses what does not exist."""

    __slots__ = ()

    def fill(self, view, step, now):
        if self.max_num_batched_tokens == 1:
            step.decode_everything()


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        (1, "fill used step.decode_everything, which does not exist"),
        (2, "fill scheduled nothing with 2 waiting"),
    ],
)
def test_a_user_s_policy_that_fails_is_named_with_its_line(budget, sentence):
    llm = make(batching=Failing(max_num_batched_tokens=budget))
    with pytest.raises(
        PolicyError, match=rf"^batching=Failing \(.*Failing\): at .* s in iteration 0, {sentence}"
    ) as raised:
        llm.generate(prompts(1), GREEDY)
    assert "test_engine.py:" in raised.value.quote
    assert not llm.engine.num_unfinished
