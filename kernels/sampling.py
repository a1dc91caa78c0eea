"""Samples tokens from logits: penalties, temperature, min-p, top-k, top-p and the draw, in two launches.

The steps, each on the tokens that the previous one kept (x: penalised logit / temperature, w = exp(x - max
x)):
- repetition penalty (Keskar et al. 2019): x / r or x * r, by the sign of x, for tokens seen; then x -=
  frequency * count, and x -= presence if count > 0 (counts of generated tokens only);
- min-p (Nguyen et al. 2024): w >= min_p. top-k: fewer than k tokens are larger. top-p (Holtzman et al. 2020):
  the larger tokens have less than top_p of the weight. Tokens equal to the last one kept are kept, too.
The draw uses one uniform number per row, from Philox (Salmon et al., SC 2011) with the seed as key and
(position, request, purpose) as counter: the token is the first, in order of index, at which the running
weight exceeds it. So a token depends on its own row and its (seed, request, position), never on the rest of
the batch. A draft token with probabilities is tested before the draw (`DraftRows`). Greedy rows take the
largest logit; of equals the lowest index.

The first launch has one program per chunk of a row (penalties, temperature, maxima), the second one per row.
For rows that keep only some tokens, the first one lists each chunk's largest tokens. Thresholds are found by
4-ary search over the ordered bits of the logits, without a sort, in at most 16 passes over these lists, which
the second launch holds in registers; only if more tokens are kept than the lists have (a flat distribution),
the passes read the whole row. So 64 rows of 128,256 bf16 logits with a top-p move 54 MB (logits read, scaled
and listed ones written, lists read) in two launches: 13 us at 4 TB/s, not measured; 20 passes over whole rows
would read 660 MB. Shapes: S sequences, V vocabulary, R rows of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import triton

from kernels.case import Case
from kernels.launch import INTERPRETER, launch, target
from kernels.philox import uniform_reference
from kernels.sampling_chunks import scale_kernel
from kernels.sampling_kernels import ACCEPT, RESIDUAL, draw_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_VOCAB = 1 << 20
IN_PROMPT = 1 << 30  # bit in the count of a token of the prompt; the lower bits count generated tokens


class Tiles(NamedTuple):
    """Logits per program: `chunk` in the first launch, `tile` at once in the second; listed ones of a row."""

    chunk: int
    tile: int
    listed: int
    chunk_warps: int
    row_warps: int


TILES = {
    "sm_80": Tiles(4096, 4096, 4096, 16, 16),
    "sm_90": Tiles(4096, 8192, 8192, 16, 16),
    "gfx942": Tiles(4096, 4096, 8192, 8, 16),
    INTERPRETER: Tiles(4096, 4096, 256, 8, 16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of each sequence: contiguous tensors [S] on the logits' device."""

    temperature: torch.Tensor
    """Temperature in fp32; 0: greedy."""
    top_k: torch.Tensor
    """Largest number of tokens kept, int32; 0: all."""
    top_p: torch.Tensor
    """Cumulative probability kept, fp32 in (0, 1]; 1: all."""
    min_p: torch.Tensor
    """Smallest probability kept, relative to the largest, fp32 in [0, 1]; 0: all."""
    seed: torch.Tensor
    """Seed of the random numbers, int64."""
    request: torch.Tensor
    """Number that tells sequences with the same seed apart, int64."""
    position: torch.Tensor
    """Position of the token to draw, int64 below 2^32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """Penalties of each sequence [S], and the counts of its tokens; neutral values are 1, 0, 0."""

    repetition: torch.Tensor
    """Repetition penalty for tokens of the prompt and the output, fp32 above 0."""
    presence: torch.Tensor
    """Amount subtracted for generated tokens, fp32."""
    frequency: torch.Tensor
    """Amount subtracted per occurrence of generated tokens, fp32."""
    counts: torch.Tensor
    """int32 [R, V]: number of times a token was generated, plus IN_PROMPT if it is in the prompt."""
    row: torch.Tensor
    """Row of counts of each sequence, int64 [S]."""


class DraftRows(NamedTuple):
    """Draft tokens of rows, which are accepted with probability min(1, p / q): p the row's, q the draft's.

    Otherwise the token is drawn from max(0, p - q), which never has the draft token (Leviathan et al., ICML
    2023, section 2.3). So the token of a row follows p.
    """

    tokens: torch.Tensor
    """Draft token of each row, int64 [S]; -1: none."""
    row: torch.Tensor
    """Row of probs of each draft token, int64 [S]; any valid one if there is none."""
    probs: torch.Tensor
    """The distributions that draft tokens were drawn from, contiguous fp32 [rows, V]."""


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    penalties: Penalties | None = None,
    *,
    drafts: DraftRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draws a token for each row of logits [S, V] (fp32, fp16, bf16; any row stride): int64 [S].

    NaN logits count as minus infinity; a row without a finite logit gives token 0. V up to 1,048,576. The
    logits are not changed; 4 V bytes of memory are used per row. Raises ValueError for other dtypes and
    shapes.
    """
    _check_settings(logits, sampling, penalties)
    return _run(logits, sampling, penalties, out, drafts)


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the index of each row's largest logit, of equals the lowest: `sample` at temperature 0."""
    return _run(logits, None, None, out)


