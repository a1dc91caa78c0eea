"""Profile: measured latencies of the operators of one model on one device, as one checked tidy table.

A table maps column names to arrays (of a parquet or CSV file, for example), one row per measurement:

    operator            qkv_proj, attention, lm_head, ...: any names, equal for the rows of one operator
    component           gemm, elementwise, attention, communication or lm_head (`iterations.COMPONENTS`)
    calls               calls per iteration: num_layers, 2 * num_layers (norms), 1 (embedding)
    latency_us          latency of one call in microseconds
    num_tokens          gemm, elementwise, communication: tokens in the batch
    num_seqs            lm_head: rows that are sampled
    prefill_tokens      attention: new tokens of one prompt chunk, 0 for decodes alone
    cached_tokens       attention: cached tokens before them
    decode_seqs         attention: sequences that decode one token each, 0 for a chunk alone
    decode_kv_tokens    attention: KV tokens that each of these sequences attends to
    chunks_apart        attention: 1 if the engine computes prompt chunks one by one, each against all keys up
                        to its last; 0 (or no such column) if all in one kernel: see `AttentionTable`
    prefill_seqs attention with chunks_apart: chunks of these sizes in one step (default 1); rows with several
    chunks show how much less time each takes than one alone, which also needs a row

Columns that no component in the table needs may be absent. Attention is measured on a grid (holes are
interpolated): decodes alone, a chunk alone and, for engines that batch both, both.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from hwmodels.exact import larger, smaller
from hwmodels.iterations import IterationShape

Floats = NDArray[np.float64]


class Grid:
    """A function of one or more sizes, defined at every combination of the points of its axes.

    axes: increasing, at least two points each; values: shape [len(axis), ...] for each axis.

    Between points it is linear in each size. Below the first point of an axis it is constant, because a
    kernel with fewer rows takes as long as its smallest tile. Beyond the last point it is proportional to the
    size. Attention measurements have the most axes: decodes alone, one prompt chunk alone, and both in one
    batch.
    """

    def __init__(self, axes: Sequence[Floats], values: Floats) -> None:
        assert values.shape == tuple(len(axis) for axis in axes)
        assert all(len(axis) > 1 and np.all(np.diff(axis) > 0) for axis in axes)
        self._axes = [np.asarray(axis, dtype=np.float64) for axis in axes]
        self._lists: list[list[float]] = [axis.tolist() for axis in self._axes]
        self._values = np.ascontiguousarray(values, dtype=np.float64).ravel()
        self._list: list[float] = self._values.tolist()
        self._strides = [int(np.prod(values.shape[i + 1 :])) for i in range(values.ndim)]
        # Corners of a cell, the last axis fastest: the order in which `_blend` folds them.
        self._corners = [
            sum(stride for stride, upper in zip(self._strides, uppers, strict=True) if upper)
            for uppers in itertools.product((False, True), repeat=values.ndim)
        ]

    def at(self, *sizes: Any) -> Any:
        """Returns the value at one size per axis; arrays of sizes broadcast against each other."""
        first: Any = 0
        scale: Any = 1.0
        weights = []
        for size, points, axis, stride in zip(sizes, self._axes, self._lists, self._strides, strict=True):
            last, own = len(axis) - 2, points if isinstance(size, ndarray) else axis
            if isinstance(size, ndarray):
                index: Any = np.clip(np.searchsorted(points, size, side="right") - 1, 0, last)
            else:
                index = min(max(bisect_right(axis, size) - 1, 0), last)
            weight = (size - own[index]) / (own[index + 1] - own[index])
            weights.append(smaller(larger(weight, 0.0), 1.0))
            scale = scale * larger(size / axis[-1], 1.0)
            first = first + stride * index
        values: Any = self._values if isinstance(first, ndarray) else self._list
        return _blend([values[first + corner] for corner in self._corners], weights) * scale


def _blend(corners: list[Any], weights: list[Any]) -> Any:
    """Folds the corners of a cell pair by pair, the last axis first."""
    for weight in reversed(weights):
        corners = [low + weight * (high - low) for low, high in zip(corners[::2], corners[1::2], strict=True)]
    return corners[0]


def fill_holes(axes: Sequence[Floats], values: Floats) -> Floats:
    """Fills NaN from measured neighbours on both sides, along the first axis that has them.

    The passes repeat until nothing changes: two full grids laid over each other (powers of 2, powers of 1.5)
    leave holes that need two passes. Points without neighbours stay NaN.
    """
    before = -1
    while (holes := int(np.isnan(values).sum())) not in (0, before):
        before = holes
        for dimension, axis in enumerate(axes):
            values = np.apply_along_axis(partial(_fill_line, axis), dimension, values)
    return values


def _fill_line(axis: Floats, line: Floats) -> Floats:
    """Interpolates the unknown points of a line that lie between known ones."""
    known = ~np.isnan(line)
    if known.all() or not known.any():
        return line
    return np.interp(axis, axis[known], line[known], left=np.nan, right=np.nan)


class AttentionTable:
    """Interpolates the attention of one layer, or of all layers that the given times cover.

    The table has sequences of equal length and one chunk; an iteration has sums over sequences and chunks.
    Decodes count as that many sequences of the mean length. Chunks (T tokens in s chunks with Q query-key
    pairs) count as the cheaper of two interpretations, which are both upper bounds and equal for s = 1:

        one chunk of T tokens            after   max(Q / T - (T + 1) / 2, 0)      cached ones
        s chunks of T / s, one by one,   after   max(Q / T - (T / s + 1) / 2, 0)  each

    The first is accurate if cached tokens dominate, the second if long prompts are computed from scratch.

    For an engine that computes chunks separately and masks surplus products neither applies: the times of its
    chunks add up, and n new tokens after c cached ones count n (n + c) products. For all chunks in total A =
    Q + (N - T) / 2, where N (the sum of n n) follows from Q if C cached tokens are spread evenly before them:

        s chunks of T / s, one by one,   after   A / T - T / s  each              N = 2 (Q - T C / s) - T

    Work that such an engine does once per call, or only slowly for the first chunk, is saved by the other
    chunks.
    """

    def __init__(
        self,
        *,
        decode: Grid,
        prefill: Grid,
        mixed: Grid | None,
        chunks_apart: bool = False,
        saved_s: float = 0.0,
    ) -> None:
        """Builds it from grids of seconds by these sizes.

        decode(num_seqs, kv_tokens), prefill(tokens, cached), mixed(tokens, cached, num_seqs, kv_tokens).
        chunks_apart: the engine computes chunks separately; it has no `mixed`. Without `mixed`, a mixed batch
        takes the sum of both. Engines that run both in one kernel need `mixed`: they take 1.2 to 1.4 times
        the sum (medians), 4 times for 128 long decodes (vLLM 0.19, FlashAttention).
        saved_s: seconds saved by each chunk after the first, with chunks_apart.
        """
        self._decode = decode
        self._prefill = prefill
        self._mixed = mixed
        self._saved_s = saved_s
        self._chunks = self._apart if chunks_apart else self._cheaper

    def seconds(self, shape: IterationShape) -> Any:
        """Returns the attention seconds of an iteration, or of each of many.

        If the numbers of sequences or of tokens are arrays, all fields are float arrays of one length.
        """
        fields: tuple[Any, ...] = shape.counts[:6]
        decodes, chunks = fields[0] > 0, fields[3] > 0
        prices = {(1, 0): self._of_decodes, (0, 1): self._of_chunks, (1, 1): self._of_both}
        if not isinstance(decodes, np.ndarray):
            return prices[decodes, chunks](*fields)
        seconds = np.zeros(len(decodes))
        for (has_decodes, has_chunks), price in prices.items():
            rows = (decodes == has_decodes) & (chunks == has_chunks)
            if rows.any():
                seconds[rows] = price(*(field[rows] for field in fields))
        return seconds

    def _of_decodes(self, num_seqs: Any, context: Any, *_: Any) -> Any:
        return self._decode.at(num_seqs, context / num_seqs)

    def _of_chunks(self, _: Any, __: Any, *chunks: Any) -> Any:
        return self._chunks(*chunks)[2]

    def _of_both(self, num_seqs: Any, context: Any, chunks: Any, tokens: Any, *others: Any) -> Any:
        cached, together, best = self._chunks(chunks, tokens, *others)
        if self._mixed is None:
            return best + self._decode.at(num_seqs, context / num_seqs)
        both = self._mixed.at(tokens, cached, num_seqs, context / num_seqs)
        return larger(both - (together - best), best)

    def _cheaper(self, chunks: Any, tokens: Any, pairs: Any, _: Any) -> tuple[Any, Any, Any]:
        """Returns cached tokens before one chunk, its seconds, and the cheaper interpretation's seconds."""
        cached = larger(pairs / tokens - 0.5 * (tokens + 1), 0.0)
        cached_each = larger(pairs / tokens - 0.5 * (tokens / chunks + 1), 0.0)
        together = self._prefill.at(tokens, cached)
        if not isinstance(chunks, np.ndarray) and chunks == 1:
            return cached, together, together
        return cached, together, smaller(together, chunks * self._prefill.at(tokens / chunks, cached_each))

    def _apart(self, chunks: Any, tokens: Any, pairs: Any, ends: Any) -> tuple[Any, Any, Any]:
        """Computes `_cheaper` for chunks computed separately: the one chunk's seconds are the sum of all."""
        each = tokens / chunks
        squares = 2.0 * (pairs - each * (ends - tokens)) - tokens
        squares = smaller(larger(squares, tokens * each), 1.0 * tokens * tokens)
        cached = larger((pairs + 0.5 * (squares - tokens)) / tokens - each, 0.0)
        first_s = self._prefill.at(each, cached)
        others_s = larger(first_s - self._saved_s, 0.0)
        seconds = first_s + (chunks - 1) * others_s
        return cached, seconds, seconds


