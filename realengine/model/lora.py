"""Resident LoRA adapters, and how a batch applies several of them (S-LoRA, MLSys 2024; Punica).

Of the adapters in host memory, up to `max_loras` are resident, each in a slot of one device buffer, with
ranks padded to `max_rank`. Loading an adapter is a single copy from pinned memory, which overwrites an
evicted one. `policies.adapters` decides which are resident, and `put` loads them.

    slot:  | layer 0: qkv A | qkv B | o A | o B | gate_up A | gate_up B | down A | down B | layer 1: ... |
    qkv A  [3 R, K]: the ranks of queries, keys, values        qkv B  [N, R]: their outputs, as in the weight

Letters: B rows, T tokens, S segments, L slots, E numbers of a slot, R ranks, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hwmodels.checks import check_whole
from kernels.lora import (
    MAX_RANK,
    Segments,
    lora_expand,
    lora_expand_reference,
    lora_shrink,
    lora_shrink_reference,
)
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.lora_adapter import Adapter, adapted_weights, layer_name
from realengine.weights.weight import Weight

NO_ADAPTER = -1
RANK_TILE = 16  # minimum of the kernels; lower ranks are padded, so that loads stay wide
ALIGNMENT = 128  # numbers; each matrix of a slot begins at a multiple of it
DECODE_TOKENS, CHUNK_TOKENS = 16, 64  # tokens of a segment for one program of the kernels
KERNELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "triton": (lora_shrink, lora_expand),
    "torch": (lora_shrink_reference, lora_expand_reference),
}


class SegmentArrays(NamedTuple):
    """Segments on the host, int32: starts [S + 1], slots [S], as the runner uploads them."""

    starts: NDArray[np.int32]
    slots: NDArray[np.int32]


def make_segments(
    slots_B: Sequence[int],
    num_tokens_B: Sequence[int],
    max_segment_tokens: int,
    num_segments: int | None = None,
) -> SegmentArrays:
    """Builds runs of neighbouring rows with one slot (NO_ADAPTER: none), of at most max_segment_tokens.

    Tokens stay in place. There are fewest segments if rows are sorted by slot: a stable argsort of the
    decodes' slots, then the chunks. num_segments: exact number, with empty ones at the end, as a captured
    graph needs. Raises ValueError if it is too small.

    slots 1 1 0 -1, tokens 1 1 1 5, max 2:    starts | 0 | 2 | 3 | 5 | 7 | 8     slots | 1 | 0 | -1 | -1 | -1
    """
    check_whole("max_segment_tokens", max_segment_tokens)
    starts: list[int] = []
    slots: list[int] = []
    end = room = 0  # room: tokens that the last segment can still take
    for slot, num_tokens in zip(slots_B, num_tokens_B, strict=True):
        if not slots or slot != slots[-1]:
            room = 0
        while num_tokens:
            if not room:
                starts.append(end)
                slots.append(slot)
                room = max_segment_tokens
            taken = min(num_tokens, room)
            end, room, num_tokens = end + taken, room - taken, num_tokens - taken
    num_empty = 0 if num_segments is None else num_segments - len(slots)
    if num_empty < 0:
        raise ValueError(f"num_segments={num_segments}: these rows need {len(slots)}; sort them by slot")
    starts += [end] * (num_empty + 1)
    slots += [NO_ADAPTER] * num_empty
    return SegmentArrays(np.array(starts, np.int32), np.array(slots, np.int32))


def num_decode_segments(num_rows: int, max_loras: int) -> int:
    """Returns the number of segments of up to DECODE_TOKENS that hold any num_rows decodes sorted by slot."""
    return min(num_rows, max_loras + 1 + num_rows // DECODE_TOKENS)


class _Place(NamedTuple):
    """Position of a fused weight's matrices in a slot."""

    weight: Weight
    slices: tuple[int, ...]  # numbers of outputs
    num_inputs: int
    first_a: int
    first_b: int


@dataclass(slots=True)
class _Loaded:
    """An adapter in host memory, in the layout of a slot."""

    image_E: torch.Tensor
    scaling: float
    rank: int


