"""Our routing policies against SGLang's router (0.3.2) and vLLM's (0.1.17): the same requests and choices.

Each sequence is of arrivals and ends, drawn with a fixed seed. The routers run as their packages' programs in
front of workers that hold requests (`routers.py`). Prompts of one sequence share prefixes, those of two
sequences none: the first character of a sequence is its own. So one router plays all sequences of a mode,
each against a policy of ours that has seen nothing.

Replicas are given to our policies in the order in which the router holds its workers, as both take the first
of equals. Where a router draws at random, its choice is put first, so that a policy that takes the first of
equals must agree; what is drawn is compared by its frequencies.
"""

import asyncio
import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from policies.core.request import Prompt, Request, Segment
from policies.routing.load_balancing import PowerOfTwo, RoundRobin
from policies.routing.prefix_aware import PrefixAffinity

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")
from tests.experiments.serve.clients.routers import running

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients")]

MATCHED = {"sglang-router": "first", "vllm-router": "least_outstanding"}
PROGRAMS = {"sglang-router": ("launch",), "vllm-router": ()}
NUM_WORKERS = 4
NUM_SEQUENCES = int(os.environ.get("ROUTER_SEQUENCES", "200"))
NUM_STEPS = 24
OWN = 0x20000  # a sequence's own first character: this plus its number
MAX_RUN = 30  # the characters of content c are MAX_RUN * c + place, from FIRST on
FIRST = 0x4E00


class Runs:
    """Prompts of runs of content: every character of a content is different, as tokens are in our prompts."""

    def __init__(self, rng):
        self.rng, self.known = rng, []

    def draw(self):
        """Returns (content, length) pieces: a part of an earlier prompt, often cut within a run, and more."""
        rng = self.rng
        pieces = list(self.known[rng.integers(len(self.known))]) if self.known and rng.random() < 0.8 else []
        pieces = pieces[: rng.integers(len(pieces) + 1)]
        if pieces and rng.random() < 0.5:
            content, length = pieces[-1]
            pieces[-1] = content, int(rng.integers(1, min(length + 6, MAX_RUN)))
        for _ in range(rng.integers(not pieces, 4)):
            pieces.append((int(rng.integers(5)), int(rng.integers(1, rng.choice([4, MAX_RUN])))))
        self.known.append(pieces)
        return pieces

    def text(self, pieces):
        return "".join(
            chr(FIRST + MAX_RUN * content + i) for content, length in pieces for i in range(length)
        )


class Characters(Runs):
    """Prompts of single characters out of three, one of them of two bytes and one of four."""

    def draw(self):
        rng = self.rng
        pieces = list(self.known[rng.integers(len(self.known))]) if self.known and rng.random() < 0.8 else []
        pieces = pieces[: rng.integers(len(pieces) + 1)]
        pieces += [(int(content), 1) for content in rng.integers(3, size=rng.integers(not pieces, 25))]
        self.known.append(pieces)
        return pieces

    def text(self, pieces):
        return "".join("a\u00e9\U0001f600"[content] for content, _ in pieces)


def words_of(name, policy, settings):
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [*PROGRAMS[name], "--policy", policy, *words]


def request_of(request_id, sequence, pieces):
    """Returns our request; the sequence's own first character is a content of its own."""
    segments = (Segment(1000 + sequence, 1), *(Segment(*piece) for piece in pieces))
    return Request(request_id, 0.0, Prompt(sum(length for _, length in segments), segments))


async def play(router, routing, sequence, prompts, rng, note):
    """Plays one sequence on both; calls note(where, position, their position, loads) for each decision."""
    held = []
    await router.listed()
    views = [SimpleNamespace(index=worker, num_outstanding=0) for worker in router.order]
    busy = rng.choice([0.55, 0.7, 0.9])  # the share of arrivals; the others are ends
    favoured = rng.random() < 0.5  # the ends spare some workers, so that loads part
    for step in range(NUM_STEPS):
        if held and rng.random() > busy:
            ending = [each for each in held if each[1] != router.order[0]] if favoured else held
            if ending:
                each = ending[rng.integers(len(ending))]
                held.remove(each)
                await router.end(each[0])
            continue
        pieces = prompts.draw()
        for view in views:
            view.num_outstanding = router.outstanding[view.index]
        loads = [view.num_outstanding for view in views]
        request_id, worker = await router.send(chr(OWN + sequence) + prompts.text(pieces))
        held.append((request_id, worker))
        ours = routing.choose(request_of(request_id, sequence, pieces), views, 0.0)
        note(
            f"sequence {sequence}, step {step}, {pieces}, loads {loads}",
            ours,
            router.order.index(worker),
            loads,
        )
    await router.end_all()