AROUND = ("inputs", "outputs")
"""Operators of an engine's table before the first layer and after sampling, which run once per launch. A
draft in the launch of the target's pass does not repeat them.
"""

Rows = Mapping[str, Any]
"""Columns of a table, all of one length."""

ATTENTION_SIZES = ("prefill_tokens", "cached_tokens", "decode_seqs", "decode_kv_tokens")
SIZES = {
    "gemm": ("num_tokens",),
    "elementwise": ("num_tokens",),
    "communication": ("num_tokens",),
    "lm_head": ("num_seqs",),
    "attention": ATTENTION_SIZES,
}
"""Columns that hold the amount of work, by component."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTimes:
    """Measured times of one operator by number of tokens or of sampled rows."""

    name: str
    component: str
    calls: int
    counts: Floats
    """Number of tokens or rows of each measurement, increasing."""
    call_s: Floats

    def iteration_seconds(self, counts: Floats) -> Floats:
        """Returns seconds of all calls in an iteration: linear between points, then proportional."""
        beyond = np.maximum(counts / self.counts[-1], 1.0)
        seconds: Floats = self.calls * np.interp(counts, self.counts, self.call_s) * beyond
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A checked table of operator times in seconds."""

    operators: tuple[OperatorTimes, ...]
    attention: AttentionTable | None
    attention_calls: int

    @property
    def components(self) -> set[str]:
        """Components for which the table has times."""
        measured = {operator.component for operator in self.operators}
        return measured if self.attention is None else measured | {"attention"}

    @property
    def num_kernels(self) -> int:
        """Kernel calls in one iteration."""
        return sum(operator.calls for operator in self.operators) + self.attention_calls

    def grid(self, components: Sequence[str], names: Sequence[str] | None = None) -> Grid | None:
        """Returns seconds per iteration of these components by size; None if there are none.

        names: their operators to count; None: all.
        """
        operators = [
            operator
            for operator in self.operators
            if operator.component in components and (names is None or operator.name in names)
        ]
        if not operators:
            return None
        counts = np.unique(np.concatenate([operator.counts for operator in operators]))
        return Grid([counts], np.sum([operator.iteration_seconds(counts) for operator in operators], axis=0))

    @classmethod
    def from_rows(cls, rows: Rows) -> Profile:
        """Builds a profile. Raises ValueError naming missing columns, or the row and its error."""
        columns = _columns(rows)
        operators = []
        attention, attention_calls = None, 0
        for name in dict.fromkeys(columns["operator"].tolist()):
            own = np.flatnonzero(columns["operator"] == name)
            component, calls = _constant(columns, own, "component"), int(_constant(columns, own, "calls"))
            if component == "attention":
                if attention is not None:
                    raise ValueError(
                        f"profile, row {own[0]}: operator={name}: a second operator of component attention; "
                        "a table holds one kind of layer"
                    )
                attention, attention_calls = _attention(columns, own, calls), calls
            else:
                operators.append(_operator(columns, own, str(name), str(component), calls))
        return cls(operators=tuple(operators), attention=attention, attention_calls=attention_calls)


