"""Measures the attention of passes with draft tokens, and the kernels that accept them.

A sequence of a pass has 1 + K rows, which read its KV once. So the least bytes of a pass are hardly more than
those of plain decodes, and each row states its time relative to the decode kernel's at the same sizes, and
what the simulator expects of the hardware's data sheet.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from experiments.calibrate.engine.timing import Call, input_sets, timed
from experiments.gpu.limits import Limits
from experiments.gpu.predictions import hardware_of, simulation
from experiments.gpu.record import Record, Row, UnavailableError
from experiments.gpu.speed_cases import decode_case, interpreted, normal, shares
from kernels.attention_models import MODELS, made_cache
from kernels.case import Case
from kernels.prefill_attention import Chunks, prefill_attention

SIZES = tuple((batch, context) for context in (1024, 8192, 32768) for batch in (1, 8, 32, 64))
NUM_DRAFTS = (4, 8, 1, 2, 3, 5, 6, 7)  # the most telling ones first
MODULES = ("rejection", "token_moves")


def run(record: Record) -> None:
    """Times decodes, passes with 1 to 8 draft tokens at the same sizes, and the cases of acceptance."""
    known = Limits.of(record.folder)
    limits = {"copy": known.copy_bytes_per_s, "bf16": known.bf16_flops_per_s}
    sizes = ((2, 40),) if record.quick else SIZES
    decodes: dict[tuple[int, int], Row | None] = {}
    for size in sizes:
        case = decode_case(*size)
        timed_one = partial(_timed, case, limits, record.device, None, (*size, 0))
        decodes[size] = record.measure(case.name, timed_one)
    for case in acceptance_cases(quick=record.quick):
        record.measure(case.name, partial(_timed, case, limits, record.device, None))
    for num_drafts in (2,) if record.quick else NUM_DRAFTS:
        for size in sizes:
            case = verify_case(*size, num_drafts)
            timed_one = partial(_timed, case, limits, record.device, decodes[size], (*size, num_drafts))
            record.measure(case.name, timed_one)


def acceptance_cases(*, quick: bool) -> Iterator[Case]:
    """Yields the cases of the kernels that accept drafts and move their KV; in a dry run a small one."""
    for module in MODULES:
        for case in importlib.import_module(f"kernels.{module}").cases():
            if not quick or case.name == "match_drafts_chain-1x5":
                yield case._replace(name=f"{module}/{case.name}")


def verify_case(num_seqs: int, context_len: int, num_drafts: int) -> Case:
    """Returns the attention of Llama-3.1-8B, bf16, over sequences of 1 + num_drafts rows each."""
    model, num_rows = MODELS["llama_8b"], 1 + num_drafts

    def make(device: torch.device) -> Call:
        kv, contexts = made_cache([context_len] * num_seqs, model, interpreted(device), device)
        q = normal((num_seqs * num_rows, model.num_heads, model.head_dim), device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * num_rows
        return lambda: prefill_attention(q, kv, contexts, Chunks(starts, num_rows))

    kv_elements = 2 * num_seqs * context_len * model.num_kv_heads * model.head_dim
    pairs = num_seqs * sum(context_len - place for place in range(num_rows))
    return Case(
        f"verify_attention/llama_8b-batch{num_seqs}-context{context_len}-k{num_drafts}",
        make,
        2.0 * kv_elements + 4.0 * num_seqs * num_rows * model.num_heads * model.head_dim,
        4.0 * pairs * model.num_heads * model.head_dim,
    )


def _timed(
    case: Case,
    limits: dict[str, float | None],
    device: torch.device,
    decode: Row | None,
    size: tuple[int, int, int] | None = None,
) -> dict[str, Any]:
    """Times a case. size: sequences, context and draft tokens of an attention, which is simulated, too."""
    found = timed(input_sets(case.make, device, case.bytes_moved), device)
    row = found.row() | shares(case, found.median_s, limits)
    said = f"{found.median_s * 1e6:.1f} us"
    if "copy_share" in row:
        said += f", {row['copy_share']:.2f} of copied bytes"
    if decode is not None:
        row["times_decode"] = found.median_s / decode["median_s"]
        said += f", {row['times_decode']:.2f} times a decode"
    simulated_s = None if size is None else _simulated_s(device, *size)
    if simulated_s is not None:
        off = simulated_s / found.median_s - 1
        row |= {"simulated_s": simulated_s, "relative_error": off}
        said += f", simulated {off:+.0%}"
    return row | {"said": said}


def _simulated_s(device: torch.device, num_seqs: int, context_len: int, num_drafts: int) -> float | None:
    """Returns the simulator's seconds; None: it is not installed here, or does not know the hardware."""
    try:
        return float(simulation().attention_s(hardware_of(device), num_seqs, context_len, num_drafts))
    except UnavailableError:
        return None
