"""Ignores `kv_transfer_params` in front of a back end that shares no KV, as vLLM does without a connector."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from experiments.serve.backend import Backend, BackendLayer, Delta, Generation

_LOG = logging.getLogger("windtunnel.serve")


class WithoutRemoteKv(BackendLayer):
    """A back end that serves requests with `kv_transfer_params` as if they had none."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._has_warned = False

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        if generation.remote_kv is not None and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "kv_transfer_params are ignored, as this server has no prefill replicas; a simulated fleet "
                "with pools=disaggregated has some."
            )
        return super().generate(generation)
