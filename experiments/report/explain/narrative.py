"""Describes the events of one request in sentences, one line per event, and its SLO attainment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.report.explain.run_folder import RequestStory
from sim.records.request_phases import QUEUED, RequestPhase
from sim.report import numbers, wording

DOING = {
    "waiting": "waiting",
    "preempted": "waiting to be resumed",
    "loading": "KV being loaded",
    "prefill": "prefill",
    "decode": "decoding",
    "paused": "paused by the policy",
    "in vain": "lost work",
}


class Line(NamedTuple):
    """One line of the timeline. at_s: seconds after the arrival; lasted_s: duration, NaN for an event."""

    at_s: float
    lasted_s: float
    what: str


def heading(story: RequestStory) -> str:
    """Returns the request's number, status, replica and lengths in one sentence."""
    request = story.request
    status = request["status"]
    reason = f" ({request['reason']})" if request.get("reason") else ""
    where = f" on replica {request['replica']}" if status != "rejected" else ""
    if request.get("prefill_replica", -1) >= 0:
        where = f", prefill on replica {request['prefill_replica']}, decode{where}"
    kept = ""
    if story.num_kept is not None and not request.get("lost_tokens"):
        kept = f" ({story.num_kept:,} of them accepted draft tokens)"
    return (
        f"Request {request['request_id']}{where}: {status}{reason}. {request['prompt_tokens']:,} prompt "
        f"tokens, {request['output_tokens']:,} output tokens{kept}, arrived at {request['arrival_s']:.6g} s."
    )


def lines(story: RequestStory) -> list[Line]:
    """Returns the events and phases by time."""
    arrival_s = story.request["arrival_s"]
    by_start: dict[int, list[RequestPhase]] = {}
    for phase in story.phases:
        by_start.setdefault(id(phase.began), []).append(phase)
    found = []
    for row in story.rows:
        if text := _event(row, story):
            found.append(Line(row.time_s - arrival_s, math.nan, text))
        for phase in by_start.get(id(row), ()):
            if phase.end_s > phase.start_s:
                lasted_s = phase.end_s - phase.start_s
                found.append(Line(phase.start_s - arrival_s, lasted_s, _phase(phase, story)))
    if story.request["status"] == "unfinished":
        found.append(Line(story.end_s - arrival_s, math.nan, "the run ended"))
    return found


def verdicts(story: RequestStory) -> Iterator[str]:
    """Yields a sentence per SLO term: met or missed, by how much, and the phase that took most time."""
    for term, limit_s in story.limits_s.items():
        took_s = story.request[f"{term}_s"]
        label = wording.LATENCIES[term]
        limit = f"limit {numbers.milliseconds(limit_s)} ms"
        if math.isnan(took_s):
            one_token = story.request["status"] == "finished" and term == "tpot"
            verdict = (
                "met, because an output of one token has no TPOT"
                if one_token
                else f"missed, because the request has no {label}"
            )
            yield f"{label}: {verdict} ({limit})"
            continue
        kept = took_s <= limit_s
        by = numbers.milliseconds(abs(limit_s - took_s))
        verdict = f"met with {by} ms to spare" if kept else f"missed by {by} ms"
        most = _dominant(story, term)
        yield f"{label}: {numbers.milliseconds(took_s)} ms, {verdict} ({limit}); {most}"


def _dominant(story: RequestStory, term: str) -> str:
    """Returns the phase that took the largest part of the time that a term counts."""
    request = story.request
    start_s = request["first_token_s"] if term == "tpot" else request["arrival_s"]
    end_s = request["first_token_s"] if term == "ttft" else request["last_token_s"]
    spent_s: dict[str, float] = {}
    for phase in story.phases:
        inside_s = min(phase.end_s, end_s) - max(phase.start_s, start_s)
        if inside_s <= 0:
            continue
        parts = phase.waited_s or {phase.name: 1.0}
        whole = sum(parts.values())
        for name, part in parts.items():
            label = wording.WAITS.get(name, DOING.get(name, name))
            label = f"waiting ({label})" if name in wording.WAITS else label
            spent_s[label] = spent_s.get(label, 0.0) + inside_s * part / whole
    if not spent_s or end_s <= start_s:
        return "no time passed"
    most = max(spent_s, key=lambda label: spent_s[label])
    return f"{numbers.percent(spent_s[most] / (end_s - start_s))} of this time: {most}"


