"""A second, naive implementation of an engine and of its loop, with which the simulator is compared.

It follows the rules of vLLM's scheduler without shortcuts: lists and dictionaries, one iteration and one
block at a time, every number counted again where it is needed. It has no code in common with the simulator
but the shape of an iteration. Not here: branches, adapters, drafts, other tiers of memory, several replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from hwmodels.iterations import IterationShape

if TYPE_CHECKING:
    from experiments.conformance.worlds import Ask, World

COMMIT, ABORT, ARRIVE, PLAN = range(4)  # the order of events at equal times
NO_LIMIT = 10**9


@dataclass(eq=False)
class Block:
    """A KV block: how many sequences own it, and its content, a number for all tokens up to its end."""

    owners: int = 0
    content: int | None = None


@dataclass(eq=False)
class Seq:
    """A request: its known tokens, how many of them are computed, and its blocks."""

    id: int
    ask: Ask
    rank: tuple[float, ...]
    tokens: list[Hashable]
    end: int  # known tokens at which it ends
    limit: int  # known tokens at which it would end at the latest
    computed: int = 0
    blocks: list[Block] = field(default_factory=list)
    is_prefilling: bool = True
    is_unread: bool = False  # an asynchronous engine has not read its newest token, of the step before
    is_complete: bool = False

    @property
    def is_decoding(self) -> bool:
        """True if a step may give it a token; one that has ended below its limit gets a token too many."""
        return not self.is_prefilling and not (self.is_complete and len(self.tokens) >= self.limit)


class Memory:
    """The KV blocks of an engine, and the contents that a prefix cache finds again."""

    def __init__(self, num_blocks: int, block_size: int, caches: bool) -> None:
        self.size, self.caches = block_size, caches
        self.empty = [Block() for _ in range(num_blocks)]  # free, without content
        self.kept: list[Block] = []  # free, with content; the block that became free first is evicted first
        self.found: dict[int, list[Block]] = {}  # content -> the blocks with it, the oldest first
        self.contents: dict[Hashable, int] = {}  # (content of the block before, tokens) -> content
        self.num_evicted = 0

    def num_lacking(self, seq: Seq, num_tokens: int) -> int:
        """Counts the blocks that a sequence needs for its first num_tokens tokens and that are not free."""
        return -(-num_tokens // self.size) - len(seq.blocks) - len(self.empty) - len(self.kept)

    def contents_of(self, seq: Seq, num_tokens: int) -> list[int]:
        """Returns the contents of the full blocks of a sequence's first num_tokens tokens."""
        found: list[int] = []
        for first in range(0, num_tokens // self.size * self.size if self.caches else 0, self.size):
            key = (found[-1] if found else None, *seq.tokens[first : first + self.size])
            found.append(self.contents.setdefault(key, len(self.contents)))
        return found

    def lookup(self, seq: Seq) -> list[Block]:
        """Returns the blocks with the first tokens of a sequence; one token at least is left to compute."""
        contents = self.contents_of(seq, len(seq.tokens) - 1)
        return [self.found[content][0] for content in takewhile(self.found.__contains__, contents)]

    def grow(self, seq: Seq, num_tokens: int) -> None:
        """Gives a sequence the blocks of its first num_tokens tokens."""
        while len(seq.blocks) * self.size < num_tokens:
            block = self.empty.pop() if self.empty else self.kept.pop(0)
            self.num_evicted += block.content is not None
            self.forget(block)
            block.owners = 1
            seq.blocks.append(block)

    def offer(self, seq: Seq, num_tokens: int) -> None:
        """Lets lookups find the full blocks of a sequence's first num_tokens tokens."""
        for block, content in zip(seq.blocks, self.contents_of(seq, num_tokens), strict=False):
            if block.content is None:
                block.content = content
                self.found.setdefault(content, []).append(block)

    def forget(self, block: Block) -> None:
        if block.content is not None:
            self.found[block.content].remove(block)
            if not self.found[block.content]:
                del self.found[block.content]
        block.content = None

    def release(self, seq: Seq) -> None:
        """Frees the blocks of a sequence, the last first; those that it has not computed have no content."""
        while seq.blocks:
            if len(seq.blocks) * self.size > seq.computed:
                self.forget(seq.blocks[-1])
            block = seq.blocks.pop()
            block.owners -= 1
            if not block.owners:
                (self.empty if block.content is None else self.kept).append(block)


class Engine:
    """Waiting and running sequences, and the step that is built or runs."""

    def __init__(self, world: World, by_priority: bool) -> None:
        self.world, self.by_priority, self.rules = world, by_priority, world.batching
        self.is_async = world.plans_ahead
        self.budget = self.rules.max_num_scheduled_tokens or self.rules.max_num_batched_tokens
        self.memory = Memory(world.num_blocks, world.caching.block_size, world.caching.finds_prefixes)
        self.waiting: list[Seq] = []
        self.running: list[Seq] = []  # in the order of admission
        self.plan: dict[Seq, int] = {}  # tokens of each sequence in the step
        self.admitted: list[Seq] = []
        self.preempted: list[Seq] = []
        self.lost: list[Seq] = []  # preempted by steps that computed nothing
        self.has_preempted = False

    def sequence(self, number: int, arrival_s: float, ask: Ask) -> Seq:
        """Returns the sequence of a request; without an output token, it can never be served."""
        num_prompt, world = ask.num_prompt_tokens, self.world
        limit = min(world.max_model_len, world.num_blocks * self.memory.size + 1)
        if ask.max_tokens is not None:
            limit = min(limit, num_prompt + ask.max_tokens)
        tokens: list[Hashable] = []
        for content_id, num_tokens in ask.contents:
            tokens += [(content_id, len(tokens), index) for index in range(num_tokens)]
        tokens = tokens[:num_prompt] + [("own", number, index) for index in range(len(tokens), num_prompt)]
        rank = (ask.priority if self.by_priority else 0, arrival_s, number)
        return Seq(number, ask, rank, tokens, min(limit, num_prompt + ask.num_output_tokens), limit)

    def longest_chunk(self) -> int:
        """Returns the maximum number of tokens of one prompt in this step."""
        rules, num_requests = self.rules, len(self.running) + len(self.waiting)
        if not rules.long_prefill_token_threshold or num_requests < 2:
            return NO_LIMIT
        share = rules.max_num_batched_tokens // num_requests * rules.long_prefill_token_threshold_adaptive
        return int(max(rules.long_prefill_token_threshold, share))

    def fill(self) -> None:
        """Builds a step: running sequences, in the order of admission, then waiting ones by rank."""
        self.plan, self.admitted, self.preempted, self.has_preempted = {}, [], [], False
        longest = self.longest_chunk()
        for seq in self.running[:]:
            if seq in self.running and (seq.is_prefilling or seq.is_decoding):
                wanted = min(len(seq.tokens) - seq.computed, longest) if seq.is_prefilling else 1
                num_tokens = min(wanted, self.budget - sum(self.plan.values()))
                if num_tokens < 1 or not self.make_room(seq, seq.computed + num_tokens):
                    return
                self.give(seq, num_tokens)
        for seq in sorted(self.waiting, key=lambda seq: seq.rank):
            if self.has_preempted or not self.admit(seq, longest):
                return

    def make_room(self, seq: Seq, num_tokens: int) -> bool:
        """Preempts those of largest rank until a sequence has room; false if it is preempted itself."""
        while self.memory.num_lacking(seq, num_tokens) > 0:
            victim = max(self.running, key=lambda other: other.rank)
            self.plan.pop(victim, None)
            self.leave(victim)
            self.has_preempted = True
            if not victim.is_complete:
                self.preempted.append(victim)
                self.waiting.append(victim)
            if victim is seq:
                return False
        return True

    def admit(self, seq: Seq, longest: int) -> bool:
        """Starts a waiting sequence, if the step has tokens and the engine a slot and memory for it."""
        rules, memory, world = self.rules, self.memory, self.world
        hit = memory.lookup(seq)
        num_cached, num_known = len(hit) * memory.size, len(seq.tokens)
        wanted = min(num_known - num_cached, longest)
        num_tokens = min(wanted, self.budget - sum(self.plan.values()))
        may_cut = rules.enable_chunked_prefill or num_known > self.budget
        is_full = len(self.running) >= min(world.max_num_seqs, rules.max_num_active_seqs or NO_LIMIT)
        if is_full or num_tokens < 1 or (num_tokens < wanted and not may_cut):
            return False
        num_reserved = num_known if rules.scheduler_reserve_full_isl else num_cached + num_tokens
        num_lacking = memory.num_lacking(seq, num_reserved) - sum(block.owners > 0 for block in hit)
        if num_lacking + (int(world.caching.watermark * world.num_blocks) if self.running else 0) > 0:
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        self.admitted.append(seq)
        for block in hit:
            if not block.owners:
                memory.kept.remove(block)
            block.owners += 1
        seq.blocks = hit
        seq.computed, seq.is_prefilling = num_cached, True
        self.give(seq, num_tokens)
        return True

    def give(self, seq: Seq, num_tokens: int) -> None:
        self.plan[seq] = num_tokens
        self.memory.grow(seq, seq.computed + num_tokens)
        self.memory.offer(seq, min(seq.computed + num_tokens, len(seq.tokens) - seq.is_unread))

    def leave(self, seq: Seq) -> None:
        (self.running if seq in self.running else self.waiting).remove(seq)
        self.memory.release(seq)
        seq.computed = 0

    def read(self) -> bool:
        """Reads the tokens of the step before; frees what has ended with it, and returns whether any has."""
        for seq in [*self.running, *self.waiting]:
            seq.is_unread = False
        complete = [seq for seq in self.running if seq.is_complete]
        for seq in complete:
            self.plan.pop(seq, None)  # its token is surplus
            seq.computed = len(seq.tokens) - 1
            self.memory.offer(seq, seq.computed)
            self.leave(seq)
        return bool(complete)

    def schedule(self) -> bool:
        """Plans the next step; returns whether there is anything to compute."""
        for seq in self.running:
            if not seq.is_unread:
                self.memory.offer(seq, seq.computed)
        if not self.waiting and not any(seq.is_prefilling or seq.is_decoding for seq in self.running):
            self.read()
        self.fill()
        while not self.plan:
            self.lost += self.preempted
            has_freed = self.read()
            # What was preempted may be admitted at once; an asynchronous engine first reads the step before.
            if (self.has_preempted or not has_freed) if self.is_async else not self.has_preempted:
                return False
            self.fill()
        self.preempted, self.lost = [*self.lost, *self.preempted], []
        return True

    def commit(self) -> list[Seq]:
        """Applies the step; returns the sequences that got a token."""
        self.read()
        got = []
        for seq in self.running:
            seq.computed += self.plan.get(seq, 0)
            if seq in self.plan and seq.computed == len(seq.tokens):
                place, answer_id = len(seq.tokens) - seq.ask.num_prompt_tokens, seq.ask.answer_id
                own = ("answer", seq.id) if answer_id is None else (answer_id, seq.ask.num_prompt_tokens)
                seq.tokens.append((*own, place))
                seq.is_prefilling, seq.is_unread = False, self.is_async
                seq.is_complete = len(seq.tokens) == seq.end
                got.append(seq)
        if not self.is_async:
            self.read()
        return got


class Loop:
    """The events of a run, and what it records."""

    def __init__(self, world: World, by_priority: bool = False) -> None:
        self.world, self.engine = world, Engine(world, by_priority)
        self.events: list[tuple[float, int, int, Callable[[], None]]] = []  # time, phase, number, action
        self.event_numbers, self.request_ids = count(), count()
        num_first = len(world.asks) if world.num_users is None else world.num_users
        self.first = sorted(world.asks[:num_first], key=lambda ask: ask.arrival_s)
        self.later = list(world.asks[num_first:])  # each is sent after the end of another
        self.pending: dict[Seq, float] = {}  # those on their way: when the engine knows them, in this order
        self.given_up: list[Seq] = []  # to be aborted when no iteration runs
        self.in_progress: list[Seq] = []
        self.step_s: float | None = None  # start of the iteration that runs
        self.now, self.is_idle = 0.0, True
        self.iterations: list[tuple[Any, ...]] = []
        self.tokens: dict[int, list[float]] = {}  # times of the tokens of each request, s
        self.ends: list[tuple[int, float, int, str]] = []  # request, time in s, output tokens, status

    def run(self) -> Loop:
        self.send_first()
        while self.events:
            self.now, _, _, act = heappop(self.events)
            act()
        return self

    def at(self, time_s: float, phase: int, action: Callable[[], None]) -> None:
        heappush(self.events, (time_s, phase, next(self.event_numbers), action))

    def send(self, ask: Ask, arrival_s: float, is_first: bool = False) -> None:
        """Lets a request arrive; its number is given now."""
        seq = self.engine.sequence(next(self.request_ids), arrival_s, ask)
        self.at(arrival_s, ARRIVE, partial(self.arrive, seq, is_first))

    def send_first(self) -> None:
        """Sends the requests that follow no other; each is read when the one before has arrived."""
        if self.first:
            ask = self.first.pop(0)
            self.send(ask, ask.arrival_s, is_first=True)

    def arrive(self, seq: Seq, is_first: bool) -> None:
        self.tokens[seq.id] = []
        self.in_progress.append(seq)
        if 0 < len(seq.tokens) < seq.end:
            known_s = self.now + self.world.frontend_s
            self.pending[seq] = known_s
            self.at(known_s, PLAN, self.plan)
            if self.world.patience_s is not None:
                self.at(self.now + self.world.patience_s, ARRIVE, partial(self.give_up, seq))
        else:
            self.end(seq, "rejected")
        if is_first:
            self.send_first()

    def give_up(self, seq: Seq) -> None:
        """Aborts a request as soon as it is in the engine and no iteration runs."""
        if seq in self.in_progress:
            self.given_up.append(seq)
            if self.pending.get(seq, -1.0) >= self.now:
                self.at(self.pending[seq], ABORT, partial(self.abort_pending, seq))
            if self.step_s is None:
                self.abort_given_up()

    def abort_pending(self, seq: Seq) -> None:
        if self.is_idle if self.engine.is_async else self.step_s is None:
            self.enter(seq)
            self.abort_given_up()

    def abort_given_up(self) -> None:
        for seq in [seq for seq in self.given_up if seq in self.in_progress and seq not in self.pending]:
            self.engine.leave(seq)
            self.end(seq, "aborted")
            self.at(self.now, PLAN, self.plan)

    def end(self, seq: Seq, status: str) -> None:
        """Notes the end of a request, after which the next user of a closed loop thinks."""
        self.in_progress.remove(seq)
        self.ends.append((seq.id, self.now, len(self.tokens[seq.id]), status))
        if self.later:
            self.send(self.later.pop(0), self.now + self.world.think_s)

    def enter(self, *seqs: Seq) -> None:
        for seq in seqs:
            del self.pending[seq]
            self.engine.waiting.append(seq)

    def boundary(self) -> None:
        # An asynchronous engine has planned the step that begins now when this one began.
        known_until_s = self.step_s if self.engine.is_async and self.step_s is not None else self.now
        self.step_s = None
        self.enter(*[seq for seq, s in self.pending.items() if s <= known_until_s and s < self.now])
        for seq in self.engine.commit():
            self.tokens[seq.id].append(self.now)
            if seq.is_complete:
                self.end(seq, "finished")
        self.abort_given_up()
        self.at(self.now, PLAN, self.plan)

    def plan(self) -> None:
        """Starts the next iteration, if none runs and there is anything to compute."""
        if self.step_s is not None:
            return
        known = [seq for seq, known_s in self.pending.items() if known_s <= self.now]
        if self.is_idle or not self.engine.is_async:
            self.enter(*(known[:1] if self.engine.is_async else known))
            self.abort_given_up()
        self.is_idle = not self.engine.schedule()
        if not self.is_idle:
            self.start()
        elif self.engine.has_preempted or any(known_s <= self.now for known_s in self.pending.values()):
            self.at(self.now, PLAN, self.plan)

    def start(self) -> None:
        """Prices the step, and schedules its end."""
        engine, now = self.engine, self.now
        decodes = {seq.id: len(seq.tokens) for seq in engine.plan if not seq.is_prefilling}
        chunks = [
            (seq.id, seq.computed, num_tokens, seq.computed + num_tokens == len(seq.tokens))
            for seq, num_tokens in engine.plan.items()
            if seq.is_prefilling
        ]
        pairs = sum(cached + token + 1 for _, cached, num, _ in chunks for token in range(num))
        num_tokens, num_context = sum(num for _, _, num, _ in chunks), sum(c + num for _, c, num, _ in chunks)
        num_sampled = len(decodes) + sum(completes for *_, completes in chunks)
        work = (len(decodes), sum(decodes.values()), len(chunks), num_tokens, pairs, num_context, num_sampled)
        end_s = float(now + self.world.model.seconds(IterationShape(*work)))
        admitted, preempted = ([seq.id for seq in seqs] for seqs in (engine.admitted, engine.preempted))
        self.iterations.append((now, end_s, decodes, chunks, admitted, preempted))
        self.step_s = now
        self.at(end_s, COMMIT, self.boundary)
