"""Two ranks over gloo compute what one does; steps reach the ranks that wait for them."""

import gc
import queue
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hwmodels.iterations.layout import ParallelLayout
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner import parallel
from realengine.runner.parallel import Group, StepChannel, check_alone, connect, disconnect, follow
from realengine.settings import EngineSettings
from realengine.weights.load import load_weights
from tests.realengine.model.test_decoder import CONFIGS, CPU
from tests.realengine.steps import all_logits, prompts

pytestmark = pytest.mark.xdist_group("parallel")  # its tests share two processes

torch.set_num_threads(1)

MODELS = {
    "llama": (CONFIGS["llama"] | {"vocab_size": 98}, None, torch.float32),
    "qwen2_tied": (CONFIGS["qwen2"] | {"vocab_size": 98, "tie_word_embeddings": True}, None, torch.float32),
    "qwen3_moe": (CONFIGS["qwen3_moe"] | {"vocab_size": 98}, None, torch.float32),
    "llama_int8_kv": (CONFIGS["llama"] | {"vocab_size": 98}, None, torch.int8),
}
TWO = ParallelLayout(tensor_parallel_size=2)
STEPS = [torch.arange(size, dtype=torch.int32) for size in (0, 3, 15, 16, 40)]
TIMEOUT_S = 120


def logits_of(config, quantization, cache_dtype, group):
    """Computes the logits of mixed batches; the ranks share the random weights of one device."""
    spec = Architecture.from_hf(config)
    weights = load_weights(
        None,
        spec,
        torch.float32,
        CPU,
        quantization=quantization,
        rank=group.rank,
        world_size=group.world_size,
        seed=1,
    )
    for name, weight in weights.items():
        if not name.endswith("norm.weight") and not (name == "head.weight" and spec.tie_word_embeddings):
            weight.mul_(10)
    decoder = Decoder(spec, weights, TORCH, 128, group)
    cache = KvCache(spec, 70, 4, cache_dtype, CPU, group.world_size)
    return torch.cat(all_logits(decoder, cache, prompts(spec.vocab_size)))


@contextmanager
def recorded_collectives():
    """Records operation, shape, dtype and group of each call to torch.distributed, which is carried out."""
    calls, kept = [], (dist.all_reduce, parallel._all_gather)

    def all_reduce(x, *args, group, **others):
        calls.append(("all_reduce", tuple(x.shape), str(x.dtype), group.group_desc))
        return kept[0](x, *args, group=group, **others)

    def all_gather(out, x, *, group):
        calls.append(("all_gather", tuple(x.shape), str(x.dtype), group.group_desc))
        return kept[1](out, x, group=group)

    dist.all_reduce, parallel._all_gather = all_reduce, all_gather
    try:
        yield calls
    finally:
        dist.all_reduce, parallel._all_gather = kept


def rank_main(rank, address, results):
    torch.set_num_threads(1)
    mesh = connect(rank, TWO, 2, CPU, address)
    group, everyone = mesh.tensor, mesh.everyone
    with recorded_collectives() as calls:
        logits = {name: logits_of(*model, group).numpy() for name, model in MODELS.items()}
    results.put((rank, "logits", logits))
    results.put((rank, "collectives", calls))
    results.put((rank, "smallest", everyone.smallest(7 - rank)))
    everyone.check_alike({"torch": "2.13", "blocks": 7})
    try:
        everyone.check_alike({"torch": "2.13", "blocks": 7 - rank})
    except RuntimeError as error:
        results.put((rank, "alike", str(error)))
    results.put((rank, "gathered", group.all_gather(torch.full((2, 3), float(rank))).tolist()))
    channel = StepChannel(everyone, first_words=16)
    if rank == 0:
        for step in STEPS:
            channel.send(step)
        channel.stop()
    else:
        seen = []
        follow(channel, seen.append)
        results.put((rank, "steps", [step.tolist() for step in seen]))
    disconnect()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Returns what both ranks report, by (rank, name)."""
    context = mp.get_context("spawn")
    results = context.Queue()
    address = f"file://{tmp_path_factory.mktemp('ranks') / 'meeting'}"
    ranks = [context.Process(target=rank_main, args=(rank, address, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    reported = {}
    try:
        while len(reported) < 11:
            rank, what, value = results.get(timeout=TIMEOUT_S)
            reported[rank, what] = value
        for process in ranks:
            process.join(TIMEOUT_S)
    except queue.Empty:
        pytest.fail(f"ranks ended with {[process.exitcode for process in ranks]}, reported {set(reported)}")
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    return reported


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_logits_of_one(found, name):
    expected = logits_of(*MODELS[name], Group())
    for rank in range(2):
        logits = torch.from_numpy(found[rank, "logits"][name])
        assert logits.shape == expected.shape  # all of the vocabulary, on each
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_collectives_see_all_ranks_in_order(found):
    for rank in range(2):
        assert found[rank, "smallest"] == 6
        assert found[rank, "gathered"] == [[0.0] * 3 + [1.0] * 3] * 2


def test_the_collectives_of_steps_are_the_same_on_every_rank_in_the_same_order(found):
    calls = found[0, "collectives"]
    assert calls == found[1, "collectives"]
    assert {call[0] for call in calls} == {"all_reduce", "all_gather"}
    assert {call[-1] for call in calls} == {"tensor"}, "and none between the hosts"


def test_ranks_that_differ_are_told_in_what(found):
    for rank in range(2):
        assert found[rank, "alike"] == (
            "ranks differ: blocks is 7 on rank 0 and 6 on rank 1; start all ranks with the "
            "same software, model folder and kind of GPU"
        )


def test_steps_of_any_length_reach_the_waiting_rank_in_order(found):
    assert found[1, "steps"] == [step.tolist() for step in STEPS]


def test_one_rank_is_a_group_of_its_own():
    group, x = connect(0, ParallelLayout(), 2, CPU, "file:///nowhere").tensor, torch.ones(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x) is x
    assert group.broadcast(x) is x
    assert group.smallest(3) == 3


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match=r"rank=2: must be in 0 \.\. world_size - 1, world_size=2"):
        connect(2, TWO, 2, CPU, "file:///nowhere")


def test_a_layout_is_launched_as_far_as_the_engine_cuts_models():
    layout = ParallelLayout(tensor_parallel_size=2, pipeline_parallel_size=2, pp_layer_partition=(3, 1))
    assert EngineSettings().with_layout(layout).layout == layout


def test_rejects_cuts_that_are_only_simulated():
    layout = ParallelLayout(tensor_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="sequence_parallel=True: works in simulations only"):
        EngineSettings().with_layout(layout)


class Engine:
    """An engine that leaves its group when it is collected, and is in a cycle of references."""

    def __init__(self):
        self.itself = self
        weakref.finalize(self, disconnect)


@pytest.fixture
def without_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_second_engine_with_ranks_takes_the_place_of_one_that_is_no_longer_used(
    tmp_path, without_collection
):
    """torch has one group per process, and an engine in a cycle leaves it only when it is collected."""
    check_alone()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    engine = Engine()
    with pytest.raises(ValueError, match="this process has another engine"):
        check_alone()
    assert dist.is_initialized()
    del engine
    check_alone()
    assert not dist.is_initialized()
