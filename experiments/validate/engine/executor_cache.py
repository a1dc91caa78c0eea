"""Keeps one executor for engines of several sizes, so that a model is loaded once per device."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.calibrate.engine.pace import Reference
from policies.batching.chunked import Chunked
from realengine.attention.choice import with_attention
from realengine.model.architecture import Architecture
from realengine.model.backend import choose_backend, choose_device
from realengine.runner.executor import Executor
from realengine.runner.memory import GIB, Memory
from realengine.runner.rank import build_executor
from realengine.runner.work import Padding, Work
from realengine.serving.model import Model
from realengine.settings import EngineSettings

ALIKE = (
    "attention_backend",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "cudagraph_mode",
    "speculative_config",
)
"""Settings in which an engine must equal the one that the executor was built for."""


class Built(NamedTuple):
    """An executor with the model and the settings that it was built for."""

    architecture: Architecture
    settings: EngineSettings
    executor: Executor
    memory: Memory

    def serves(self, architecture: Architecture, settings: EngineSettings) -> bool:
        """Returns whether an engine with these settings can use the executor and compute the same numbers."""
        own = self.settings
        if settings.num_kv_blocks is None:
            has_blocks = own.num_kv_blocks is None and (
                settings.gpu_memory_utilization == own.gpu_memory_utilization
            )
        else:
            has_blocks = settings.num_kv_blocks <= self.memory.num_blocks
        return (
            has_blocks
            and architecture == self.architecture
            and all(getattr(settings, name) == getattr(own, name) for name in ALIKE)
            and settings.caching.block_size == own.caching.block_size
            and settings.max_num_seqs <= own.max_num_seqs
            and _largest_step(settings) <= _largest_step(own)
        )


@dataclass(slots=True)
class ExecutorCache:
    """Keeps the last executor that was built, since loading weights and capturing graphs takes long on a GPU.

    Only one is kept, as a second model may not fit into memory beside the first. An engine with fewer KV
    blocks or sequences uses a part of it.
    """

    device: torch.device
    reference: Reference | None = None
    """The reference step of this machine; None unless it is a calibrated CPU."""
    attention_backend: str = "triton"
    """Attention of prompts' chunks in all engines, a name of the engine's setting."""
    _built: Built | None = None

    @classmethod
    def of(
        cls, device: str, reference: Reference | None = None, attention_backend: str = "triton"
    ) -> ExecutorCache:
        """Creates the cache for a device, cpu or cuda.

        Raises ValueError or RuntimeError if there is no such device or attention on this machine.
        """
        chosen = choose_device(device)
        EngineSettings(attention_backend=attention_backend)  # a known name
        with_attention(choose_backend(None, chosen), attention_backend, chosen)
        if chosen.type == "cpu":
            torch.set_num_threads(1)  # the clock is the CPU time of this thread
        return cls(chosen, reference, attention_backend)

    def executor(self, model: Model, settings: EngineSettings) -> tuple[Executor, Memory]:
        """Returns an executor, valid until the next call. Raises ValueError for unsupported settings."""
        settings = replace(settings, attention_backend=self.attention_backend)
        if self._built is None or not self._built.serves(model.architecture, settings):
            self._built = None
            gc.collect()  # frees its memory: graphs and their executor refer to each other
            wide = with_room(settings)
            built = build_executor(model, wide, self.device)
            self._built = Built(model.architecture, wide, *built)
        executor, memory = self._built.executor, self._built.memory
        executor.run(Work(table_updates=_empty_padding_row(settings)))
        num_blocks = memory.num_blocks if settings.num_kv_blocks is None else settings.num_kv_blocks
        num_swap_blocks = int(settings.swap_space_gib * GIB / memory.block_bytes)
        return executor, memory._replace(num_blocks=num_blocks, num_swap_blocks=num_swap_blocks)


def with_room(settings: EngineSettings) -> EngineSettings:
    """Returns the settings with room for a whole prompt per step, which some batching policies need."""
    return replace(settings, batching=Chunked(max_num_batched_tokens=_largest_step(settings)))


def _largest_step(settings: EngineSettings) -> int:
    """Returns the largest number of tokens of a step: at least one whole prompt."""
    assert settings.max_model_len is not None  # set by the scenario
    return max(settings.max_num_batched_tokens or 0, settings.max_model_len)


def _empty_padding_row(settings: EngineSettings) -> NDArray[np.int32]:
    """Returns block table updates that clear the padding row, which the previous engine may have used."""
    padding = padding_of(settings)
    updates = np.zeros((padding.max_blocks, 2), np.int32)
    updates[:, 0] = np.arange(padding.max_blocks) + padding.place
    return updates


def padding_of(settings: EngineSettings) -> Padding:
    """Returns the padding of steps: the row behind the last sequence, and its number of blocks."""
    assert settings.max_model_len is not None
    return Padding(settings.max_num_seqs, -(-settings.max_model_len // settings.caching.block_size))