def mark_prompt(counts: torch.Tensor, row: int, tokens: torch.Tensor) -> None:
    """Starts a sequence in a row of Penalties.counts: clears the row and marks the tokens of its prompt."""
    counts[row].zero_()
    counts[row, tokens.long()] = IN_PROMPT


def count_tokens(counts: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
    """Counts generated tokens [S], each in its own row [S] of Penalties.counts."""
    counts.index_put_((rows.long(), tokens.long()), counts.new_ones(()), accumulate=True)


def sample_reference(
    logits: torch.Tensor,
    sampling: Sampling,
    penalties: Penalties | None = None,
    *,
    drafts: DraftRows | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the reference of `sample` in torch; sums in fp64."""
    x = _without_nan(logits)
    if penalties is not None:
        x = _penalised(x, penalties)
    tokens = x.argmax(dim=-1)
    rows = torch.nonzero((sampling.temperature > 0) & (x.amax(dim=-1) > -torch.inf)).flatten()
    if len(rows):
        scaled = x[rows] / sampling.temperature[rows, None]
        kept = keep_reference(scaled, sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows])
        weights = _weights(scaled).double() * kept
        counter = (sampling.seed[rows], sampling.request[rows], sampling.position[rows])
        if drafts is None:
            tokens[rows] = _first_above(weights, uniform_reference(*counter))
        else:
            drafts = DraftRows(drafts.tokens[rows], drafts.row[rows], drafts.probs)
            tokens[rows] = _verified(weights, counter, drafts)
    return tokens if out is None else out.copy_(tokens)


def greedy_reference(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the reference of `greedy` in torch."""
    tokens = logits.argmax(dim=-1)
    if bool(logits.gather(1, tokens[:, None]).isnan().any()):  # argmax returns a NaN if there is one
        tokens = _without_nan(logits).argmax(dim=-1)
    return tokens if out is None else out.copy_(tokens)


def keep_reference(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Returns the mask of tokens that may be drawn, bool [S, V]; scaled: logits / temperature [S, V]."""
    largest = scaled.amax(dim=-1, keepdim=True)
    kept = (scaled >= largest + min_p[:, None].log()) | (min_p[:, None] <= 0)
    if bool((top_k > 0).any()):
        limit = torch.where((top_k > 0) & (top_k < scaled.shape[1]), top_k, scaled.shape[1]).long()
        descending = scaled.masked_fill(~kept, -torch.inf).topk(int(limit.max()), dim=-1).values
        kept &= scaled >= descending.gather(1, limit[:, None] - 1)
    if bool((top_p < 1).any()):
        values, order = scaled.masked_fill(~kept, -torch.inf).sort(dim=-1, descending=True)
        weights = _weights(values).double()
        above = weights.cumsum(dim=-1) - weights
        above[:, 1:] = torch.where(values[:, 1:] == values[:, :-1], 0.0, above[:, 1:])
        above = above.cummax(dim=-1).values  # for equal values: the weight above the first
        inside = (above < top_p[:, None].double() * weights.sum(dim=-1, keepdim=True)) | (top_p[:, None] >= 1)
        inside[:, 0] = True
        kept &= torch.zeros_like(kept).scatter(1, order, inside)
    return kept


def cases() -> Iterator[Case]:
    """Yields the vocabularies of SmolLM2, Llama 3.1 and Qwen3: greedy, temperature only, all settings."""
    for num_seqs, vocab in ((1, 49152), (1, 128256), (64, 128256), (64, 151936)):
        read = 4.0 * num_seqs * vocab
        yield Case(f"greedy-{num_seqs}x{vocab}", _greedy_case(num_seqs, vocab), read)
        for name, restricted in (("temperature", False), ("penalties_top_k_top_p", True)):
            moved = read * (5 if restricted else 4)
            yield Case(f"sample_{name}-{num_seqs}x{vocab}", _sample_case(num_seqs, vocab, restricted), moved)


def _run(
    logits: torch.Tensor,
    sampling: Sampling | None,
    penalties: Penalties | None,
    out: torch.Tensor | None,
    drafts: DraftRows | None = None,
) -> torch.Tensor:
    num_seqs, vocab = _checked_shape(logits)
    out = torch.empty(num_seqs, dtype=torch.int64, device=logits.device) if out is None else out
    if out.shape != (num_seqs,) or out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"out: {out.dtype} {list(out.shape)}; must be contiguous int64 [{num_seqs}]")
    tiles = TILES.get(target(), TILES["sm_90"])
    chunks = triton.cdiv(vocab, tiles.chunk)
    block_chunks = triton.next_power_of_2(chunks)
    slots = max(1, min(tiles.chunk, tiles.listed // block_chunks))
    shape, device, is_greedy = (num_seqs, chunks), logits.device, sampling is None
    maxima = torch.empty(shape, dtype=torch.float32, device=device)
    indices = torch.empty(shape, dtype=torch.int32, device=device)
    scaled, *lists = (None,) * 5
    if not is_greedy:
        scaled = torch.empty(num_seqs, vocab, dtype=torch.float32, device=device)
        lists = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)]
        lists += [
            torch.empty(*shape, slots, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32)
        ]
    settings = (None,) * 7 if sampling is None else _values(sampling)
    launch(
        scale_kernel,
        (num_seqs, chunks),
        logits,
        scaled,
        maxima,
        indices,
        *lists,
        *settings[:4],
        *((None,) * 5 if penalties is None else _values(penalties)),
        logits.stride(0),
        0 if penalties is None else penalties.counts.stride(0),
        vocab,
        PENALTIES=penalties is not None,
        GREEDY=is_greedy,
        CHUNK=tiles.chunk,
        SLOTS=slots,
        num_warps=tiles.chunk_warps,
    )
    launch(
        draw_kernel,
        (num_seqs,),
        scaled,
        maxima,
        indices,
        *lists,
        out,
        *settings,
        *((None,) * 3 if drafts is None else drafts),
        vocab,
        chunks,
        GREEDY=is_greedy,
        TILE=tiles.tile,
        CHUNK=tiles.chunk,
        SLOTS=slots,
        BLOCK_CHUNKS=block_chunks,
        num_warps=1 if is_greedy else tiles.row_warps,
    )
    return out


def _values(settings: Sampling | Penalties) -> tuple[torch.Tensor, ...]:
    return tuple(getattr(settings, field.name) for field in fields(settings))


def _checked_shape(logits: torch.Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or logits.dtype not in DTYPES or (logits.shape[0] and logits.stride(1) != 1):
        raise ValueError(
            f"logits: {logits.dtype} {list(logits.shape)}; must be [sequences, vocabulary], contiguous "
            "rows of fp32, fp16 or bf16"
        )
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"vocabulary of {logits.shape[1]}: must be 1 to {MAX_VOCAB}")
    return logits.shape[0], logits.shape[1]


def _check_settings(logits: torch.Tensor, sampling: Sampling, penalties: Penalties | None) -> None:
    num_seqs, vocab = _checked_shape(logits)
    dtypes = {"top_k": torch.int32, "counts": torch.int32}
    dtypes.update(dict.fromkeys(("seed", "request", "position", "row"), torch.int64))
    for settings in (sampling, penalties):
        for field in () if settings is None else fields(settings):
            x = getattr(settings, field.name)
            dtype = dtypes.get(field.name, torch.float32)
            right = x.shape[1:] == (vocab,) if field.name == "counts" else x.shape == (num_seqs,)
            if not right or x.dtype != dtype or not x.is_contiguous():
                shape = f"[rows, {vocab}]" if field.name == "counts" else f"[{num_seqs}]"
                raise ValueError(
                    f"{field.name}: {x.dtype} {list(x.shape)}; must be contiguous {dtype} {shape}"
                )


def _without_nan(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().masked_fill(logits.isnan(), -torch.inf)


def _penalised(x: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    seen = penalties.counts[penalties.row]
    count = seen & (IN_PROMPT - 1)
    repetition = penalties.repetition[:, None]
    x = torch.where(seen != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - (penalties.frequency[:, None] * count + penalties.presence[:, None] * (count > 0))


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Returns exp(x - largest) of each row; 1 where both are infinite."""
    largest = x.amax(dim=-1, keepdim=True)
    return torch.where(x == largest, 1.0, (x - largest).exp())


def _first_above(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first token of each row at which the running weight exceeds a share of the total."""
    passing = weights.cumsum(dim=-1)
    return torch.searchsorted(passing, uniform[:, None] * passing[:, -1:], right=True).flatten()


def _verified(weights: torch.Tensor, counter: tuple[torch.Tensor, ...], drafts: DraftRows) -> torch.Tensor:
    """Returns draft tokens that are accepted, and draws tokens in the other rows."""
    is_draft, draft = drafts.tokens >= 0, drafts.tokens.clamp(min=0)[:, None]
    probs = drafts.probs[drafts.row].double()
    total = weights.sum(dim=-1, keepdim=True)
    tested = uniform_reference(*counter, ACCEPT.value)[:, None] * probs.gather(1, draft) * total
    is_accepted = is_draft & (tested < weights.gather(1, draft))[:, 0]
    left = (weights - probs * total).clamp(min=0)
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, weights)
    instead = _first_above(left, uniform_reference(*counter, RESIDUAL.value))
    drawn = torch.where(is_draft, instead, _first_above(weights, uniform_reference(*counter)))
    return torch.where(is_accepted, drafts.tokens, drawn)


def _greedy_case(num_seqs: int, vocab: int) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        logits = torch.randn(num_seqs, vocab, device=device)
        return lambda: greedy(logits)

    return make


def _sample_case(
    num_seqs: int, vocab: int, restricted: bool
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        def each(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((num_seqs,), value, dtype=dtype, device=device)

        number = torch.arange(num_seqs, device=device)
        sampling = Sampling(
            temperature=each(0.8),
            top_k=each(50 if restricted else 0, torch.int32),
            top_p=each(0.95 if restricted else 1.0),
            min_p=each(0.0),
            seed=number,
            request=number,
            position=number,
        )
        penalties = None
        if restricted:
            counts = torch.zeros(num_seqs, vocab, dtype=torch.int32, device=device)
            penalties = Penalties(
                repetition=each(1.1), presence=each(0.1), frequency=each(0.1), counts=counts, row=number
            )
        logits = torch.randn(num_seqs, vocab, device=device) * 3
        return lambda: sample(logits, sampling, penalties)

    return make
