"""Attention, RoPE and the copies of KV blocks at real models' sizes, against references in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch

from experiments.gpu.measurement import UnavailableError
from kernels.attention import AttentionOptions, Contexts
from kernels.attention_models import MODELS, name_of
from kernels.attention_reference import gather_slots
from kernels.block_copy import CacheSet, copy_blocks, gather_blocks, scatter_blocks
from kernels.decode_attention import decode_attention, decode_attention_reference
from kernels.int4_kv import quantise_int4_heads
from kernels.launch import target
from kernels.mla_decode import mla_decode, mla_decode_reference
from kernels.paged_kv import INT4, QUANTISED, PagedKv
from kernels.prefill_attention import Chunks, prefill_attention, prefill_attention_reference
from kernels.prefill_hopper import prefill_hopper
from kernels.rope import Rotation, rope_and_write_kv, rope_and_write_kv_reference
from kernels.rope_angles import cos_sin_table

from .comparison import Check, Random

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
KINDS = (
    ("llama_8b", BF16, BF16),
    ("llama_8b", FP16, FP16),
    ("llama_8b", BF16, INT8),
    ("llama_8b", BF16, FP8),
    ("llama_8b", BF16, INT4),
    ("gpt_oss_20b", BF16, BF16),
    ("gemma2_9b", BF16, BF16),
    ("mpt_7b", BF16, BF16),
    ("falcon_7b", BF16, BF16),
)
BEYOND_BLOCKS = 140_000  # blocks of 16 tokens with 8 heads of 128: 2.3e9 elements, more than 2^31


def attention_checks(random: Random) -> Iterator[Check]:
    """Yields the checks of attention, RoPE and block copies, the most used kernels first."""
    kinds = KINDS[1:3] if random.quick else KINDS
    for model, dtype, kv_dtype in kinds:
        name = f"{model}-{name_of(dtype)}-kv-{name_of(kv_dtype)}"
        yield f"decode_attention/{name}", partial(_decode, random, model, dtype, kv_dtype)
        yield f"prefill_attention/{name}", partial(_prefill, random, model, dtype, kv_dtype)
    for model, kv_dtype in (("llama_8b", BF16), ("gpt_oss_20b", BF16), ("llama_8b", INT8)):
        if not random.quick:
            name = f"{model}-bfloat16-kv-{name_of(kv_dtype)}"
            yield f"prefill_hopper/{name}", partial(_hopper, random, model, kv_dtype)
    for num_heads in (16,) if random.quick else (16, 128):
        yield f"mla_decode/heads{num_heads}", partial(_mla, random, num_heads)
    for kv_dtype in (BF16, INT8, FP8, INT4):
        yield f"rope/{name_of(kv_dtype)}", partial(_rope, random, kv_dtype)
    yield "block_copy/exact", partial(_blocks, random)
    yield "decode_attention/beyond-2^31-elements", partial(_beyond, random)


def _caches(
    random: Random, lens: tuple[int, ...], model: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[PagedKv, Contexts]:
    """Returns a paged KV cache of random numbers, quantised if kv_dtype is, and its sequences' contexts."""
    sizes, kv_dtype = MODELS[model], random.dtype(kv_dtype)
    keys, tables, context_lens = random.paged(lens, sizes.num_kv_heads, sizes.head_dim, dtype)
    values, contexts = random.filled_like(keys), Contexts(tables, context_lens, max(lens))
    if kv_dtype not in QUANTISED:
        return PagedKv(keys, values), contexts
    stored, scales = [], []
    for stored_in in (keys, values):
        wide = stored_in.float()
        unused = wide.isnan().all(-1, keepdim=True)
        if kv_dtype == INT4:
            codes, scale = quantise_int4_heads(wide.nan_to_num())
            stored.append(codes)
            scales.append(torch.where(unused, torch.nan, scale))
            continue
        scale = wide.nan_to_num().abs().amax(-1).clamp(min=1e-6) / QUANTISED[kv_dtype]
        codes = (wide.nan_to_num() / scale[..., None]).clamp(-448, 448)
        stored.append((codes.round() if kv_dtype == INT8 else codes).to(kv_dtype))
        scales.append(torch.where(unused[..., 0], torch.nan, scale).contiguous())
    return PagedKv(*stored, *scales), contexts


def _wide(kv: PagedKv) -> PagedKv:
    """Returns the cache in float64; a quantised cache is returned unchanged."""
    return kv if kv.key_scales is not None else PagedKv(kv.keys.double(), kv.values.double())


