"""The tokens of a request, and the hashes of its blocks: those of vLLM 0.32 with its default settings.

    hash of a block = SHA-256 of pickle((hash of the block before, its token ids, extra keys))

The hash before the first block is that of vLLM's default seed. Extra keys are the LoRA adapter and, in the
first block, the cache salt. In events a hash is its last 64 bits as a number, as in vLLM.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from hashlib import sha256

Extra = tuple[tuple[str, ...], ...]
"""Extra keys of a block's hash, each tagged with its source."""


def _hashed(content: object) -> bytes:
    return sha256(pickle.dumps(content, protocol=5)).digest()


def _own(text: str) -> str:
    """Returns a copy, as pickle writes an object that occurs twice in another way than two equal ones."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


NO_PARENT = _hashed("vllm-none-hash")
"""The hash before the first block of every prompt."""


class PromptAndOutput(Sequence[int]):
    """The tokens of a prompt and its output. num_output: tokens of the output now. read: those of a range."""

    def __init__(
        self, prompt: Sequence[int], num_output: Callable[[], int], read: Callable[[int, int], Sequence[int]]
    ) -> None:
        self._prompt, self._num_output, self._read = prompt, num_output, read

    def __len__(self) -> int:
        return len(self._prompt) + self._num_output()

    def __getitem__(self, part: slice) -> list[int]:  # type: ignore[override]
        start, end, _ = part.indices(len(self))
        num_prompt = len(self._prompt)
        found = list(self._prompt[start:end])
        if end > num_prompt:  # an output may be drawn when it is read
            found += self._read(max(0, start - num_prompt), end - num_prompt)
        return found


class BlockChain:
    """The blocks of one request.

    token_ids: of prompt and output; it may grow. lora: name of the adapter. lora_number: its number, from 1.
    lora_path: what identifies its weights.
    """

    __slots__ = ("_hashes", "_salt", "block_size", "lora", "lora_number", "lora_path", "token_ids")

    def __init__(
        self,
        token_ids: Sequence[int],
        block_size: int,
        *,
        lora: str | None = None,
        lora_number: int | None = None,
        lora_path: str = "",
        cache_salt: str = "",
    ) -> None:
        self.token_ids = token_ids
        self.block_size = block_size
        self.lora = None if lora is None else _own(lora)
        self.lora_number = lora_number
        self.lora_path = _own(lora_path)
        self._salt = _own(cache_salt)
        self._hashes = [NO_PARENT]

    def extra_keys(self, block: int) -> Extra:
        """Returns the extra keys of a block."""
        lora = () if self.lora is None else (("lora", self.lora, self.lora_path),)
        salt = (("cache_salt", self._salt),) if self._salt and not block else ()
        return (*lora, *salt)

    def tokens(self, first: int, end: int) -> list[int]:
        """Returns the token ids of the blocks first to end - 1. Raises ValueError if some are not known."""
        size = self.block_size
        found = self.token_ids[first * size : end * size]
        if len(found) != (end - first) * size:
            raise ValueError(f"blocks {first} to {end - 1}: the request has {len(self.token_ids)} tokens")
        return list(found)

    def external_hash(self, block: int) -> int:
        """Returns the hash of a block as events have it."""
        hashes, size = self._hashes, self.block_size
        for number in range(len(hashes) - 1, block + 1):
            tokens = tuple(self.token_ids[number * size : (number + 1) * size])
            hashes.append(_hashed((hashes[-1], tokens, self.extra_keys(number) or None)))
        return int.from_bytes(hashes[block + 1][-8:], "big")
