"""The kept tokens of an engine whose cache drops KV."""

from __future__ import annotations

import torch

from policies.caching.selective import SnapKv
from policies.caching.streaming import StreamingLlm
from realengine.model.architecture import Architecture
from realengine.runner.kept_prompt import KeptPrompt
from realengine.runner.kept_tokens import KeptTokens
from realengine.runner.kept_window import KeptWindow
from realengine.settings import EngineSettings


def kept_tokens_of(
    architecture: Architecture, settings: EngineSettings, device: torch.device
) -> KeptTokens | None:
    """Returns what decoding sequences keep; None: all. Raises ValueError if the model cannot drop KV."""
    caching = settings.caching
    if isinstance(caching, StreamingLlm):
        return KeptWindow.of(architecture, caching)
    if isinstance(caching, SnapKv):
        return KeptPrompt.of(architecture, caching, settings.max_num_seqs, device)
    return None