def _phase(phase: RequestPhase, story: RequestStory) -> str:
    text = DOING[phase.name]
    if phase.began.event == "hand_over" and phase.ended is not None:
        text = f"{text} for replica {phase.ended.replica}"
    if phase.name == "loading" and phase.began.tier == "remote":
        return _sending(phase, story)
    if phase.name in QUEUED and phase.waited_s:
        parts = sorted(phase.waited_s.items(), key=lambda part: -part[1])
        causes = [
            wording.WAITS[cause] + (f" {numbers.milliseconds(part_s)} ms" if len(parts) > 1 else "")
            for cause, part_s in parts
        ]
        return f"{text}: {', '.join(causes)}"
    if phase.name == "prefill" and not story.request["preemptions"]:
        num = int(story.request["prefill_iterations"])
        return f"{text} in {wording.plural(num, 'iteration')}"
    if phase.name == "prefill" and phase.began.event != "admit":
        return f"{text}, {phase.began.recomputed_tokens:,} of its tokens recomputed"
    return text


def _sending(phase: RequestPhase, story: RequestStory) -> str:
    """Describes a KV transfer, and the wait for the end of the running iteration after it."""
    there_s = [row.time_s for row in story.rows if row.event == "loaded" and row.time_s >= phase.start_s]
    if not there_s or there_s[0] > phase.end_s:
        return "KV transfer"
    sent, waited = numbers.milliseconds(there_s[0] - phase.start_s), phase.end_s - there_s[0]
    after = f", then current iteration {numbers.milliseconds(waited)} ms" if waited > 0 else ""
    return f"KV transfer {sent} ms{after}"


def _event(row: Any, story: RequestStory) -> str:
    """Describes an event; empty if the phase that follows describes it."""
    event, of = row.event, wording.plural(row.of_tokens, "token")
    at = f" on replica {row.replica}" if story.num_replicas > 1 else ""
    if event in ("preempt", "preempt_swap"):
        kept = "swapped to host memory" if event == "preempt_swap" else "freed"
        if row.by < 0:
            why = "decided by the policy"
        elif row.by == row.request_id:
            why = "no free KV blocks for its next tokens"
        else:
            why = f"its KV blocks are needed by request {row.by}"
        return f"preempted: {why}; KV of {row.tokens:,} tokens {kept}"
    if event == "load" and not row.tier:
        return f"got a slot{at}; its adapter is being loaded"
    if event == "load" and row.tier == "remote":
        sources = [r.replica for r in story.rows if r.event == "hand_over" and r.time_s <= row.time_s]
        return f"got a slot{at}; KV of {row.tokens:,} of {of} is being sent from replica {sources[-1]}"
    if event in ("load", "swap_in"):
        what = "swapped KV is loaded" if event == "swap_in" else "KV found"
        return f"got a slot{at}; {what}, {row.tokens:,} of {of} from {row.tier}"
    if event == "end":
        status = story.request["status"]
        return f"rejected: {story.request['reason']}" if status == "rejected" else status
    if event in ("lost", "timed_out"):
        why = "its replica crashed" if event == "lost" else "timed out"
        why += at
        if not row.tokens:
            return why
        outcome = "lost" if story.request["lost_tokens"] else "kept, and the request resumes after them"
        return f"{why}; {row.tokens:,} output tokens are {outcome}"
    return {
        "arrive": f"arrived with {row.tokens:,} prompt tokens",
        "first_token": "first token",
        "loaded": "loading has finished",
        "hand_over": _handed_over(row, story, at),
        "adopt": f"continues{at}: KV of {row.tokens:,} of {of} has arrived",
        "admit": f"admitted{at}: {row.tokens:,} of {of} found in the cache",
        "resume": f"admitted again{at}: {row.tokens:,} of {of} found in the cache",
        "resume_swapped": f"continues{at}: {row.tokens:,} of {of} swapped in",
        "prefilled": "first token after the preemption",
        "unserved": "left the queue without being served" if story.request["status"] == "aborted" else "",
    }.get(event, "")


def _handed_over(row: Any, story: RequestStory, at: str) -> str:
    """Describes the stop of a sequence that another replica continues: after its prefill, or a migration."""
    if any(r.event == "first_token" and r.time_s < row.time_s for r in story.rows):
        return f"stands still{at} for its live migration, in which the rest of its KV is copied"
    of = wording.plural(row.of_tokens, "token")
    return f"prefill finished{at}; KV of {row.tokens:,} of {of} is kept until its transfer"
