"""One step as data: the plan of the policies, the outcome of its run, and the result of the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from policies.core.request import Request
from policies.core.sequence import Sequence

FOREVER = 2**62  # the horizon of a plan without a limit


class Cause(IntEnum):
    """Reason why the first waiting sequence was not admitted, nor any after it."""

    iteration = 0  # it arrived during an iteration, so no step has considered it yet
    slot = 1  # no slot is free
    budget = 2  # the step's token budget is used up
    memory = 3  # there is no room for its KV
    policy = 4  # the policies delay it
    adapter = 5  # there is no slot for its LoRA adapter, or another adapter is served first


class Migrant(NamedTuple):
    """A sequence that moves to another engine, in its state when it left the first one."""

    request: Request
    num_known: int
    num_computed: int
    blocks: tuple[int, ...] = ()  # blocks of its KV on the first engine's GPU; see Transfer


Content = tuple[int, int]
"""Content of a KV block, as (owner, number of the block).

owner >= 0: a place of policies/caching/content.py, shared by all sequences with this content. owner < 0: the
KV of request -1 - owner, which was swapped out or comes from another engine.
"""


class Transfer(NamedTuple):
    """A copy of the KV of num_tokens tokens from a source to a target.

    source, target: "gpu", "host", "disk", "remote" (the GPU of another engine), "live" (another engine that
    continues to decode the sequence), "mirror" (a copy of another engine's KV for crash recovery) or, as
    target, "nowhere".
    seq: the sequence that waits for the transfer, in state loading, until `EngineCore.loaded`. None: a store;
    the next step reuses the GPU blocks that it reads.

    An engine with `names_blocks` also sets blocks and contents, for an executor that copies bytes:

        source -> target   blocks on the GPU           contents: one for each block, in this order
        gpu -> host        blocks to read              their contents; the last block may be partly filled
        gpu -> disk        (the same)
        host -> gpu        blocks to write             the contents to write into them
        disk -> gpu, remote -> gpu  (the same)
        host -> disk       ()                          contents to copy
        host -> nowhere    ()                          contents that host memory may drop
        disk -> nowhere    ()                          (the same)

    All transfers of one `take_transfers` precede the step of its plan and take effect in their order: first
    drops of contents, then reads of the GPU, then writes to it, then drops of contents that were kept only
    for these writes. All reads of the GPU may therefore precede all writes. A copy does not change its
    source: contents remain until a transfer to "nowhere"; contents of a swapped-out sequence remain until it
    is loaded again or aborted. With these rules no tier holds more than its size, except for contents that
    writes of the same list read. A load may take longer than the step; if its sequence is aborted, the load
    must finish before the next step, which may use its blocks.
    """

    seq: Sequence | None
    source: str
    target: str
    num_tokens: int
    blocks: tuple[int, ...] = ()
    contents: tuple[Content, ...] = ()


class AdapterLoad(NamedTuple):
    """A LoRA adapter to load to the GPU; it is usable after `EngineCore.adapter_loaded`.

    From the next step on, the slot's previous adapter is unused, so a copy queued on the device may overwrite
    it.
    """

    name: str
    source: str  # "host" or "disk", as in Transfer
    num_bytes: float  # over all devices
    slot: int | None = None  # for policies that have slots
    merges: bool = False  # it is merged into the weights, in place of the currently merged adapter


class Chunk(NamedTuple):
    """A run of one sequence's uncomputed tokens, computed in one iteration.

        0             num_cached        num_cached + num_tokens     known
        |--- in KV ---|--- this chunk ---|--- later chunks ----------|

    completes: it is the last chunk of the prefill, so the iteration also produces a token.
    """

    seq: Sequence
    num_cached: int
    num_tokens: int
    completes: bool


NEW_CHUNK: Final[Callable[..., Chunk]] = partial(tuple.__new__, Chunk)
"""Returns a chunk from its fields as one tuple, without running Python code."""


class RankWork(NamedTuple):
    """The work of one rank of data-parallel attention in the first iteration of a plan."""

    num_decodes: int
    num_decode_context_tokens: int
    num_widening: int  # growth of num_decode_context_tokens per iteration
    chunks: SequenceOf[Chunk]
    num_draft_tokens: int = 0
    num_draft_pairs: int = 0  # query-key pairs of the draft tokens


class AdapterUse(NamedTuple):
    """The LoRA computation of one iteration; ranks are padded as in the kernels."""

    num_adapters: int  # distinct adapters
    num_tokens: int  # tokens that use an adapter
    num_rank_tokens: int  # sum of the adapter's rank over these tokens
    num_ranks: int  # sum of the rank over the distinct adapters


class Drafts(Protocol):
    """The draft tokens of a plan; see `policies.speculation.engine.drafts`."""

    @property
    def num_tokens(self) -> int:
        """Number of draft tokens that one iteration verifies."""
        ...

    def by_request(self) -> dict[int, int]:
        """Returns the number of draft tokens by request id, for requests with draft tokens."""
        ...

    def decision(self) -> object:
        """Returns what the policies have decided about drafts, for digests."""
        ...

    def decoded_after(self, num_iterations: int) -> Iterable[tuple[Sequence, int]]:
        """Returns the tokens of each sequence after iterations whose drafts have been verified."""
        ...


class StepPlan:
    """The computation of one iteration, and the number of iterations for which it may be repeated.

    A plan is valid until it is committed: `decodes` and the properties based on it read the engine's state.
    """

    __slots__ = (
        "adapter_puts",
        "adapters",
        "admitted",
        "branched",
        "chunks",
        "decoding",
        "drafts",
        "horizon",
        "idle",
        "index",
        "is_unasked",
        "num_branches",
        "num_copied_tokens",
        "num_decode_context_tokens",
        "num_decodes",
        "num_widening",
        "preempted",
        "ranks",
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
        self.index = index  # iterations that this core had committed before this plan
        self.num_decodes = num_decodes  # sequences that decode one token; each branch counts
        self.num_decode_context_tokens = num_decode_context_tokens  # tokens attended to, with new ones
        self.num_widening = num_widening  # growth of num_decode_context_tokens per iteration
        self.decoding = decoding  # all sequences that could decode
        self.idle = idle  # sequences of `decoding` that do not decode in this step
        self.horizon = horizon  # >= 1: iterations for which it holds if no event occurs
        self.until_s = until_s  # repeated iterations must start before this time
        self.chunks = chunks
        self.admitted = admitted  # sequences that got a slot, in order; they have a chunk or wait for a load
        self.preempted = preempted  # sequences that lost slot and KV in this step, in order
        self.waits_for = waits_for  # reason why the first waiting sequence waits; None: none is waiting
        self.branched: SequenceOf[Sequence] = ()  # sequences that decode with branches; not in `decoding`
        self.num_branches = 0  # branches of these sequences
        self.num_copied_tokens = 0  # tokens that copy-on-write copies before the step; see `BranchSet.copies`
        self.adapters: AdapterUse | None = None  # computation with LoRA adapters, if any
        self.adapter_puts: tuple[tuple[str, int | None], ...] = ()  # new loads: name, slot
        self.is_unasked = False  # all sequences decode, none waits, and no policy was called
        self.drafts: Drafts | None = None  # draft tokens that the step verifies; None: no speculation
        self.ranks: SequenceOf[
            RankWork
        ] = ()  # work of each rank of data-parallel attention, if there are several

    @property
    def decodes(self) -> list[Sequence]:
        """The sequences that decode, by request id."""
        idle = set(self.idle)
        decodes = [seq for seq in self.decoding if seq not in idle]
        return sorted([*decodes, *self.branched], key=lambda seq: seq.request_id)

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in one iteration."""
        num_tokens = self.num_decodes if self.drafts is None else self.num_decodes + self.drafts.num_tokens
        for chunk in self.chunks:
            num_tokens += chunk.num_tokens
        return num_tokens

    @property
    def tokens_by_request(self) -> dict[int, int]:
        """Number of tokens computed in one iteration, by request id: decodes first, then chunks."""
        decodes = {seq.request_id: seq.width for seq in self.decodes}
        num_tokens = decodes | {chunk.seq.request_id: chunk.num_tokens for chunk in self.chunks}
        if self.drafts is not None:
            for request_id, num_drafts in self.drafts.by_request().items():
                num_tokens[request_id] += num_drafts
        return num_tokens

    @property
    def num_sampled(self) -> int:
        """Number of sequences that get new tokens: decodes, and chunks that complete their prefill."""
        num_sampled = self.num_decodes
        for chunk in self.chunks:
            num_sampled += chunk.completes
        return num_sampled

    def decoded_after(self, num_iterations: int) -> Iterable[tuple[Sequence, int]]:
        """Returns the tokens of each decoding sequence after num_iterations of the running plan."""
        if self.drafts is not None:
            return self.drafts.decoded_after(num_iterations)
        return ((seq, num_iterations) for seq in self.decodes)

    def digest(self) -> str:
        """Computes a hash of the decision, which is equal for equal decisions in simulator and real engine.

        Physical block ids and the horizon are not part of it: block ids are arbitrary, and a plan of several
        iterations is the same decision several times.
        """
        decision: tuple[object, ...] = (
            [(s.request_id, s.num_computed) for s in self.decodes],
            [(c.seq.request_id, c.num_cached, c.num_tokens, c.completes) for c in self.chunks],
            [s.request_id for s in self.admitted],
            [s.request_id for s in self.preempted],
        )
        if self.adapter_puts:
            decision += (self.adapter_puts,)
        if self.drafts is not None:
            decision += (self.drafts.decision(),)
        return blake2b(repr(decision).encode(), digest_size=16).hexdigest()


class StepOutcome(NamedTuple):
    """The outcome of running a plan.

    iterations: number of times that it was run, 1 to plan.horizon. ended: sequences that ended with the last
    iteration for reasons unknown to the core, such as an end-of-sequence token. parents: for sequences with
    branches that got tokens, by request id: for each new branch, the old branch that it continues. For
    sequences not in it, each branch continues itself. accepted: for a plan with drafts, the accepted draft
    tokens [iterations, sequences of plan.drafts]. proposed: draft tokens that the proposer found for the next
    pass of each of plan.drafts.next_seqs; None: the requested number.
    """

    iterations: int = 1
    ended: tuple[Sequence, ...] = ()
    parents: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    accepted: Any = None
    proposed: Any = None


Progress = tuple[list[Sequence], list[Sequence]]
"""Result of a commit: sequences that completed their prefill and got a token, and sequences that ended."""
