"""/v1/embeddings: vectors of the right size, at the time of a prefill.

The request is one of a single output token, which is drawn and hidden. A vector is drawn from the tokens of
its text: equal texts have equal vectors, and the distance of others says nothing.
"""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from typing import Annotated, Any, Literal

import numpy as np
from aiohttp import web
from pydantic import Field

from experiments.serve.backend import Backend
from experiments.serve.errors import ApiError
from experiments.serve.http.common import Identity, Usage, generations_of, whole_outputs
from experiments.serve.http.fields import CommonFields, fields_of
from experiments.serve.http.prompts import prompts_of, served_model


class EmbeddingFields(CommonFields):
    """The body of /v1/embeddings."""

    input: str | list[Any]
    """Texts or token ids, in the forms of `prompt` of a completion."""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    n: Literal[1] = 1
    stream: Literal[False] = False

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def limit(self) -> int | None:
        return 0

    @property
    def may_be_prompt_only(self) -> bool:
        return True


async def embed(request: web.Request, backend: Backend) -> web.StreamResponse:
    """Answers one request. Raises ApiError."""
    fields = await fields_of(request, EmbeddingFields)
    model = served_model(backend, fields.model)
    size = model.embedding_size
    if size is None:
        raise ApiError(f"The model {model.name} does not support the Embeddings API", param="model")
    if (fields.dimensions or size) > size:
        raise ApiError(f"dimensions={fields.dimensions}: must be <= {size}", param="dimensions")
    prompts = await prompts_of(fields.input, backend.tokenizer, model.max_model_len, name="input")
    identity = Identity.of(request.headers.get("X-Request-Id"), fields, "embd")
    usage = Usage(sum(map(len, prompts)))
    await whole_outputs(backend, generations_of(fields, prompts, model, identity, None), usage)
    vectors = [vector_of(prompt, model.name, fields.dimensions or size) for prompt in prompts]
    return web.json_response(
        {
            "id": identity.response_id,
            "object": "list",
            "created": identity.created,
            "model": model.name,
            "data": [
                {"index": index, "object": "embedding", "embedding": _written(vector, fields.encoding_format)}
                for index, vector in enumerate(vectors)
            ],
            "usage": usage.body(1),
        },
        headers={"X-Request-Id": identity.response_id},
    )


def vector_of(prompt: list[int], model: str, size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns the vector of a prompt, of length 1; fewer dimensions are the first ones of more."""
    seed = sha256(model.encode() + np.array(prompt, np.uint32).tobytes()).digest()
    vector = np.random.default_rng([*seed]).standard_normal(size, np.float32)
    return vector / np.linalg.norm(vector)


def _written(vector: np.ndarray[Any, np.dtype[np.float32]], encoding: str) -> str | list[float]:
    if encoding == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    return [round(float(value), 7) for value in vector]