def _columns(rows: Rows) -> dict[str, NDArray[Any]]:
    needed = ["operator", "component", "calls", "latency_us"]
    check_columns("profile", rows, needed)
    columns = {name: np.asarray(rows[name]) for name in needed}
    if not len(columns["operator"]):
        raise ValueError("profile: holds no row")
    components = columns["component"].tolist()
    for row, component in enumerate(components):
        if component not in SIZES:
            raise ValueError(f"profile, row {row}: component={component}: must be one of {', '.join(SIZES)}")
    sizes = sorted({size for component in set(components) for size in SIZES[component]})
    check_columns("profile", rows, sizes)
    for name in ("calls", "latency_us", *sizes):
        columns[name] = np.asarray(rows[name], dtype=np.float64)
    _check_values(columns, sizes)
    count = len(columns["operator"])
    columns["chunks_apart"] = np.asarray(rows.get("chunks_apart", np.zeros(count)))
    columns["prefill_seqs"] = np.asarray(rows.get("prefill_seqs", np.ones(count)), dtype=np.float64)
    return columns


def check_columns(table: str, rows: Rows, needed: Sequence[str]) -> None:
    """Raises ValueError if columns are missing (naming the existing ones), or if their lengths differ."""
    missing = [name for name in needed if name not in rows]
    if missing:
        raise ValueError(f"{table}: has no column {', '.join(missing)}; it has {', '.join(rows)}")
    lengths = {name: len(rows[name]) for name in needed}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{table}: columns differ in length: {lengths}")


