"""The field `kv_transfer_params`, by which a P/D router hands KV from a prefill to a decode replica.

Fields and meanings are those of vLLM's NixlConnector; unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from experiments.serve.backend import RemoteKv
from experiments.serve.errors import ApiError

PARAM = "kv_transfer_params"
REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
"""Fields that do_remote_prefill needs; a prefill replica has answered with them."""
Blocks = list[Annotated[int, Field(ge=0)]]


class KvTransferParams(BaseModel):
    """Shares KV between a request and one on another replica."""

    model_config = ConfigDict(extra="ignore")

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: list[Blocks] | Blocks | None = None
    remote_host: str | None = None
    remote_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    remote_prefill_cached_tokens: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise ValueError("do_remote_decode and do_remote_prefill exclude each other")
        if self.do_remote_prefill:
            missing = [name for name in REMOTE_FIELDS if getattr(self, name) is None]
            if missing:
                raise ValueError(f"do_remote_prefill: needs {', '.join(missing)} of the prefill's answer")
        return self

    def remote_kv(self, *, num_outputs: int, limit: int | None, is_streamed: bool) -> RemoteKv | None:
        """Returns what the back end needs; None: no KV is shared. Raises ApiError.

        num_outputs: of the request. limit: its own limit of the output tokens.
        """
        if not (self.do_remote_decode or self.do_remote_prefill):
            return None
        if num_outputs != 1:
            raise ApiError(f"{PARAM}: such a request has one prompt and n=1", param=PARAM)
        if self.do_remote_prefill:
            return RemoteKv(
                engine_id=self.remote_engine_id or "",
                request_id=self.remote_request_id or "",
                num_cached_tokens=self.remote_prefill_cached_tokens,
            )
        if limit != 1 or is_streamed:
            raise ApiError(
                f"{PARAM}.do_remote_decode: needs max_tokens=1 and stream=false, as the prefill has one "
                "token and its answer tells where the KV is",
                param="stream" if is_streamed else "max_tokens",
            )
        return RemoteKv(keeps=True)
