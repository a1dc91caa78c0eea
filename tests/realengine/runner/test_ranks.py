"""Ranks whose collectives are recorded in captured steps, and ranks that die."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from hwmodels.iterations.layout import ParallelLayout
from policies.batching.chunked import Chunked
from realengine.model.architecture import Architecture
from realengine.runner import parallel
from realengine.runner.parallel import Group, Mesh, Stage, backend_of, connect
from realengine.runner.rank import build_executor
from realengine.serving.model import Model
from realengine.settings import EngineSettings
from tests.realengine.recorded import RerunRecorder, record_on_cpu
from tests.realengine.small_models import CONFIGS, GREEDY, make, prompts, tokens_of

CPU = torch.device("cpu")
SAFE = {"all_reduce", "all_gather"}
"""Collectives that NCCL can put into a CUDA graph: they neither wait for the device nor read from it."""


class FakeNccl:
    """Records calls to torch.distributed; each returns what it would if all ranks had the same numbers."""

    ReduceOp = SimpleNamespace(MIN="min")

    def __init__(self):
        self.calls = []
        self.is_capturing = False

    def note(self, name, x, group):
        self.calls.append((name, None if x is None else tuple(x.shape), group, self.is_capturing))

    def all_reduce(self, x, op=None, group=None):
        self.note("all_reduce", x, group)

    def all_gather(self, out, x, group=None):
        self.note("all_gather", x, group)
        out.copy_(x.repeat(len(out) // len(x), *[1] * (x.dim() - 1)))

    def broadcast(self, x, src, group=None):
        self.note("broadcast", x, group)

    def all_gather_object(self, found, fact, group=None):
        self.note("all_gather_object", None, group)
        found[:] = [fact] * len(found)


def collectives_of(rank, monkeypatch, **settings):
    """Builds a rank's executor, which captures its steps; returns the calls to torch.distributed."""
    nccl = FakeNccl()
    monkeypatch.setattr(parallel, "dist", nccl)
    monkeypatch.setattr(parallel, "_all_gather", nccl.all_gather)
    record_on_cpu(monkeypatch)
    record = RerunRecorder.record

    def recorded(self, prepare, run):
        def capturing():
            nccl.is_capturing = True
            try:
                return run()
            finally:
                nccl.is_capturing = False

        return record(self, prepare, capturing)

    monkeypatch.setattr(RerunRecorder, "record", recorded)
    made = EngineSettings(
        device="cpu", num_kv_blocks=200, max_num_seqs=4, tensor_parallel_size=2, overlap=True, **settings
    )
    model = Model.of(Architecture.from_hf(CONFIGS["even"]))
    everyone, tensor = Group(rank, 2, None, "hosts"), Group(rank, 2, "tensors")
    build_executor(
        model,
        made,
        CPU,
        Mesh(everyone, tensor, Stage.whole(model.architecture.num_layers), tensor, Group(), Group()),
    )
    monkeypatch.undo()
    return nccl.calls


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_captured_steps_have_only_collectives_that_graphs_can_hold(mode, monkeypatch):
    calls = collectives_of(0, monkeypatch, cudagraph_mode=mode)
    captured = [call for call in calls if call[3]]
    assert captured
    assert {name for name, *_ in captured} <= SAFE
    assert {group for _, _, group, _ in captured} == {"tensors"}
    assert {group for _, _, group, _ in calls} == {"tensors", "hosts"}


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_every_rank_captures_the_same_collectives_in_the_same_order(mode, monkeypatch):
    first = collectives_of(0, monkeypatch, cudagraph_mode=mode)
    assert first == collectives_of(1, monkeypatch, cudagraph_mode=mode)


def test_a_captured_forward_has_two_sums_per_layer(monkeypatch):
    calls = collectives_of(0, monkeypatch, cudagraph_mode="FULL_DECODE_ONLY")
    num_layers = Architecture.from_hf(CONFIGS["even"]).num_layers
    of_one_row = [name for name, shape, _, captured in calls if captured and shape[0] == 1]
    # Each shape runs twice: before its capture and in it.
    assert of_one_row.count("all_reduce") == 2 * 2 * num_layers
    assert of_one_row.count("all_gather") == 2 * 2, "logits, greedy and sampled"


def test_the_backend_is_chosen_by_the_device_and_bound_to_it(monkeypatch):
    assert backend_of(torch.device("cuda", 1)) == "nccl"
    assert backend_of(CPU) == "gloo"
    begun, groups = [], []
    fake = SimpleNamespace(
        init_process_group=lambda backend, **given: begun.append((backend, given)),
        new_group=lambda ranks, **given: groups.append(given) or given["group_desc"],
    )
    monkeypatch.setattr(parallel, "dist", fake)
    connect(1, ParallelLayout(tensor_parallel_size=4), 2, torch.device("cuda", 1), "tcp://127.0.0.1:1")
    ((backend, given),) = begun
    assert backend == "nccl"
    assert given["device_id"] == torch.device("cuda", 1)
    assert given["timeout"] == parallel.CONNECT_TIMEOUT
    assert [(group["group_desc"], group["backend"]) for group in groups] == [
        ("tensor", "nccl"),
        ("hosts", "gloo"),
    ]
    assert groups[0]["timeout"] == parallel.COLLECTIVE_TIMEOUT


def test_a_rank_that_dies_ends_all_requests_with_one_clear_error():
    llm = make("even", tensor_parallel_size=2, batching=Chunked(max_num_batched_tokens=24))
    assert all(output.error is None for output in llm.generate(prompts()[:2], GREEDY))
    (process,) = llm.engine.runner.execute.func.__self__._processes
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    outputs = llm.generate(prompts()[:2], GREEDY)
    failed = "a rank of the engine has failed: rank 1 (tensor parallel rank 1) has ended with exit code -9"
    assert [output.error for output in outputs] == [failed] * 2
    assert llm.generate(prompts()[:1], GREEDY)[0].error is not None, "it stays lost"
    other = make("even", tensor_parallel_size=2)
    assert other.generate(prompts()[:1], GREEDY)[0].error is None, "a new engine can have its group"


def test_two_stages_of_two_ranks_give_the_tokens_of_one_and_name_the_rank_that_dies():
    stages = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    one, four = make("even"), make("even", **stages)
    assert tokens_of(four.generate(prompts(), GREEDY)) == tokens_of(one.generate(prompts(), GREEDY))
    os.kill(four.engine.runner.execute.func.__self__._processes[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    (output,) = four.generate(prompts()[:1], GREEDY)
    assert output.error == (
        "a rank of the engine has failed: rank 2 (pipeline stage 1, tensor parallel rank 0) has ended with "
        "exit code -9"
    )
    assert time.monotonic() - begin < 20