def compare(program, name, policy, settings, make_routing, make_prompts, log, counts_loads=True):
    """Plays all sequences of a mode. Returns [(where, ours, theirs, loads)] of all decisions."""
    decisions = []

    async def main():
        words = words_of(name, policy, settings)
        async with running(program("others", name), words, NUM_WORKERS, log) as router:
            router.counts_loads = counts_loads
            for sequence in range(NUM_SEQUENCES):
                rng = np.random.default_rng([2026, sequence])
                await play(
                    router, make_routing(), sequence, make_prompts(rng), rng, lambda *d: decisions.append(d)
                )

    asyncio.run(main())
    return decisions


def differences(decisions):
    return [where for where, ours, theirs, _ in decisions if ours != theirs]


MODES = {
    "balanced": {},
    "tight": {"balance_abs_threshold": 2, "balance_rel_threshold": 1.2},
    "relative": {"balance_abs_threshold": 1, "balance_rel_threshold": 3.0, "cache_threshold": 0.6},
    "any_match": {"cache_threshold": 0.0, "balance_abs_threshold": 4},
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("make_prompts", [Runs, Characters], ids=["runs", "characters"])
@pytest.mark.parametrize("mode", MODES)
def test_cache_aware_is_prefix_affinity(program, tmp_path, name, mode, make_prompts):
    settings = MODES[mode]

    def make_routing():
        return PrefixAffinity(matched=MATCHED[name], **settings)

    decisions = compare(program, name, "cache_aware", settings, make_routing, make_prompts, tmp_path / "log")
    print(name, mode, make_prompts.__name__, len(decisions), "decisions")
    assert not differences(decisions)
    assert len({theirs for _, _, theirs, _ in decisions}) == NUM_WORKERS


@pytest.mark.parametrize("name", PROGRAMS)
def test_round_robin_is_round_robin(program, tmp_path, name):
    routing = RoundRobin()
    decisions = compare(program, name, "round_robin", {}, lambda: routing, Runs, tmp_path / "log", False)
    first = decisions[0][2] - decisions[0][1]  # how far it had come before
    assert all((ours + first) % NUM_WORKERS == theirs for _, ours, theirs, _ in decisions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_is_uniform(program, tmp_path, name):
    decisions = compare(program, name, "random", {}, RoundRobin, Runs, tmp_path / "log", False)
    counts = Counter(theirs for _, _, theirs, _ in decisions)
    expected = len(decisions) / NUM_WORKERS
    assert sum((counts[i] - expected) ** 2 / expected for i in range(NUM_WORKERS)) < 16.3, (
        "chi-squared, 99.9 %"
    )


def test_power_of_two_takes_the_less_loaded_of_two_different_workers(program, tmp_path):
    """vllm-router's draws are its own: of n different loads the k-th least is chosen as often as ours is."""
    decisions = compare(program, "vllm-router", "power_of_two", {}, PowerOfTwo, Runs, tmp_path / "log")
    ranks, ours = Counter(), Counter()
    for where, our, their, loads in decisions:
        assert loads[their] < max(loads) or loads.count(max(loads)) > 1, where
        if len(set(loads)) == NUM_WORKERS:
            ranks[sorted(loads).index(loads[their])] += 1
            ours[sorted(loads).index(loads[our])] += 1
    total = ranks.total()
    for rank, share in enumerate((3 / 6, 2 / 6, 1 / 6, 0)):
        margin = 4 * (share * (1 - share) / total) ** 0.5
        assert abs(ranks[rank] / total - share) <= margin
        assert abs(ours[rank] / total - share) <= margin


def test_power_of_two_of_sglang_counts_no_requests_of_its_own(program, tmp_path):
    """A difference: sglang-router 0.3.2 compares loads that workers report; without reports all are equal."""
    decisions = compare(
        program, "sglang-router", "power_of_two", {}, PowerOfTwo, Runs, tmp_path / "log", False
    )
    assert any(
        loads[their] == max(loads) and loads.count(max(loads)) == 1 for _, _, their, loads in decisions
    )


def test_the_comparison_notices_another_rule(program, tmp_path):
    decisions = compare(
        program,
        "sglang-router",
        "cache_aware",
        {},
        lambda: PrefixAffinity(unmatched="smallest_tree"),
        Runs,
        tmp_path / "log",
    )
    assert differences(decisions)
