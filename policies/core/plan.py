"""One step as data: the plan of the policies, the outcome of its run, and what the core made of that."""

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
    """Why the first waiting sequence was not admitted, and with it all sequences behind it."""

    iteration = 0  # it arrived during an iteration: no step has considered it yet
    slot = 1  # every slot is taken
    budget = 2  # the step's token budget is spent
    memory = 3  # its KV finds no room
    policy = 4  # the policies do not want it yet
    adapter = 5  # its LoRA adapter finds no slot, or another adapter is served first


class Migrant(NamedTuple):
    """A sequence between two engines, as it was when it left the first one."""

    request: Request
    num_known: int
    num_computed: int
    blocks: tuple[int, ...] = ()  # blocks of its KV on the first engine's GPU; see Transfer


Content = tuple[int, int]
"""Content of a KV block, as (owner, number of the block).

owner >= 0: a node of policies/caching/content.py, shared by all sequences with these contents. owner < 0: the
KV of request -1 - owner, stored when it was swapped out or when it left another engine.
"""


class Transfer(NamedTuple):
    """KV of num_tokens tokens to be copied between "gpu", "host", "disk", and "remote", another engine's GPU.

    "mirror": a copy of another engine's KV that was made for the case of a crash.

    seq: the sequence that waits for the transfer, in state loading, until `EngineCore.loaded`. None: a store;
    the GPU blocks that it reads are reused by the very step before which it was asked for.

    An engine with `names_blocks` also names blocks and contents, for an executor that has bytes to copy:

        source -> target   blocks: on the GPU          contents: one for each block, in this order
        gpu -> host        blocks that are read        their contents; whole blocks, the last may be part full
        gpu -> disk        (the same)
        host -> gpu        blocks that are written     the contents wanted in them
        disk -> gpu, remote -> gpu  (the same)
        host -> disk       ()                          contents that are copied
        host -> nowhere    ()                          contents that host memory need not keep any more
        disk -> nowhere    ()                          (the same)

    All transfers of one `take_transfers` come before the step of its plan and take effect in their order:
    first contents that are dropped, then reads of the GPU, then writes to it, then drops of contents that
    were kept only for these writes. So all reads of the GPU may be made before all writes. A copy leaves its
    source in place: contents stay until a transfer to "nowhere", those of a swapped-out sequence until it
    is loaded again or aborted. No tier then holds more than its size, except for what the writes of the same
    list still read. A load may take longer than the step; the load of a sequence that was aborted meanwhile
    has to be over before the next step, which may use its blocks.
    """

    seq: Sequence | None
    source: str
    target: str
    num_tokens: int
    blocks: tuple[int, ...] = ()
    contents: tuple[Content, ...] = ()


class AdapterLoad(NamedTuple):
    """A LoRA adapter to be loaded to the GPU; it is usable from `EngineCore.adapter_loaded` on.

    The step before which it was asked for, and all later ones, do not use the adapter that the slot held.
    So that adapter may be overwritten in the order of the device's work.
    """

    name: str
    source: str  # "host" or "disk", as in Transfer
    num_bytes: float  # over all devices
    slot: int | None = None  # for policies that have slots
    merges: bool = False  # into the weights, in place of the adapter that is merged now


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
    """The LoRA computation of one iteration; ranks are those to which the kernels pad them."""

    num_adapters: int  # distinct adapters
    num_tokens: int  # tokens that use an adapter
    num_rank_tokens: int  # sum over those tokens of their adapter's rank
    num_ranks: int  # sum over the distinct adapters of their ranks


class StepPlan:
    """The computation of one iteration, and for how many iterations the policies would decide the same.

    A plan is valid until it is committed: `decodes` and what derives from it read the engine's live state.
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
        self.num_decodes = num_decodes  # sequences that decode one token; each branch counts
        self.num_decode_context_tokens = num_decode_context_tokens  # attended by them, new tokens included
        self.num_widening = num_widening  # tokens by which that grows per iteration
        self.decoding = decoding  # all sequences that could decode ...
        self.idle = idle  # ... and those of them that do not in this step
        self.horizon = horizon  # >= 1: iterations for which it holds without outside events ...
        self.until_s = until_s  # ... and which start before this time
        self.chunks = chunks
        self.admitted = admitted  # got a slot, in order; each has a chunk, or waits for a transfer
        self.preempted = preempted  # lost slot and KV in this step, in order
        self.waits_for = waits_for  # why the first waiting sequence has to wait; None: nothing waits
        self.branched: SequenceOf[Sequence] = ()  # sequences that decode with branches; not in `decoding`
        self.num_branches = 0  # number of their branches
        self.num_copied_tokens = 0  # tokens that copy-on-write copies before the step; see `BranchSet.copies`
        self.adapters: AdapterUse | None = None  # computation with LoRA adapters; None: none
        self.adapter_puts: tuple[tuple[str, int | None], ...] = ()  # new loads: name, slot

    @property
    def decodes(self) -> list[Sequence]:
        """The sequences that decode, by request id."""
        idle = set(self.idle)
        decodes = [seq for seq in self.decoding if seq not in idle]
        return sorted([*decodes, *self.branched], key=lambda seq: seq.request_id)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in one iteration."""
        num_tokens = self.num_decodes
        for chunk in self.chunks:
            num_tokens += chunk.num_tokens
        return num_tokens

    @property
    def tokens_by_request(self) -> dict[int, int]:
        """Number of tokens computed in one iteration, by request id: decodes first, then chunks."""
        decodes = {seq.request_id: seq.width for seq in self.decodes}
        return decodes | {chunk.seq.request_id: chunk.num_tokens for chunk in self.chunks}

    @property
    def num_sampled(self) -> int:
        """Number of sequences that get a new token: decodes, and chunks that complete their prefill."""
        num_sampled = self.num_decodes
        for chunk in self.chunks:
            num_sampled += chunk.completes
        return num_sampled

    def digest(self) -> str:
        """A hash of the decision.

        Equal decisions have equal digests, in the simulator and in the real engine.
        Physical block ids and the horizon are not part of it: block ids are arbitrary names, and a plan of
        several iterations is the same decision several times.
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
    """The result of running a plan.

    iterations: how often it was run, 1 to plan.horizon. ended: sequences that ended with the last iteration
    for reasons the core cannot know, such as an end-of-sequence token. parents: for sequences with branches
    that got tokens, by request id: for each branch that goes on, the old branch that it continues. The
    branches of sequences that are not in it all go on unchanged.
    """

    iterations: int = 1
    ended: tuple[Sequence, ...] = ()
    parents: Mapping[int, tuple[int, ...]] = MappingProxyType({})


Progress = tuple[list[Sequence], list[Sequence]]
"""Result of a commit: sequences that completed their prefill and got a token, and sequences that ended."""