class AdapterBank:
    """Adapters by name, their slots on the device, and their part of the linear layers' outputs.

    rank, world_size: of tensor parallelism; x and out are this rank's, and what is added to the outputs of
    `o` and `down` is this rank's part of the sum. The caller chooses the names. Not thread-safe.
    """

    def __init__(
        self,
        architecture: Architecture,
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_loras: int,
        max_rank: int = RANK_TILE,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Creates a bank without adapters.

        dtype: of the activations. max_loras: number of slots. max_rank: maximum rank, up to the kernels' 64.
        """
        check_whole("max_loras", max_loras)
        check_whole("max_rank", max_rank)
        if max_rank > MAX_RANK:
            raise ValueError(f"max_rank={max_rank}: must be <= {MAX_RANK}, the kernels' limit")
        self.max_loras = max_loras
        self.max_rank = max_rank
        self._architecture = architecture
        self._shrink, self._expand = KERNELS[backend.name]
        self._padded_rank = -(-max_rank // RANK_TILE) * RANK_TILE
        self._places, num_numbers = _layout(
            adapted_weights(architecture, rank, world_size), self._padded_rank
        )
        self._slots_LE = torch.zeros(max_loras, num_numbers, dtype=dtype, device=device)
        self._scaling_L = torch.zeros(max_loras, dtype=torch.float32, device=device)
        self._views = {at: self._matrices(place, self._slots_LE) for at, place in self._places.items()}
        self._loaded: dict[str, _Loaded] = {}
        self._resident: dict[str, int] = {}

    def max_segment_tokens(self, only_decodes: bool) -> int:
        """Returns the `max_segment_tokens` of `make_segments` for a step, smaller for decodes only."""
        if self._shrink is lora_shrink_reference:
            return 1 << 30  # no limit, because the reference computes one segment after the other
        return DECODE_TOKENS if only_decodes else CHUNK_TOKENS

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._loaded)

    @property
    def ranks(self) -> Mapping[str, int]:
        """Ranks of the loaded adapters, by name."""
        return {name: loaded.rank for name, loaded in self._loaded.items()}

    @property
    def resident(self) -> Mapping[str, int]:
        """Slots of the adapters on the device, by name."""
        return MappingProxyType(self._resident)

    def load(self, name: str, adapter: Adapter) -> None:
        """Keeps an adapter in host memory, pinned if the device is a GPU.

        Raises ValueError if the name is taken, the rank is above max_rank, the adapter is for another model,
        or it has numbers that the bank's dtype cannot hold.
        """
        if name in self._loaded:
            raise ValueError(f"adapter {name}: loaded already; unload it first, or choose another name")
        try:
            adapter.check_fits(self._architecture)
            if adapter.rank > self.max_rank:
                raise ValueError(
                    f"rank {adapter.rank} exceeds max_rank={self.max_rank}; raise max_rank, up to {MAX_RANK}"
                )
            image_E = self._image(adapter)
        except ValueError as error:
            raise ValueError(f"adapter {name}: {error}") from None
        self._loaded[name] = _Loaded(image_E, adapter.scaling, adapter.rank)

    def unload(self, name: str) -> None:
        """Removes an adapter, which must be unused. Raises ValueError if it is not loaded."""
        self._find(name)
        self._resident.pop(name, None)
        del self._loaded[name]

    def put(self, name: str, slot: int) -> None:
        """Copies an adapter into a slot, over its content; any other slot of the adapter becomes free.

        Nothing is copied if it is there already. The copy is queued on the current stream: steps queued
        before it see the slot's old adapter, later ones the new one. Raises ValueError if it is not loaded.
        """
        loaded = self._find(name)
        if self._resident.get(name) == slot:
            return
        self.evict(slot)
        if name in self._resident:
            self.evict(self._resident[name])
        self._slots_LE[slot].copy_(loaded.image_E, non_blocking=True)
        self._scaling_L[slot].fill_(loaded.scaling)
        self._resident[name] = slot

    def evict(self, slot: int) -> None:
        """Frees a slot; nothing happens if it is free."""
        if not 0 <= slot < self.max_loras:
            raise ValueError(f"slot={slot}: must be >= 0 and < max_loras={self.max_loras}")
        for name in [name for name, held in self._resident.items() if held == slot]:
            del self._resident[name]

    def apply(
        self, layer: int, projection: str, x_TK: torch.Tensor, out_TN: torch.Tensor, segments: Segments
    ) -> None:
        """Adds to a fused linear layer's output, in place: scaling * (x @ A^T) @ B^T of each token's adapter.

        projection: qkv, o, gate_up or down. out_TN: the layer's output of x_TK, before ranks are summed. Two
        launches; no synchronisation on a GPU, so that a graph can capture it. Layers with experts have no
        gate_up and down: nothing is added there.
        """
        view = self._views.get((layer, projection))
        if view is None:
            return
        a_LZK, b_LNR, slices = view
        parts_PTZ = self._shrink(x_TK, a_LZK, segments)
        self._expand(parts_PTZ, b_LNR, self._scaling_L, segments, out_TN, slices=slices)

    def _matrices(
        self, place: _Place, memory_LE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Returns A [L, Z, K], B [L, N, R] and the outputs of each slice: views of slots."""
        rank, num_out = self._padded_rank, sum(place.slices)
        num_ranks = len(place.slices) * rank
        a_LE = memory_LE[:, place.first_a : place.first_a + num_ranks * place.num_inputs]
        b_LE = memory_LE[:, place.first_b : place.first_b + num_out * rank]
        a_LZK = a_LE.view(-1, num_ranks, place.num_inputs)
        return a_LZK, b_LE.view(-1, num_out, rank), place.slices

    def _image(self, adapter: Adapter) -> torch.Tensor:
        """Returns the numbers of a slot [E]: this rank's share of the adapter, zeros elsewhere."""
        device = self._slots_LE.device
        image_E = torch.zeros(
            self._slots_LE.shape[1], dtype=self._slots_LE.dtype, pin_memory=device.type == "cuda"
        )
        for place in self._places.values():
            a_LZK, b_LNR, _ = self._matrices(place, image_E[None])
            for index, part in enumerate(place.weight.parts):
                pair = adapter.layers.get(layer_name(part))
                if pair is None:
                    continue
                rows, columns = part.take
                num_ranks, first = len(pair.a_RK), index * self._padded_rank
                a_LZK[0, first : first + num_ranks].copy_(pair.a_RK[:, columns])
                b_LNR[0, part.into[0], :num_ranks].copy_(pair.b_NR[rows])
        if not image_E.isfinite().all():
            raise ValueError(f"contains infinite numbers or NaN in {image_E.dtype}")
        return image_E

    def _find(self, name: str) -> _Loaded:
        if name not in self._loaded:
            there = ", ".join(self._loaded) or "none"
            raise ValueError(f"adapter {name}: not loaded; the loaded adapters are {there}")
        return self._loaded[name]


def _layout(
    weights: Mapping[tuple[int, str], Weight], padded_rank: int
) -> tuple[dict[tuple[int, str], _Place], int]:
    """Returns the position of each fused weight's matrices in a slot, and the number of values in a slot."""
    places: dict[tuple[int, str], _Place] = {}
    end = 0

    def room(num_numbers: int) -> int:
        nonlocal end
        start, end = end, end + -(-num_numbers // ALIGNMENT) * ALIGNMENT
        return start

    for at, weight in weights.items():
        slices = tuple(_num_outputs(weight))
        num_inputs = weight.shape[1]
        first_a = room(len(slices) * padded_rank * num_inputs)
        places[at] = _Place(weight, slices, num_inputs, first_a, room(sum(slices) * padded_rank))
    return places, end


def _num_outputs(weight: Weight) -> Iterator[int]:
    for part in weight.parts:
        rows = part.into[0]
        assert isinstance(rows, slice)
        yield rows.stop - rows.start
