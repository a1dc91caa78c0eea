"""Computes the known tokens at which a request ends, and rejects requests that can never be served."""

from __future__ import annotations

from typing import Final

from policies.caching.pool import BlockPool
from policies.core.request import Branching, Request
from policies.core.sequence import FinishReason

STOP: Final = FinishReason.stop
LENGTH: Final = FinishReason.length

StopAfter = int | tuple[int, ...] | None
"""Output tokens after which the caller ends a request, if it knows them; one number, or one per branch."""


class RejectedError(ValueError):
    """A request that this engine can never serve; the message gives the reason."""


Bounds = tuple[int, FinishReason, int]
"""(known tokens at which a request ends, the reason, upper bound of the known tokens).

The first uses the output length that the caller knows; policies may use only the last.
"""


class Limits:
    """The limits of an engine's slots, context length and empty KV memory for one request."""

    def __init__(
        self, pool: BlockPool, max_num_seqs: int, max_model_len: int, num_blocks: int | None = None
    ) -> None:
        """Sets the slots and KV blocks that one sequence may have; num_blocks=None: all."""
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._room = pool.max_tokens_per_seq - pool.num_state_blocks * pool.block_size
        if num_blocks is not None:
            share = pool.max_tokens_per_seq * num_blocks // pool.num_blocks
            self._room = share // pool.block_size * pool.block_size - pool.num_state_blocks * pool.block_size
        self._max_known = min(max_model_len, self._room + 1)  # the newest token needs no KV

    @property
    def room(self) -> int:
        """KV tokens that one sequence may hold."""
        return self._room

    def of(self, request: Request, stop_after: StopAfter = None, num_adapter_blocks: int = 0) -> Bounds:
        """Computes the number of known tokens at which a request would end, and the reason.

        num_adapter_blocks: blocks that its adapter takes. Raises RejectedError if it can never be served.
        """
        num_prompt = request.prompt.num_tokens
        room, max_known = self._room, self._max_known
        if num_adapter_blocks:
            room -= num_adapter_blocks * self._pool.block_size
            max_known = min(self._max_model_len, room + 1)
        if not 1 <= num_prompt < max_known:
            self._reject_prompt(num_prompt, room)
        if request.branching is not None:
            self._check_branching(request.branching, stop_after)
            max_known = min(max_known, self._room_for(request.branching, num_prompt, room))
        max_tokens = request.max_tokens
        if max_tokens is not None and num_prompt + max_tokens < max_known:
            max_known = num_prompt + max_tokens
        if isinstance(stop_after, tuple):
            if request.branching is None:
                raise ValueError(f"stop_after={stop_after}: must be one number, the request has no branches")
            stop_after = max(stop_after)
        end_known, end_reason = max_known, LENGTH
        if stop_after is not None and num_prompt + stop_after <= max_known:
            end_known, end_reason = num_prompt + stop_after, STOP
        if end_known <= num_prompt:
            raise RejectedError(f"{end_known - num_prompt} output tokens requested: must be >= 1")
        return end_known, end_reason, max_known

    def check_resident(self, num_tokens: int) -> None:
        """Raises RejectedError if a sequence of num_tokens tokens does not fit even into an empty cache."""
        if num_tokens > self._room:
            raise RejectedError(
                f"a sequence of {num_tokens} tokens: the KV cache holds at most {self._room} per sequence"
            )

    def _reject_prompt(self, num_prompt: int, room: int) -> None:
        if num_prompt < 1:
            raise RejectedError("an empty prompt")
        if num_prompt >= self._max_model_len:
            raise RejectedError(f"prompt of {num_prompt} tokens: max_model_len is {self._max_model_len}")
        if num_prompt > room:
            also = "" if room == self._room else " in addition to its adapter"
            raise RejectedError(
                f"prompt of {num_prompt} tokens: the KV cache holds at most {max(room, 0)} per sequence{also}"
            )

    def _check_branching(self, branching: Branching, stop_after: StopAfter) -> None:
        width, every = branching
        if width < 1 or (every is not None and every < 1):
            raise RejectedError(f"branching.width={width}, branching.every={every}: must be >= 1")
        if not self._pool.can_fork:
            raise RejectedError(
                f"{width} branches: this cache cannot share KV between them; "
                "choose caching=paged, prefix or radix"
            )
        if width > self._max_num_seqs:
            raise RejectedError(f"{width} branches: max_num_seqs is {self._max_num_seqs}")
        if isinstance(stop_after, tuple) and (len(stop_after) != width or min(stop_after) < 1):
            raise ValueError(f"stop_after={stop_after}: must be {width} numbers >= 1, one per branch")

    def _room_for(self, branching: Branching, num_prompt: int, room: int) -> int:
        """Computes the known tokens per branch that fit if a sequence is alone and shares only its prompt."""
        pool = self._pool
        num_blocks = room // pool.block_size
        if not pool.shares_branches:
            return num_blocks // branching.width * pool.block_size + 1
        num_full, num_partial = divmod(num_prompt, pool.block_size)
        num_blocks_each = (num_blocks - num_full) // branching.width
        return num_prompt + max(0, num_blocks_each * pool.block_size - num_partial) + 1
