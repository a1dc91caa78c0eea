"""Description of a world in words, from which its schedule can be worked out by hand."""

from __future__ import annotations

from experiments.conformance.days import Day
from experiments.conformance.speculating import SpeculatingWorld
from experiments.conformance.worlds import Ask, World
from policies.admission import AdmitAll


def in_words(world: World | Day) -> str:
    """Describes a world or a day, one setting per line."""
    return _of_day(world) if isinstance(world, Day) else _of_world(world)


def _of_world(world: World) -> str:
    tick_s = world.model.tick_s
    speed = "" if world.model.flat else ", longer with more tokens and longer contexts"
    lines = [
        f"{_count(world.num_replicas, 'engine')} with {_count(world.num_blocks, 'KV block')} of "
        f"{_count(world.caching.block_size, 'token')} and {_count(world.max_num_seqs, 'slot')}; contexts of "
        f"at most {_count(world.max_model_len, 'token')}; an iteration takes {tick_s:.6g} s{speed}",
        f"batching {world.batching}",
        f"scheduling {world.scheduling}",
        f"caching {world.caching}",
    ]
    if world.num_replicas > 1:
        lines.append(f"routing {world.routing}, with signals up to {world.signal_age_s:.6g} s old")
    if not isinstance(world.admission, AdmitAll):
        lines.append(f"admission {world.admission}")
    if world.scheduling.needs_predictor or world.caching.needs_predictor:
        lines.append(f"prediction {world.prediction}")
    if world.scheduling.preemption_mode == "swap":
        lines.append(f"host memory for {_count(world.num_swap_blocks, 'block')} of preempted KV")
    if world.adapters is not None:
        served = ", ".join(f"{adapter.name} of rank {adapter.rank}" for adapter in world.served)
        lines.append(f"adapters {world.adapters}, of {served}")
    if isinstance(world, SpeculatingWorld):
        tpot = "" if world.tpot_s is None else f"; the SLO allows {world.tpot_s:.6g} s per output token"
        lines.append(f"draft_length {world.draft_length}{tpot}")
        lines.append(f"drafts of {world.proposer}, of which {world.acceptance} accepts some")
    if world.frontend_s:
        lines.append(f"an engine receives a request {world.frontend_s:.6g} s after its arrival")
    if world.plans_ahead:
        lines.append("an engine plans one iteration ahead")
    if world.recv_interval > 1:
        lines.append(f"an engine looks for requests every {world.recv_interval} iterations of decodes")
    if world.patience_s is not None:
        lines.append(f"clients give up {world.patience_s:.6g} s after the arrival of their request")
    if world.until_s is not None:
        lines.append(f"the run ends at {world.until_s:.6g} s")
    return "\n".join([*lines, *_requests(world)])


def _of_day(day: Day) -> str:
    rates = ", ".join(f"{rate:.6g}" for rate in day.rates_per_s)
    return "\n".join(
        [
            f"scaling {day.scaling}",
            f"a pool of initially {_count(day.num_replicas, 'replica')}; a replica serves "
            f"{day.capacity_per_s:.6g} requests/s and takes {day.cold_start_s:.6g} s to start; a request "
            f"takes {day.service_s:.6g} s",
            f"{_count(day.num_intervals, 'interval')} of {day.scaling.interval_s:.6g} s, in turn with "
            f"arrivals of {rates} requests/s",
        ]
    )


def _requests(world: World) -> list[str]:
    """Describes the requests, one per line."""
    num_open = len(world.asks) if world.num_users is None else min(world.num_users, len(world.asks))
    lines = []
    for i, ask in enumerate(world.asks):
        if i < num_open:
            arrives = f"arrives at {ask.arrival_s:.6g} s"
        else:
            arrives = f"arrives {world.think_s:.6g} s after the end of another"
        lines.append(f"request {arrives}: {_ask(ask)}")
    return lines


def _ask(ask: Ask) -> str:
    parts = [
        f"{_count(ask.num_prompt_tokens, 'prompt token')}, {_count(ask.num_output_tokens, 'output token')}"
    ]
    if ask.max_tokens is not None:
        parts.append(f"max_tokens {ask.max_tokens}")
    if ask.priority:
        parts.append(f"priority {ask.priority}")
    if ask.tenant:
        parts.append(f"tenant {ask.tenant}")
    if ask.deadline_s is not None:
        parts.append(f"deadline {ask.deadline_s:.6g} s")
    if ask.contents:
        runs = ", ".join(
            f"{_count(num_tokens, 'token')} of content {content}" for content, num_tokens in ask.contents
        )
        parts.append(f"its prompt begins with {runs}")
    if ask.answer_id is not None:
        parts.append(f"its output is content {ask.answer_id}")
    if ask.adapter is not None:
        parts.append(f"adapter {ask.adapter}")
    return ", ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
