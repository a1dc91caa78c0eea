"""Random workloads for comparisons with other engines."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from policies.caching.block_tables import KvGroup
from policies.core.request import Prompt, Segment
from tests.parity.lockstep import Arrival, Settings, Workload


def make_workload(mode: str, seed: int) -> Workload:
    """Draws a random workload of a mode.

    A mode is words joined by "+": fcfs (the plain case), priority, unchunked, threshold, adaptive, watermark,
    prefix, async, first_chunk (scheduler_reserve_full_isl=False), active (max_num_active_seqs), scheduled
    (max_num_scheduled_tokens), paced (prefill_schedule_interval), windows and chunks (KV groups with full
    attention and with sliding windows or chunks), shared (equal prompts with equal answers,
    and prompts that quote an answer before its end).
    """
    random = Random(f"{mode.removeprefix('async+')}/{seed}")
    words = set(mode.split("+"))
    block_size = random.choice((1, 2, 3, 4, 8, 16, 16, 32))
    max_model_len = random.choice((random.randint(2, 40), random.randint(20, 261)))
    watermark = random.choice((0.01, 0.1, 0.3)) if "watermark" in words else 0.0
    min_blocks = -(-(max_model_len - 1) // block_size)
    num_blocks = int(min_blocks * random.choice((1.0, 1.0, 1.2, 1.5, 2.0, 4.0))) + random.randint(0, 2)
    max_num_seqs = random.choice((random.randint(1, 8), 8))
    groups: tuple[KvGroup, ...] = ()
    if words & {"windows", "chunks"}:
        groups = _groups(max_model_len, block_size if "chunks" in words else None, random)
        num_blocks = num_blocks * len(groups) + len(groups)
    budget = max(max_num_seqs, random.choice((random.randint(1, 16), random.randint(1, 256))))
    is_chunked = "unchunked" not in words
    settings = Settings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if is_chunked else max(budget, max_model_len),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        enable_chunked_prefill=is_chunked,
        long_prefill_token_threshold=random.randint(1, min(max_model_len, 64)) if "threshold" in words else 0,
        long_prefill_token_threshold_adaptive="adaptive" in words,
        is_priority="priority" in words,
        is_prefix_caching="prefix" in words,
        watermark=watermark,
        async_scheduling="async" in words,
        max_num_scheduled_tokens=random.randint(1, budget) if "scheduled" in words else None,
        max_num_active_seqs=random.randint(1, max_num_seqs) if "active" in words else None,
        scheduler_reserve_full_isl="first_chunk" not in words,
        prefill_schedule_interval=random.randint(2, 9) if "paced" in words else 1,
        groups=groups,
    )
    arrivals = _arrivals(settings, random)
    if "shared" in words:
        arrivals = _with_equal_answers(arrivals, random)
    return Workload(settings, arrivals)


def _groups(max_model_len: int, chunk_step: int | None, random: Random) -> tuple[KvGroup, ...]:
    """Draws up to two groups with full attention, then groups of one window, most of them short.

    chunk_step: chunks, of a multiple of so many tokens, in place of sliding windows.
    """
    window = random.randint(2, max(2, max_model_len // random.choice((1, 4, 10))))
    is_chunked = chunk_step is not None
    if chunk_step is not None:
        window = -(-window // chunk_step) * chunk_step
    num_full, num_windows = random.choice((1, 1, 2)), random.choice((1, 2, 5))
    return (KvGroup(),) * num_full + (KvGroup(1, window, is_chunked),) * num_windows


def _with_equal_answers(arrivals: tuple[Arrival, ...], random: Random) -> tuple[Arrival, ...]:
    """Returns arrivals of which some repeat prompt and answer of another one, and none waits for another."""
    share = random.choice((0.2, 0.5, 0.9))
    changed: list[Arrival] = []
    for arrival in arrivals:
        others = [other for other in changed if other.answer_id is not None]
        if others and random.random() < share:
            other = random.choice(others[-3:])
            arrival = replace(arrival, prompt=other.prompt, answer_id=other.answer_id)
        changed.append(replace(arrival, after=None))
    return tuple(changed)


def _arrivals(settings: Settings, random: Random) -> tuple[Arrival, ...]:
    tree = _ContentTree(settings, random)
    max_gap = random.choice((0, 1, 4, 20))
    max_output = random.choice((3, 20, 60, 60))
    abort_share = random.choice((0.0, 0.0, 0.1, 0.5))
    step = 0
    arrivals = []
    for request_id in range(random.randint(1, 25)):
        step += random.randint(0, max_gap)
        prompt = tree.prompt() if settings.is_prefix_caching else Prompt(tree.num_prompt_tokens())
        num_output = random.randint(1, max_output)
        arrivals.append(
            Arrival(
                request_id=request_id,
                step=step,
                prompt=prompt,
                num_output_tokens=num_output,
                answer_id=(
                    tree.add_answer(request_id, prompt, num_output) if settings.is_prefix_caching else None
                ),
                after=tree.quoted(prompt),
                end=random.choice(("length", "stop", "sampled")),
                priority=random.randint(0, 3),
                abort_step=step + random.randint(0, 60) if random.random() < abort_share else None,
            )
        )
    return tuple(arrivals)


class _ContentTree:
    """Prompts that are paths in a growing random tree of segments, cut off at random."""

    def __init__(self, settings: Settings, random: Random) -> None:
        self._random = random
        self._block_size = settings.block_size
        longest = int((settings.max_model_len - 1) * random.choice((1.0, 1.0, 0.3, 0.1)))  # short: many run
        self._max_tokens = min(max(longest, 1), 200)
        self._paths: list[tuple[Segment, ...]] = [()]
        self._answered: dict[int, int] = {}  # request by content id of its answer
        self._share_new = random.choice((0.1, 0.3, 0.6))

    def add_answer(self, request_id: int, prompt: Prompt, num_output: int) -> int | None:
        """Names the answer to a prompt, so that prompts may quote both; None after a nameless prompt."""
        if prompt.num_tokens > sum(segment.num_tokens for segment in prompt.segments):
            return None
        answer = Segment(len(self._paths), num_output)
        self._paths.append((*prompt.segments, answer))
        self._answered[answer.content_id] = request_id
        return answer.content_id

    def quoted(self, prompt: Prompt) -> int | None:
        """Returns the last request whose answer a prompt quotes."""
        requests = [self._answered[s.content_id] for s in prompt.segments if s.content_id in self._answered]
        return requests[-1] if requests else None

    def num_prompt_tokens(self) -> int:
        """Draws a length from 1 to the longest allowed; one in four is whole blocks."""
        num_tokens = self._random.randint(1, self._max_tokens)
        if self._random.random() < 0.25:
            num_tokens = max(num_tokens // self._block_size, 1) * self._block_size
        return min(num_tokens, self._max_tokens)

    def prompt(self) -> Prompt:
        """Draws a known path, perhaps with a new segment at its end, a cut, or a nameless tail."""
        random = self._random
        path = random.choice(self._paths)
        if random.random() < self._share_new or not path:
            path = (*path, Segment(len(self._paths), max(self.num_prompt_tokens() // 2, 1)))
            self._paths.append(path)
        length = sum(segment.num_tokens for segment in path)
        tail = 0
        if random.random() < 0.3:
            length = random.randint(1, length)
        elif random.random() < 0.4:
            tail = random.randint(1, 30)
        named = min(length, self._max_tokens)
        total = min(named + tail, self._max_tokens)
        segments = []
        for segment in path:
            num_tokens = min(segment.num_tokens, named)
            if num_tokens:
                segments.append(Segment(segment.content_id, num_tokens))
            named -= num_tokens
        return Prompt(total, tuple(segments))
