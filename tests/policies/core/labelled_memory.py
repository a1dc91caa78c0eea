"""An engine on a memory with labelled contents, so that KV is found where it is read.

A machine copies what `take_transfers` names and writes what a plan computes, block by block; it writes a
label of the token and of all tokens before it. A sequence that computes must find the labels of its own
tokens.
"""

import random
from contextlib import suppress

import numpy as np

from policies.core.limits import RejectedError
from policies.core.plan import StepOutcome
from policies.core.sequence import SequenceState

BLOCK_SIZE = 4
POISON = -1


class Labels:
    """A number for each token that follows given others."""

    def __init__(self):
        self._numbers = {}
        self._known = {}  # request -> labels so far

    def after(self, label, token):
        return self._numbers.setdefault((label, token), len(self._numbers) + 1)

    def of(self, request, num_tokens):
        """Labels of the first num_tokens tokens of a request: the prompt, then its one answer."""
        labels = self._known.setdefault(request, [])
        if len(labels) < num_tokens:
            tokens = [(content, i) for content, n in request.prompt.segments for i in range(n)]
            num_tail = request.prompt.num_tokens - len(tokens)
            tokens += [("tail", request.request_id, i) for i in range(num_tail)]
            answer = ("answer", request.request_id) if request.answer_id is None else request.answer_id
            tokens += [(answer, i) for i in range(num_tokens - len(tokens))]
            for token in tokens[len(labels) : num_tokens]:
                labels.append(self.after(labels[-1] if labels else 0, token))
        return labels[:num_tokens]


class Host:
    """Memory in places that are used again as soon as they are freed; None: no such memory."""

    def __init__(self, num_places, num_spare=0):
        self.data = np.full((num_places + num_spare, BLOCK_SIZE), POISON)
        self.place_of = {}
        self.most = num_places
        self._free = list(range(num_places + num_spare))

    def take(self, content):
        assert content not in self.place_of, "stored twice"
        self.place_of[content] = self._free.pop()
        return self.place_of[content]

    def give_up(self, content):
        self._free.append(self.place_of.pop(content))