def _check_values(columns: Mapping[str, NDArray[Any]], sizes: Sequence[str]) -> None:
    latency, calls = columns["latency_us"], columns["calls"]
    _refuse(columns, ~(np.isfinite(latency) & (latency > 0)), "latency_us", "must be finite and > 0 us")
    _refuse(columns, ~((calls >= 1) & (calls == np.floor(calls))), "calls", "must be a whole number >= 1")
    for name in sizes:
        used = np.array([name in SIZES[component] for component in columns["component"].tolist()])
        lowest = 0 if name in ATTENTION_SIZES else 1
        size = columns[name]
        wrong = used & ~(np.isfinite(size) & (size >= lowest))
        _refuse(columns, wrong, name, f"must be a number >= {lowest}")


def _refuse(columns: Mapping[str, NDArray[Any]], wrong: NDArray[np.bool_], name: str, rule: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"profile, row {row} ({columns['operator'][row]}): {name}={columns[name][row]:g}: {rule}"
        )


def _constant(columns: Mapping[str, NDArray[Any]], own: NDArray[np.intp], name: str) -> Any:
    values = columns[name][own]
    if (differs := values != values[0]).any():
        row = own[int(np.argmax(differs))]
        raise ValueError(
            f"profile, row {row} ({columns['operator'][row]}): {name}={columns[name][row]}: "
            f"row {own[0]} of the same operator says {values[0]}"
        )
    return values[0]


def _operator(
    columns: Mapping[str, NDArray[Any]], own: NDArray[np.intp], name: str, component: str, calls: int
) -> OperatorTimes:
    (size,) = SIZES[component]
    own = own[np.argsort(columns[size][own], kind="stable")]
    _refuse_repeats(columns, own, (size,))
    if len(own) < 2:
        raise ValueError(f"profile: {name} has a single row; two sizes or more are needed")
    return OperatorTimes(
        name=name,
        component=component,
        calls=calls,
        counts=columns[size][own],
        call_s=columns["latency_us"][own] * 1e-6,
    )