def _decode(random: Random, model: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> Mapping[str, Any]:
    sizes = MODELS[model]
    lens = random.sizes((1, 17, 1023, 4096, 4097, 9000), (1, 17, 40))
    kv, contexts = _caches(random, lens, model, dtype, kv_dtype)
    q = random.normal(len(lens), sizes.num_heads, sizes.head_dim, dtype=dtype)
    options = _options(random, model)
    reference = cache(lambda: decode_attention_reference(q.double(), _wide(kv), contexts, options))
    pairs = {}
    for num_ranges in (None, 1, 5):
        out = torch.full_like(q, torch.nan)
        decode_attention(q, kv, contexts, options, num_ranges=num_ranges, out_BHD=out)
        pairs[f"ranges {num_ranges}"] = out, reference
    return random.compared(pairs, dtype)


def _prefill(random: Random, model: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> Mapping[str, Any]:
    sizes = MODELS[model]
    query_lens = random.sizes((1, 37, 512, 1000), (1, 11))
    prefixes = random.sizes((4095, 0, 777, 3000), (16, 0))
    lens = tuple(q + p for q, p in zip(query_lens, prefixes, strict=True))
    kv, contexts = _caches(random, lens, model, dtype, kv_dtype)
    q = random.normal(sum(query_lens), sizes.num_heads, sizes.head_dim, dtype=dtype)
    starts = random.tensor([0, *query_lens], torch.int32).cumsum(0).int()
    chunks, options = Chunks(starts, max(query_lens)), _options(random, model)
    reference = cache(lambda: prefill_attention_reference(q.double(), _wide(kv), contexts, chunks, options))
    pairs = {}
    for num_ranges in (None, 1, 3):
        out = torch.full_like(q, torch.nan)
        prefill_attention(q, kv, contexts, chunks, options, num_ranges=num_ranges, out_THD=out)
        pairs[f"ranges {num_ranges}"] = out, reference
    return random.compared(pairs, dtype)


def _hopper(random: Random, model: str, kv_dtype: torch.dtype) -> Mapping[str, Any]:
    if target() != "sm_90":
        raise UnavailableError("needs a GPU with compute capability 9.0")
    sizes = MODELS[model]
    query_lens, prefixes = (1, 37, 512, 3000), (4095, 0, 777, 1000)
    lens = tuple(q + p for q, p in zip(query_lens, prefixes, strict=True))
    kv, contexts = _caches(random, lens, model, BF16, kv_dtype)
    q = random.normal(sum(query_lens), sizes.num_heads, sizes.head_dim)
    starts = random.tensor([0, *query_lens], torch.int32).cumsum(0).int()
    chunks, options = Chunks(starts, max(query_lens)), _options(random, model)
    reference = cache(lambda: prefill_attention_reference(q.double(), _wide(kv), contexts, chunks, options))
    pairs = {}
    for specialised in (True, False):
        out = torch.full_like(q, torch.nan)
        prefill_hopper(q, kv, contexts, chunks, options, specialised=specialised, out_THD=out)
        pairs["specialised" if specialised else "plain"] = out, reference
    return random.compared(pairs, BF16)


def _options(random: Random, model: str) -> AttentionOptions:
    """Returns the attention options of a model's layers, with random sinks and ALiBi slopes."""
    sizes = MODELS[model]
    return AttentionOptions(
        window=sizes.window,
        softcap=sizes.softcap,
        sinks_H=random.normal(sizes.num_heads, dtype=torch.float32) if sizes.sinks else None,
        alibi_slopes_H=random.uniform(sizes.num_heads) * 0.1 if sizes.alibi else None,
    )


def _mla(random: Random, num_heads: int) -> Mapping[str, Any]:
    lens = random.sizes((1, 63, 1024, 4097), (1, 33))
    kv, tables, context_lens = random.paged(lens, 1, 576, BF16, block_size=64)
    q = random.normal(len(lens), num_heads, 576)
    contexts, scale = Contexts(tables, context_lens, max(lens)), 192**-0.5
    reference = cache(lambda: mla_decode_reference(q.double(), kv[:, :, 0].double(), contexts, scale=scale))
    pairs = {}
    for num_ranges in (None, 1, 3):
        out = torch.full((len(lens), num_heads, 512), torch.nan, dtype=q.dtype, device=random.device)
        latents = kv[:, :, 0].contiguous()
        mla_decode(q, latents, contexts, scale=scale, num_ranges=num_ranges, out_BHV=out)
        pairs[f"ranges {num_ranges}"] = out, reference
    return random.compared(pairs, BF16)


def _rope(random: Random, kv_dtype: torch.dtype) -> Mapping[str, Any]:
    """Checks queries and dequantised cache contents against the reference in float32."""
    num_tokens, num_heads = random.sizes((333, 32), (5, 4))
    merged = random.normal(num_tokens, num_heads + 16, 128)
    positions = random.ints(0, 8192, num_tokens, dtype=torch.int64)
    table = cos_sin_table(128, 8192, base=5e5, device=random.device)
    slots = torch.randperm(4 * num_tokens, device=random.device)[:num_tokens] + 16
    shape = (4 * num_tokens // 16 + 2, 16, 8, 128)
    stored = random.dtype(kv_dtype)
    found = {}
    for kind, function in (("out", rope_and_write_kv), ("reference", rope_and_write_kv_reference)):
        quantised = stored in QUANTISED
        dtype = stored if kind == "out" or quantised else torch.float32
        x = merged.clone() if kind == "out" else merged.float()
        q, k, v = x.split([num_heads, 8, 8], dim=1)
        kv = PagedKv.zeros(shape, dtype, random.device)
        function(q, k, v, Rotation(positions, table), kv, slots)
        every = torch.arange(shape[0] * shape[1], device=random.device)
        keys = gather_slots(kv.keys, kv.key_scales, every, torch.float32)
        values = gather_slots(kv.values, kv.value_scales, every, torch.float32)
        found[kind] = {"queries": q, "keys": keys, "values": values}
    pairs = {name: (found["out"][name], found["reference"][name]) for name in found["out"]}
    return random.compared(pairs, kv_dtype)


def _blocks(random: Random) -> Mapping[str, Any]:
    """Checks that block copies and a gather followed by a scatter are exact."""
    num_blocks, layers, count = random.sizes((300, 32, 100), (9, 2, 3))
    tensors = [random.normal(num_blocks, 16, 8, 128) for _ in range(2 * layers)]
    before = [x.clone() for x in tensors]
    caches = CacheSet.of(tensors)
    order = torch.randperm(num_blocks, device=random.device)[: 2 * count].int()
    copy_blocks(caches, torch.stack([order[:count], order[count:]], dim=1).contiguous())
    staging = caches.staging(count)
    gather_blocks(caches, order[count:].contiguous(), staging)
    back = order[:count].flip(0).contiguous()
    scatter_blocks(staging, back, caches)
    right = True
    for x, old in zip(tensors, before, strict=True):
        old[order[count:].long()] = old[order[:count].long()]
        old[back.long()] = old[order[count:].long()]
        right &= bool(torch.equal(x, old))
    return {"ok": right, "why": "" if right else "blocks differ"}


def _beyond(random: Random) -> Mapping[str, Any]:
    """Checks attention and RoPE on blocks whose elements have indices beyond 2^31."""
    if random.device.type == "cpu" or random.compiling or torch.cuda.mem_get_info()[0] < 24 << 30:
        raise UnavailableError("needs a GPU with 24 GiB free")
    shape = BEYOND_BLOCKS, 16, 8, 128
    keys, values = (torch.full(shape, torch.nan, dtype=BF16, device=random.device) for _ in range(2))
    lens = 100
    tables = (BEYOND_BLOCKS - 8 + torch.randperm(8, device=random.device)).int()[None]
    at = torch.arange(lens, device=random.device)
    slots = tables[0].long()[at // 16] * 16 + at % 16
    merged = random.normal(lens, 48, 128)
    table = cos_sin_table(128, 128, device=random.device)
    q, k, v = merged.split([32, 8, 8], dim=1)
    rope_and_write_kv(q, k, v, Rotation(at, table), PagedKv(keys, values), slots)
    context_lens = random.tensor([lens], torch.int32)
    out = decode_attention(q[-1:], PagedKv(keys, values), Contexts(tables, context_lens, lens))
    near = slice(BEYOND_BLOCKS - 8, BEYOND_BLOCKS)
    kv = PagedKv(keys[near].double(), values[near].double())
    contexts = Contexts(tables - (BEYOND_BLOCKS - 8), context_lens, lens)
    reference = decode_attention_reference(q[-1:].double(), kv, contexts)
    written = values[near].flatten(0, 1)[slots - (BEYOND_BLOCKS - 8) * 16]
    return random.compared({"attention": (out, reference), "values": (written, v)}, BF16)
