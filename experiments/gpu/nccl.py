"""NCCL in CUDA graphs: collectives of one rank on one GPU, and tokens of two ranks if there are two GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.calibrate.engine.timing import timed
from experiments.gpu.record import Record, UnavailableError
from realengine.model.architecture import Architecture
from realengine.runner.parallel import backend_of, disconnect
from realengine.runner.recorder import Recorder
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams

ROWS, HIDDEN = 64, 4096
MODEL = Architecture(
    model_type="llama",
    vocab_size=32000,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2816,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def run(record: Record) -> None:
    """Captures and replays collectives; compares the tokens of two ranks with those of one."""
    record.measure("one_rank/captured", partial(_captured, record.device))
    record.measure("two_ranks/tokens", partial(_two_ranks, record.device, record.quick))


def _captured(device: torch.device) -> Mapping[str, Any]:
    """Captures a sum and a gather of a group of one rank, replays them, and times a replay."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            backend_of(device),
            init_method=f"file://{Path(folder) / 'meeting'}",
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )
        try:
            return _replayed(device)
        finally:
            disconnect()


def _replayed(device: torch.device) -> Mapping[str, Any]:
    group = dist.new_group(backend=backend_of(device), group_desc="tensor")
    x, y = torch.zeros(ROWS, HIDDEN, device=device), torch.zeros(ROWS, HIDDEN, device=device)

    def step() -> torch.Tensor:
        summed = x * 2
        dist.all_reduce(summed, group=group)
        dist.all_gather([y], summed, group=group)
        return y + 1

    if device.type != "cuda":
        x.fill_(3.0)
        return {"ok": bool((step() == 7).all()), "why": "", "said": "gloo, without a graph"}
    recording = Recorder(device).record(lambda: None, step)
    right = True
    for value in (1.0, 5.0):
        x.fill_(value)
        recording.replay()
        right &= bool((recording.result == 2 * value + 1).all())
    found = timed([recording.replay], device)
    return found.row() | {
        "ok": right,
        "why": "" if right else "a replay gives other numbers",
        "said": f"{found.median_s * 1e6:.1f} us for a sum and a gather of {ROWS} x {HIDDEN} fp32, one rank",
    }


def _two_ranks(device: torch.device, quick: bool) -> Mapping[str, Any]:
    """Compares greedy tokens of two ranks, in graphs, with those of one; other sums may swap near ties."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise UnavailableError(f"two ranks need two GPUs, this machine has {torch.cuda.device_count()}")
    if quick:
        raise UnavailableError("a dry run starts no other processes: tests/realengine/runner do")
    settings: dict[str, Any] = {"device": device.type, "num_kv_blocks": 512, "max_num_seqs": 8, "seed": 1}
    prompts = [list(range(2 + i, 40 + 5 * i)) for i in range(8)]
    one = [o.outputs[0].token_ids for o in LLM(MODEL, **settings).generate(prompts, PARAMS)]
    two = [
        o.outputs[0].token_ids
        for o in LLM(MODEL, tensor_parallel_size=2, **settings).generate(prompts, PARAMS)
    ]
    same = sum(a == b for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))
    total = sum(map(len, one))
    right = same >= 0.9 * total
    return {
        "ok": right,
        "why": "" if right else "tokens differ",
        "said": f"{same} of {total} tokens are the same",
    }
