"""Description of a world in words, for finding out by hand what a policy does in it."""

from __future__ import annotations

from experiments.conformance.days import Day
from experiments.conformance.worlds import Ask, World
from policies.admission.none import AdmitAll


def in_words(world: World | Day) -> str:
    """All that makes the world, one thing a line."""
    return _of_day(world) if isinstance(world, Day) else _of_world(world)


def _of_world(world: World) -> str:
    tick_s = world.model.tick_s
    speed = "" if world.model.flat else ", longer with more tokens and longer contexts"
    lines = [
        f"{_count(world.num_replicas, 'engine')} with {_count(world.num_blocks, 'KV block')} of "
        f"{world.caching.block_size} tokens and {_count(world.max_num_seqs, 'slot')}; contexts of at most "
        f"{world.max_model_len} tokens; an iteration takes {tick_s:.6g} s{speed}",
        f"batching {world.batching}",
        f"scheduling {world.scheduling}",
        f"caching {world.caching}",
    ]
    if world.num_replicas > 1:
        lines.append(f"routing {world.routing}, by signals that are up to {world.signal_age_s:.6g} s old")
    if not isinstance(world.admission, AdmitAll):
        lines.append(f"admission {world.admission}")
    if world.scheduling.needs_predictor or world.caching.needs_predictor:
        lines.append(f"prediction {world.prediction}")
    if world.scheduling.preemption_mode == "swap":
        lines.append(f"host memory for {_count(world.num_swap_blocks, 'block')} of preempted KV")
    if world.adapters is not None:
        served = ", ".join(f"{adapter.name} of rank {adapter.rank}" for adapter in world.served)
        lines.append(f"adapters {world.adapters}, of {served}")
    if world.frontend_s:
        lines.append(f"an engine knows of a request {world.frontend_s:.6g} s after its arrival")
    if world.plans_ahead:
        lines.append("an engine plans one iteration ahead")
    if world.patience_s is not None:
        lines.append(f"clients give up {world.patience_s:.6g} s after their arrival")
    if world.until_s is not None:
        lines.append(f"the run ends at {world.until_s:.6g} s")
    return "\n".join([*lines, *_requests(world)])


def _of_day(day: Day) -> str:
    rates = ", ".join(f"{rate:.6g}" for rate in day.rates_per_s)
    return "\n".join(
        [
            f"scaling {day.scaling}",
            f"a pool that begins with {_count(day.num_replicas, 'replica')}; each serves "
            f"{day.capacity_per_s:.6g} requests/s, {day.service_s:.6g} s each, and takes "
            f"{day.cold_start_s:.6g} s to start",
            f"{_count(day.num_intervals, 'interval')} of {day.scaling.interval_s:.6g} s with arrivals of "
            f"{rates} requests/s, over and over",
        ]
    )


def _requests(world: World) -> list[str]:
    """What is asked for, and when."""
    num_open = len(world.asks) if world.num_users is None else min(world.num_users, len(world.asks))
    lines = []
    for i, ask in enumerate(world.asks):
        if i < num_open:
            comes = f"comes at {ask.arrival_s:.6g} s"
        else:
            comes = f"comes {world.think_s:.6g} s after an end"
        lines.append(f"request {comes}: {_ask(ask)}")
    return lines


def _ask(ask: Ask) -> str:
    parts = [f"prompt of {_count(ask.num_prompt_tokens, 'token')}, answer of {ask.num_output_tokens}"]
    if ask.max_tokens is not None:
        parts.append(f"max_tokens {ask.max_tokens}")
    if ask.priority:
        parts.append(f"priority {ask.priority}")
    if ask.tenant:
        parts.append(f"tenant {ask.tenant}")
    if ask.deadline_s is not None:
        parts.append(f"deadline {ask.deadline_s:.6g} s")
    if ask.contents:
        runs = ", ".join(f"{num_tokens} tokens of content {content}" for content, num_tokens in ask.contents)
        parts.append(f"begins with {runs}")
    if ask.answer_id is not None:
        parts.append(f"its answer is content {ask.answer_id}")
    if ask.adapter is not None:
        parts.append(f"adapter {ask.adapter}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