class Machine:
    """GPU memory and the tiers below it, which hold labels."""

    def __init__(self, core, num_host_blocks=0, num_disk_blocks=0, num_swap_blocks=0):
        self.core = core
        self.gpu = np.full((core.block_pool.num_blocks + 1, BLOCK_SIZE), POISON)
        self.tiers = {
            "host": Host(num_host_blocks, core.block_pool.num_blocks),
            "disk": Host(num_disk_blocks, 99),
        }
        self.swapped = Host(num_swap_blocks)
        self.labels = Labels()
        self.branches = {}  # request id -> the labels of each branch
        self.coming = []  # (request id, blocks, what will be in them)

    def move(self, transfers):
        """Moves blocks as an engine does: chooses places in order, copies out of the GPU, then into it."""
        stores, loads = [], []
        for transfer in transfers:
            seq, source, target, num_tokens, blocks, contents = transfer
            assert len(set(contents)) == len(contents) > 0
            assert len(blocks) == (len(contents) if "gpu" in (source, target) else 0)
            assert len(contents) == -(-num_tokens // BLOCK_SIZE) or seq is None or seq.request.branching
            assert all(0 < block <= self.core.block_pool.num_blocks for block in blocks)
            memory = self._memory(source, contents) if source != "gpu" else None
            if target == "nowhere":
                for content in contents:
                    memory.give_up(content)
            elif target == "gpu":
                loads.append((seq.request_id, blocks, memory, [memory.place_of[c] for c in contents]))
            else:
                goal = self._memory(target, contents)
                places = [goal.take(content) for content in contents]
                if source == "gpu":
                    stores.append((list(blocks), goal, places))
                else:
                    goal.data[places] = memory.data[[memory.place_of[c] for c in contents]]
            self._check_sizes(transfers)
        for blocks, goal, places in stores:
            goal.data[places] = self.gpu[blocks]
        for request_id, blocks, memory, places in loads:
            self.coming.append((request_id, list(blocks), memory.data[places]))
            self.gpu[list(blocks)] = POISON
        self._check_sizes([])

    def arrive(self, coming):
        """Completes a load."""
        request_id, blocks, data = coming
        self.coming.remove(coming)
        if request_id in self.core.loading:
            self.gpu[blocks] = data

    def compute(self, plan, num_iterations=1):
        """Writes what a plan computes, then reads it back as attention does."""
        core = self.core
        pairs = core.branched.copies(plan)
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.gpu[list(targets)] = self.gpu[list(sources)]
        writes, reads = {}, []
        for seq in plan.decodes:
            if seq.request.branching is not None:
                for table, labels in zip(
                    core.branched.block_ids(seq), self.branches[seq.request_id], strict=True
                ):
                    self._write(writes, table, labels, len(labels) - 1)
                    reads.append((table, labels))
            else:
                self._serve(writes, reads, seq, seq.num_computed, num_iterations)
        for seq, num_cached, num_tokens, _ in plan.chunks:
            self._serve(writes, reads, seq, num_cached, num_tokens * num_iterations)
        for (block, place), label in writes.items():
            self.gpu[block, place] = label
        for ids, labels in reads:
            found = self.gpu[ids].reshape(-1)[: len(labels)].tolist()
            assert found == labels, "it reads what is not its own KV"

    def check_those_at_rest(self):
        """Checks that the KV of every sequence is still there, also of those that did not compute."""
        core = self.core
        for seq in core.running.values():
            if seq.request.branching is None and seq.state is not SequenceState.loading:
                ids = core.block_ids(seq, seq.num_computed)
                labels = self.labels.of(seq.request, seq.num_computed)
                assert self.gpu[ids].reshape(-1)[: len(labels)].tolist() == labels

    def branch(self, seq, parents, is_again):
        """Gives each branch of a sequence its next token.

        parents: the branch that each one continues. is_again: after a prefill of all that the branches had
        stored; the KV beyond the prompt's whole blocks is then restored directly.
        """
        request_id = seq.request_id
        prompt = self.labels.of(seq.request, seq.num_prompt_tokens)
        old = self.branches.get(request_id, [prompt] * seq.request.branching.width)
        self.branches[request_id] = [
            [*old[parent], self.labels.after(old[parent][-1], (request_id, place, len(old[parent])))]
            for place, parent in enumerate(parents)
        ]
        if is_again and parents:
            tables = self.core.branched.block_ids(seq)
            for table, labels in zip(tables, self.branches[request_id], strict=True):
                for position in range(seq.num_prompt_tokens // BLOCK_SIZE * BLOCK_SIZE, len(labels) - 1):
                    self.gpu[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = labels[position]

    def _serve(self, writes, reads, seq, first, num_tokens):
        end = first + num_tokens
        if seq.request.branching is not None:
            end = min(end, seq.num_prompt_tokens)  # how branches are computed again is not said here
        if end <= first:
            return
        labels = self.labels.of(seq.request, end)
        ids = self.core.block_ids(seq, end)
        for position in range(first, end):
            self._write(writes, ids, labels, position)
        reads.append((ids, labels))

    @staticmethod
    def _write(writes, ids, labels, position):
        block, label = ids[position // BLOCK_SIZE], labels[position]
        assert writes.setdefault((block, position % BLOCK_SIZE), label) == label, "two write into one place"

    def _memory(self, name, contents):
        if contents[0][0] < 0:
            assert name == "host"
            return self.swapped
        return self.tiers[name]

    def _check_sizes(self, transfers):
        """Checks that no memory holds more than its size, except for what a load still has to read."""
        assert len(self.swapped.place_of) <= self.swapped.most
        for name, memory in self.tiers.items():
            read, gone = (
                {c for t in transfers if (t.source, t.target) == way for c in t.contents}
                for way in ((name, "gpu"), (name, "nowhere"))
            )
            assert len(memory.place_of) <= memory.most + len(read & gone)


def branch_ends(seq):
    """Returns the output tokens at which each branch of a sequence ends."""
    return seq._branch_ends if seq.branches is None else seq.branches._ends


def draw_parents(rng, seq):
    """Draws the branches that the search keeps, or None, and the parent of each branch that goes on."""
    every = seq.request.branching.every
    ends, depth = branch_ends(seq), (0 if seq.branches is None else seq.branches.depth) + 1
    chosen = None
    if every is not None and depth % every == 0:
        chosen = tuple(rng.randrange(len(ends)) for _ in range(rng.randint(1, len(ends))))
    kept = [parent for parent in (range(len(ends)) if chosen is None else chosen) if ends[parent] > depth]
    return chosen, kept


def shown(transfers):
    """Returns what both kinds of engines report of their transfers: loads and swaps."""
    loads = [(t.seq.request_id, t.source, t.num_tokens) for t in transfers if t.seq is not None]
    swaps = [t.num_tokens for t in transfers if (t.source, t.target) == ("gpu", "host")]
    return loads, swaps


def run_core(make, requests, seed, *, num_steps=120, num_swap_blocks=0, tiers=(0, 0)):
    """Serves requests on a machine, beside an engine that names no blocks; both must decide alike.

    make: returns an engine, given names_blocks. Returns the machine.
    """
    rng = random.Random(seed)
    core, plain = make(names_blocks=True), make(names_blocks=False)
    machine = Machine(core, *tiers, num_swap_blocks)
    now, to_come = 0.0, list(requests)
    for _ in range(num_steps):
        if to_come and rng.random() < 0.4:
            request, stop_after = to_come.pop(0)
            for one in (core, plain):
                with suppress(RejectedError):
                    one.add(request, stop_after)
        if core.num_unfinished and rng.random() < 0.04:
            request_id = rng.choice([seq.request_id for seq in core.unfinished])
            core.abort(request_id)
            plain.abort(request_id)
            for coming in [coming for coming in machine.coming if coming[0] == request_id]:
                machine.coming.remove(coming)
        for coming in [coming for coming in machine.coming if rng.random() < 0.4]:
            machine.arrive(coming)
            core.loaded(coming[0])
            plain.loaded(coming[0])
        plan, other = core.plan(now), plain.plan(now)
        transfers, others = core.take_transfers(), plain.take_transfers()
        assert shown(transfers)[0] == shown(others)[0]
        machine.move(transfers)
        assert all(t.blocks == t.contents == () for t in others)
        assert (plan is None) == (other is None)
        if plan is None:
            for coming in list(machine.coming):
                machine.arrive(coming)
                core.loaded(coming[0])
                plain.loaded(coming[0])
            continue
        assert (plan.digest(), plan.horizon) == (other.digest(), other.horizon)
        num_iterations = 1
        if not plan.chunks and not plan.branched:
            num_iterations = rng.randint(1, plan.horizon)
            core.reserve(plan, num_iterations)
        machine.compute(plan, num_iterations)
        for coming in [coming for coming in machine.coming if rng.random() < 0.2]:
            machine.arrive(coming)
            core.loaded(coming[0])
            plain.loaded(coming[0])
        serving = [chunk.seq for chunk in plan.chunks if chunk.completes] + plan.decodes
        branching = [seq for seq in serving if seq.request.branching is not None]
        drawn = {seq: draw_parents(rng, seq) for seq in branching}
        was_branched = {seq for seq in branching if seq.branches is not None}
        parents = {seq.request_id: chosen for seq, (chosen, _) in drawn.items() if chosen is not None}
        ended = [seq for seq in plan.decodes if seq.request.branching is None and rng.random() < 0.03]
        outcome = StepOutcome(num_iterations, tuple(ended), parents)
        core.commit(plan, outcome, now)
        also_ended = tuple(plain.find(seq.request_id) for seq in ended)
        plain.commit(other, outcome._replace(ended=also_ended), now)
        chunked = {chunk.seq for chunk in plan.chunks}
        for seq in branching:
            machine.branch(seq, drawn[seq][1], is_again=seq in was_branched and seq in chunked)
        core.check_integrity()
        machine.check_those_at_rest()
        assert core.block_pool.num_free == plain.block_pool.num_free
        assert core.num_free_swap_blocks == plain.num_free_swap_blocks
        now += rng.choice([0.0, 1.0])
    return machine