def _attention(columns: Mapping[str, NDArray[Any]], own: NDArray[np.intp], calls: int) -> AttentionTable:
    several, own = own[columns["prefill_seqs"][own] > 1], own[~(columns["prefill_seqs"][own] > 1)]
    _refuse_repeats(columns, own, ATTENTION_SIZES)
    chunk, decodes = columns["prefill_tokens"][own] > 0, columns["decode_seqs"][own] > 0
    _refuse(
        {name: column[own] for name, column in columns.items()},
        ~(chunk | decodes),
        "decode_seqs",
        "attention needs decode_seqs or prefill_tokens > 0",
    )
    decode = _attention_grid(columns, own[decodes & ~chunk], ATTENTION_SIZES[2:], calls)
    prefill = _attention_grid(columns, own[chunk & ~decodes], ATTENTION_SIZES[:2], calls)
    mixed = _attention_grid(columns, own[chunk & decodes], ATTENTION_SIZES, calls)
    if decode is None or prefill is None:
        lacking = "decodes alone" if decode is None else "a prompt chunk alone"
        raise ValueError(f"profile: attention has no rows of {lacking}; both kinds are needed")
    chunks_apart = bool(_constant(columns, own, "chunks_apart"))
    if chunks_apart and mixed is not None:
        raise ValueError("profile: chunks_apart=1: must have no rows of chunks with decodes; these add up")
    if len(several) and not chunks_apart:
        raise ValueError("profile: prefill_seqs > 1: must not occur with chunks_apart=0; remove these rows")
    saved_s = _saved_seconds(columns, several, prefill, calls)
    return AttentionTable(
        decode=decode, prefill=prefill, mixed=mixed, chunks_apart=chunks_apart, saved_s=saved_s
    )


def _saved_seconds(
    columns: Mapping[str, NDArray[Any]], several: NDArray[np.intp], alone: Grid, calls: int
) -> float:
    """Returns the median of the seconds saved by a chunk after another one; 0 without rows.

    several: rows of steps with several chunks. alone: seconds of all layers for one chunk.
    """
    if not len(several):
        return 0.0
    count = columns["prefill_seqs"][several]
    sizes = (columns[name][several] for name in ATTENTION_SIZES[:2])
    together_s = calls * columns["latency_us"][several] * 1e-6
    return float(np.median((count * alone.at(*sizes) - together_s) / (count - 1)))


def _attention_grid(
    columns: Mapping[str, NDArray[Any]], own: NDArray[np.intp], sizes: Sequence[str], calls: int
) -> Grid | None:
    """Returns the seconds of all layers on the grid of the sizes that occur; None without rows."""
    if not len(own):
        return None
    axes, places = zip(*(np.unique(columns[name][own], return_inverse=True) for name in sizes), strict=True)
    for name, axis in zip(sizes, axes, strict=True):
        if len(axis) < 2:
            raise ValueError(f"profile: attention has one {name} only, {axis[0]:g}; two or more are needed")
    values = np.full([len(axis) for axis in axes], np.nan)
    values[places] = calls * columns["latency_us"][own] * 1e-6
    values = fill_holes(axes, values)
    if np.isnan(values).any():
        hole = np.argwhere(np.isnan(values))[0]
        where = ", ".join(f"{n}={axis[i]:g}" for n, axis, i in zip(sizes, axes, hole, strict=True))
        raise ValueError(f"profile: attention has no row at {where} and none around it; measure a full grid")
    return Grid(axes, values)


def _refuse_repeats(columns: Mapping[str, NDArray[Any]], own: NDArray[np.intp], sizes: Sequence[str]) -> None:
    shapes = np.column_stack([columns[name][own] for name in sizes])
    _, first = np.unique(shapes, axis=0, return_index=True)
    if len(first) < len(own):
        row = own[np.setdiff1d(np.arange(len(own)), first)[0]]
        shape = ", ".join(f"{name}={columns[name][row]:g}" for name in sizes)
        raise ValueError(
            f"profile, row {row} ({columns['operator'][row]}): {shape} occurs twice; keep the median"
        )
