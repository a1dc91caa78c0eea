"""Attention of prompts by our kernels and by libraries, side by side: right at real sizes, then timed.

A process of its own, because specialised warps have never run on a GPU: they come last, and if they hang, the
rows before them are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from experiments.calibrate.engine.timing import input_sets, timed
from experiments.gpu.comparison import Random, compared
from experiments.gpu.limits import Limits
from experiments.gpu.record import Record, UnavailableError
from experiments.gpu.speed_cases import PREFILL, interpreted, normal, shares
from kernels.attention import AttentionOptions, Contexts
from kernels.attention_models import MODELS, made_cache, prefill_work
from kernels.case import Case
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import Chunks, prefill_attention, prefill_attention_reference
from kernels.prefill_hopper import prefill_hopper
from realengine.attention.choice import IMPLEMENTATIONS
from realengine.attention.chunked import Call

Attend = Callable[[Call, torch.Tensor], object]
MODEL = "llama_8b"
SIZES = (  # sequences, queries of each, context of each, tokens of a block
    (1, 8192, 8192, 16),
    (1, 8192, 8192, 64),
    (1, 8192, 8192, 128),
    (4, 2048, 2048, 16),
    (8, 512, 4096, 16),
    (1, 2048, 32768, 16),
)
QUICK_SIZES = ((2, 20, 33, 16),)


def run(record: Record) -> None:
    """Checks and times every way to compute attention of prompts, the portable ones first."""
    random = Random(record.device, record.quick)
    known = Limits.of(record.folder)
    limits = {"copy": known.copy_bytes_per_s, "bf16": known.bf16_flops_per_s}
    for name, make in _ways(record.device):
        check = record.measure(f"{name}/correct", partial(_checked, make, random))
        if check is None or not check.get("ok"):
            continue
        for sizes in QUICK_SIZES if record.quick else SIZES:
            of = "{}x{}of{}-blocks{}".format(*sizes)
            record.measure(f"{name}/{of}", partial(_timed, make, sizes, limits, record.device))


def _ways(device: torch.device) -> Iterator[tuple[str, Callable[[], Attend]]]:
    """Yields (name, function that makes it) of every way, those that may hang last."""
    yield "triton", lambda: _own
    for name in ("torch_sdpa", "torch_varlen", "flashinfer"):
        yield name, partial(_implementation, name, device)
    yield "triton_hopper_plain", lambda: partial(_hopper, False)
    yield "triton_hopper", lambda: partial(_hopper, True)


def _own(call: Call, out_THD: torch.Tensor) -> None:
    prefill_attention(*call, out_THD=out_THD)


def _hopper(specialised: bool, call: Call, out_THD: torch.Tensor) -> None:
    try:
        prefill_hopper(*call, out_THD=out_THD, specialised=specialised)
    except ValueError as error:
        raise UnavailableError(str(error)) from None


def _implementation(name: str, device: torch.device) -> Attend:
    try:
        implementation = IMPLEMENTATIONS[name](device)
    except ValueError as error:
        raise UnavailableError(str(error)) from None

    def attend(call: Call, out_THD: torch.Tensor) -> None:
        reason = implementation.support.lacks(call) or implementation.lacks(call)
        if reason is not None:
            raise UnavailableError(f"{name} does not compute {reason}")
        implementation(call, out_THD)

    return attend


def _checked(make: Callable[[], Attend], random: Random) -> Mapping[str, Any]:
    """Compares chunks behind prefixes, a whole prompt and a few queries with the reference in float64."""
    attend, model = make(), MODELS[MODEL]
    query_lens = random.sizes((1000, 517, 37), (33, 20))
    prefixes = random.sizes((3000, 0, 777), (16, 0))
    lens = tuple(q + p for q, p in zip(query_lens, prefixes, strict=True))
    pairs, dtype = {}, random.dtype(torch.bfloat16)
    for block_size in (16, 64, 128):
        keys, tables, context_lens = random.paged(lens, model.num_kv_heads, model.head_dim, dtype, block_size)
        values = random.filled_like(keys)
        if block_size > 16:  # slots of no token must be finite: see kernels.prefill_hopper
            keys, values = keys.nan_to_num(), values.nan_to_num()
        q = random.normal(sum(query_lens), model.num_heads, model.head_dim)
        starts = random.tensor([0, *query_lens], torch.int32).cumsum(0).int()
        contexts, chunks = Contexts(tables, context_lens, max(lens), {}), Chunks(starts, max(query_lens))
        call = Call(q, PagedKv(keys, values), contexts, chunks, AttentionOptions())
        wide = PagedKv(keys.double(), values.double())
        out = torch.full_like(q, torch.nan)
        attend(call, out)
        reference = prefill_attention_reference(q.double(), wide, contexts, chunks)
        pairs[f"blocks of {block_size}"] = out, reference
    return compared(pairs, dtype)


def _timed(
    make: Callable[[], Attend],
    sizes: tuple[int, int, int, int],
    limits: dict[str, float | None],
    device: torch.device,
) -> dict[str, Any]:
    """Times the attention of one layer; what layers share, such as lengths on the host, is made once."""
    num_seqs, query_len, context_len, block_size = sizes
    model, attend = MODELS[MODEL], make()

    def inputs(device: torch.device) -> Callable[[], object]:
        lens, dtype = [context_len] * num_seqs, interpreted(device)
        kv, contexts = made_cache(lens, model, dtype, device, block_size)
        kv = PagedKv(*(torch.randn_like(cache) for cache in kv[:2]))
        q = normal((num_seqs * query_len, model.num_heads, model.head_dim), device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        call = Call(q, kv, contexts._replace(splits={}), Chunks(starts, query_len), AttentionOptions())
        out = torch.empty_like(q)
        return lambda: attend(call, out)

    work = prefill_work(model, num_seqs, query_len, context_len, torch.bfloat16)
    case = Case("", inputs, *work)
    found = timed(input_sets(inputs, device, case.bytes_moved), device)
    row = found.row() | shares(case, found.median_s, limits)
    said = f"{found.median_s * 1e6:.0f} us"
    if "bf16_share" in row:
        said += f", {row['bf16_share']:.2f} of bf16 GEMM, target {PREFILL.at_least:.2f}"
    return row | {"said": said}
