"""One step as data: what the policies decided, what came of it, and what the core made of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from policies.core.request import Request
from policies.core.sequence import Sequence

FOREVER = 2**62  # a horizon without a bound of its own


class Cause(IntEnum):
    """Why the first of the waiting was not admitted, and with it all behind it."""

    iteration = 0  # it came while an iteration was under way: nobody has looked at it yet
    slot = 1  # every slot is taken
    budget = 2  # the step's token budget is spent
    memory = 3  # its KV finds no room
    policy = 4  # the policies do not want it yet
    adapter = 5  # its LoRA adapter finds no slot, or it is not that one's turn


class Migrant(NamedTuple):
    """A sequence between two engines: what it had when it left the first."""

    request: Request
    num_known: int
    num_computed: int
    blocks: tuple[int, ...] = ()  # where its KV lies on the first one's GPU; see Transfer


Content = tuple[int, int]
"""What a KV block holds, as (whose, which block of it).

whose >= 0: a place of policies/caching/content.py, shared by all sequences with these contents. Else: request
-1 - whose, and what it had stored when it was swapped out, or when it left another engine.
"""


class Transfer(NamedTuple):
    """KV of num_tokens tokens to be copied between "gpu", "host", "disk", and "remote", another engine's GPU.

    "mirror": a copy of another engine's KV that was made in case it would crash.

    seq: waits for it, in state loading, until `EngineCore.loaded`. None: a store; the blocks on the GPU that
    it reads are used again by the very step before which it was asked for.

    An engine with `names_blocks` also says what lies where, for those who have bytes to copy:

        source -> target   blocks: on the GPU          contents: one for each block, in this order
        gpu -> host        which are read              what they hold; whole blocks, the last may be part full
        gpu -> disk        (the same)
        host -> gpu        which are written           what is wanted in them
        disk -> gpu, remote -> gpu  (the same)
        host -> disk       ()                          what is copied
        host -> nowhere    ()                          what host memory need not keep any more
        disk -> nowhere    ()                          (the same)

    All of one `take_transfers` come before the step of its plan and take effect in their order: what is given
    up, what is read from the GPU, what is written to it, what was kept for these writes only. So all reads of
    the GPU may be made before all writes. Copies leave what they read where it was: contents stay until a
    transfer to "nowhere", those of a sequence that was swapped out until it is loaded again or aborted. No
    tier then holds more than its size, but for what the writes of the same list still read.
    A load may take longer than the step; one whose sequence was aborted meanwhile has to be over before the
    next step, which may use its blocks.
    """

    seq: Sequence | None
    source: str
    target: str
    num_tokens: int
    blocks: tuple[int, ...] = ()
    contents: tuple[Content, ...] = ()


class AdapterLoad(NamedTuple):
    """A LoRA adapter to be brought to the GPU, until `EngineCore.adapter_loaded`.

    Nobody waits for what the step before which it was asked for, or a later one, does with the slot's old
    adapter: it may be overwritten in the device's order.
    """

    name: str
    source: str  # "host" or "disk", as a Transfer's
    num_bytes: float  # over all devices
    slot: int | None = None  # of policies that have slots
    merges: bool = False  # into the weights, in place of the one that is there


class Chunk(NamedTuple):
    """A run of one sequence's uncomputed tokens, computed in one iteration.

        0             num_cached        num_cached + num_tokens     known
        |--- in KV ---|--- this chunk ---|--- later chunks ----------|

    completes: no later chunk remains, so the iteration also produces a token.
    """

    seq: Sequence
    num_cached: int
    num_tokens: int
    completes: bool


class AdapterUse(NamedTuple):
    """What one iteration computes with LoRA adapters; ranks as the kernels pad them."""

    num_adapters: int  # different ones
    num_tokens: int  # that go through one
    num_rank_tokens: int  # sum over those tokens of their adapter's rank
    num_ranks: int  # sum over the different adapters of their ranks


class StepPlan:
    """What one iteration computes, and for how many iterations it would be planned again.

    Valid until it is committed: `decodes` and what derives from it read the engine's live state.
    """

    __slots__ = (
        "adapter_puts",
        "adapters",
        "admitted",
        "branched",
        "chunks",
        "decoding",
        "horizon",
        "idle",
        "index",
        "num_branches",
        "num_copied_tokens",
        "num_decode_context_tokens",
        "num_decodes",
        "num_widening",
        "preempted",
        "until_s",
        "waits_for",
    )

    def __init__(
        self,
        index: int,
        num_decodes: int,
        num_decode_context_tokens: int,
        num_widening: int,
        decoding: Iterable[Sequence],
        horizon: int,
        until_s: float,
        chunks: SequenceOf[Chunk] = (),
        admitted: SequenceOf[Sequence] = (),
        preempted: SequenceOf[Sequence] = (),
        idle: SequenceOf[Sequence] = (),
        waits_for: Cause | None = None,
    ) -> None:
        self.index = index  # iterations that this core committed before this one
        self.num_decodes = num_decodes  # sequences that decode one token; of one with branches, each branch
        self.num_decode_context_tokens = num_decode_context_tokens  # that they attend to, new ones included
        self.num_widening = num_widening  # tokens by which that grows from one iteration to the next
        self.decoding = decoding  # all sequences that could decode ...
        self.idle = idle  # ... and those of them that do not in this step
        self.horizon = horizon  # >= 1: iterations for which it holds if nothing comes from outside ...
        self.until_s = until_s  # ... and which start before this time
        self.chunks = chunks
        self.admitted = admitted  # got a slot, in order; each has a chunk, or waits for a transfer
        self.preempted = preempted  # lost slot and KV in this step, in order
        self.waits_for = waits_for  # why the first of the waiting has to wait; None: nothing waits
        self.branched: SequenceOf[Sequence] = ()  # sequences that decode with branches; not in `decoding`
        self.num_branches = 0  # of those, together
        self.num_copied_tokens = 0  # whose KV copy-on-write copies before the step; see `BranchSet.copies`
        self.adapters: AdapterUse | None = None  # what is computed with LoRA adapters; None: nothing
        self.adapter_puts: tuple[tuple[str, int | None], ...] = ()  # asked for since the last plan, and slots

    @property
    def decodes(self) -> list[Sequence]:
        """The sequences that decode one token, by request id."""
        idle = set(self.idle)
        decodes = [seq for seq in self.decoding if seq not in idle]
        return sorted([*decodes, *self.branched], key=lambda seq: seq.request_id)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in one iteration."""
        num_tokens = self.num_decodes
        for chunk in self.chunks:
            num_tokens += chunk.num_tokens
        return num_tokens

    @property
    def tokens_by_request(self) -> dict[int, int]:
        """Tokens computed in one iteration by request id: decodes first, then chunks."""
        decodes = {seq.request_id: seq.width for seq in self.decodes}
        return decodes | {chunk.seq.request_id: chunk.num_tokens for chunk in self.chunks}

    @property
    def num_sampled(self) -> int:
        """Sequences that get a new token: decodes, and chunks that complete their prefill."""
        num_sampled = self.num_decodes
        for chunk in self.chunks:
            num_sampled += chunk.completes
        return num_sampled

    def digest(self) -> str:
        """A hash of the decision: equal plans, equal digests, in whatever world they were made.

        Physical block ids and the horizon are not part of it: ids are names, and a leap is the same
        decision several times.
        """
        decision: tuple[object, ...] = (
            [(s.request_id, s.num_computed) for s in self.decodes],
            [(c.seq.request_id, c.num_cached, c.num_tokens, c.completes) for c in self.chunks],
            [s.request_id for s in self.admitted],
            [s.request_id for s in self.preempted],
        )
        if self.adapter_puts:
            decision += (self.adapter_puts,)
        return blake2b(repr(decision).encode(), digest_size=16).hexdigest()


class StepOutcome(NamedTuple):
    """What the world did with a plan.

    iterations: how often it was run, 1 to plan.horizon. ended: sequences that ended with the last iteration
    for reasons the core cannot know, such as an end-of-sequence token. parents: by request id, of sequences
    with branches that have got tokens: for each branch that goes on the old one that it continues; none of
    those that are not named have changed.
    """

    iterations: int = 1
    ended: tuple[Sequence, ...] = ()
    parents: Mapping[int, tuple[int, ...]] = MappingProxyType({})


Progress = tuple[list[Sequence], list[Sequence]]
"""What a commit changed: sequences that completed their prefill and got a token, and those that ended."""
