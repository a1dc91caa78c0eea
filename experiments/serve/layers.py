"""Layers in front of every back end: names that clients give the model, and KV that is not shared.

The names are vLLM's `--served-model-name`. `kv_transfer_params` are ignored in front of a back end that
shares no KV, as vLLM does without a connector.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from experiments.serve.backend import Backend, BackendLayer, Delta, Generation, ServedModel

_LOG = logging.getLogger("windtunnel.serve")


class ServedNames(BackendLayer):
    """A back end of one base model, whose names are others. names: the first is that of answers."""

    def __init__(self, backend: Backend, names: Sequence[str]) -> None:
        super().__init__(backend)
        self._names = tuple(names)
        self._own_name = next(model.name for model in backend.models() if model.base is None)

    def models(self) -> Sequence[ServedModel]:
        found: list[ServedModel] = []
        for model in super().models():
            if model.base is None:
                found += [model._replace(name=name) for name in self._names]
            else:
                found.append(model._replace(base=self._names[0]))
        return found

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        return super().generate(replace(generation, model=self._own_name))


def with_names(backend: Backend, names: Sequence[str] | None) -> Backend:
    """Returns a back end whose model has these names; None: its own."""
    return ServedNames(backend, names) if names else backend


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
