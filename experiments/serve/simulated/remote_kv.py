"""KV that a P/D router hands from a prefill to a decode replica, with vLLM's `kv_transfer_params`.

The simulation keeps the KV and moves it (`sim/cluster/disaggregation.py`); here are the names by which
clients refer to it. Nothing listens at remote_host and remote_port.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from experiments.serve.backend import Backend, BackendLayer, Delta, Generation
from experiments.serve.errors import ApiError
from experiments.serve.http.kv_transfer import PARAM
from experiments.serve.simulated.fleet import SimulatedFleet
from sim.cluster.disaggregation import GONE, KeptKv, KeptPrefills

HOST, PORT = "localhost", 5600
"""Address of vLLM's side channel of engine 0; that of engine i has the port + i."""


class RemoteKvLayer(BackendLayer):
    """A back end whose requests may share KV. backend: in front of `fleet`, which has the hand-overs."""

    def __init__(self, backend: Backend, fleet: SimulatedFleet, kept_prefills: KeptPrefills) -> None:
        super().__init__(backend)
        self._kept_prefills = kept_prefills
        self._uuid = uuid4().hex
        self._ids: dict[int, int] = {}  # by id() of the generation: ids of the requests that share KV
        fleet.on_begin.append(self._begun)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        remote_kv = generation.remote_kv
        if remote_kv is not None:
            generation = replace(generation, deliver=None)  # its deltas are completed here
            if not remote_kv.keeps:
                self._source_of(generation)
        try:
            async with aclosing(super().generate(generation)) as deltas:
                async for delta in deltas:
                    yield delta if remote_kv is None else self._completed(delta, generation)
        finally:
            self._ids.pop(id(generation), None)

    def _begun(self, request_id: int, generation: Generation) -> None:
        remote_kv = generation.remote_kv
        if remote_kv is None:
            return
        self._ids[id(generation)] = request_id
        if remote_kv.keeps:
            self._kept_prefills.keep(request_id)
        else:
            self._kept_prefills.claim(request_id, self._source_of(generation))

    def _completed(self, delta: Delta, generation: Generation) -> Delta:
        """Returns a delta with what the client is told about shared KV."""
        remote_kv = generation.remote_kv
        assert remote_kv is not None
        if not remote_kv.keeps:
            num_cached = remote_kv.num_cached_tokens
            return delta if num_cached is None else delta._replace(num_cached_tokens=num_cached)
        request_id = self._ids[id(generation)]
        kept = self._kept_prefills.kept(request_id)
        if delta.finish_reason is None or kept is None:
            return delta
        return delta._replace(kv_transfer_params=self._params(kept, f"{generation.request_id}-{request_id}"))

    def _params(self, kept: KeptKv, name: str) -> dict[str, Any]:
        index = kept.replica.index
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [kept.block_ids],
            "remote_engine_id": self._engine_id(kept),
            "remote_request_id": name,
            "remote_host": HOST,
            "remote_port": PORT + index,
            "tp_size": kept.replica.pool.num_devices,
            "remote_num_tokens": kept.num_tokens,
            "remote_blocks_expiry_time": None,
            "remote_prefill_cached_tokens": kept.num_cached_tokens,
            "transfer_mode": "pull",
        }

    def _engine_id(self, kept: KeptKv) -> str:
        return f"{self._uuid}-{kept.replica.index}"

    def _source_of(self, generation: Generation) -> int:
        """Returns the id of the request with whose KV another one continues. Raises ApiError."""
        remote_kv = generation.remote_kv
        assert remote_kv is not None
        number = remote_kv.request_id.rpartition("-")[2]
        source_id = int(number) if number.isascii() and number.isdecimal() and len(number) < 16 else -1
        kept = self._kept_prefills.kept(source_id)
        if kept is None or kept.is_claimed or self._engine_id(kept) != remote_kv.engine_id:
            raise ApiError(GONE, HTTPStatus.INTERNAL_SERVER_ERROR, f"{PARAM}.remote_request_id")
        if kept.num_tokens != len(generation.prompt_token_ids):
            raise ApiError(
                f"prompt: has {len(generation.prompt_token_ids)} tokens, and the KV that {PARAM} names is of "
                f"{kept.num_tokens} tokens",
                param="prompt",
            )
        return source_id
