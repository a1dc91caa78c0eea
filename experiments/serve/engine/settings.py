"""Settings of a server with the real engine that no scenario has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fieldlimits import Checked, PositiveInt, check
from realengine.runner.graph_mode import check_mode

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RealEngine(Checked):
    """The node `serve.engine`. Raises ValueError for an invalid setting."""

    model: str | None = None
    """smollm2, a GGUF file, or a folder in Hugging Face's format; None: random weights, sizes of `model`."""
    lora_modules: Mapping[str, Path] | None = None
    """LoRA adapters by the names that requests use: folders in PEFT's format; None: there are none."""
    speculative_config: Mapping[str, Any] | None = None
    """Speculative decoding with weights, with the keys of vLLM's option; None: as the scenario says."""
    max_iterations: PositiveInt = 1
    """Decode iterations in one launch, if the plan holds for so many; tokens then come in groups."""
    attention_backend: str = "triton"
    """Attention of prompts' chunks, a name of the engine's setting; triton: the engine's own kernel."""
    cudagraph_mode: str | None = None
    """Steps that run as CUDA graphs, with vLLM's names; None: as the profile of the engine says."""
    enable_sleep_mode: bool = False
    """Whether /sleep frees the memory of the device; vLLM's key."""

    def __post_init__(self) -> None:
        check(self)
        check_mode(self.cudagraph_mode)
