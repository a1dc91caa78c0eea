"""Writes timeline.json: a run in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

Each replica is a process with its iterations as slices, counters of sequences and KV blocks, and one
asynchronous slice per request that contains its phases. Times are in microseconds with three decimals. With
pipeline parallelism each stage has a track with its micro-batches as slices, but only for the first
iterations because there are many. Size: 40 MB for 10,000 requests of 256 output tokens on one replica; half
of it is iterations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.assembly.roofline import Roofline
from hwmodels.iterations import IterationModel
from hwmodels.iterations.layout import Pipeline
from hwmodels.speculation import SpeculativeModel
from sim.metrics.figure import KINDS, batch_tokens, iteration_kind, one_shape
from sim.records.request_phases import QUEUED, RequestPhase, phases_by_request
from sim.records.run import ReplicaRecord, RunRecords, events_table
from sim.records.table import AnyTable, column
from sim.report.files import written_whole

ITERATIONS_TRACK = 1
DRAFT_ARGS = ("verified_tokens", "accepted_tokens", "kept_tokens")
"""Columns in a slice of an engine with speculation: a pass yields the kept draft tokens and one more."""
PIPELINE_ITERATIONS = 2000
"""Number of iterations per replica with slices of pipeline stages: 8 stages and 8 micro-batches take 15 kB
each.
"""


def write_timeline(
    file: Path,
    records: RunRecords,
    max_num_requests: int | None = None,
    models: Sequence[IterationModel] = (),
) -> str | None:
    """Writes the timeline of a run; returns a note if it is cut to the first max_num_requests arrivals.

    A cut timeline has no later requests, and only iterations up to the end of the last included request.
    models: hardware models by pool, for the stages of a pipeline.
    """
    events, iterations = events_table(records), records.iterations
    note = None
    if max_num_requests is not None and len(records.requests) > max_num_requests:
        ids, arrival_s = column(records.requests, "request_id"), column(records.requests, "arrival_s")
        first = np.lexsort((ids, arrival_s))[:max_num_requests]
        ended_s = column(records.requests, "finished_s")[first]
        until_s = np.where(np.isnan(ended_s), records.end_s, ended_s).max()
        events = events[np.isin(events["request_id"], ids[first])]
        iterations = iterations[column(iterations, "start_s") < until_s]
        note = (
            f"timeline.json shows the first {max_num_requests:,} of {len(records.requests):,} requests and "
            f"the iterations until {until_s:,.1f} s; output.timeline_requests=null shows all"
        )
    other = {"source": "windtunnel", **({"note": note} if note else {})}
    with written_whole(file) as part, part.open("w", encoding="utf-8") as out:
        out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(other)},"traceEvents":[\n')
        separator = ""
        for event in trace_events(records, iterations, events, models):
            out.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
        out.write("\n]}\n")
    return note


def trace_events(
    records: RunRecords,
    iterations: AnyTable,
    events: AnyTable,
    models: Sequence[IterationModel] = (),
) -> Iterator[dict[str, Any]]:
    """Yields the events of the trace; events of one replica or request are in order of time."""
    for replica in range(records.num_replicas):
        pid = replica + 1  # some viewers treat process 0 as the idle process
        yield _metadata("process_name", pid, 0, f"replica {replica}")
        yield _metadata("thread_name", pid, ITERATIONS_TRACK, "iterations")
        own = iterations[column(iterations, "replica") == replica]
        yield from _iterations(pid, own)
        yield from _counters(pid, own, records, replica)
        yield from _crashes(pid, records.replicas[replica])
        model = models[records.replicas[replica].pool] if models else None
        if isinstance(model, Roofline | SpeculativeModel) and model.stages is not None:
            first = own[:PIPELINE_ITERATIONS]
            yield from _stages(pid, first, model)
    replica_of = dict(
        zip(
            column(records.requests, "request_id").tolist(),
            column(records.requests, "replica").tolist(),
            strict=True,
        )
    )
    for request_id, phases in phases_by_request(events, records.end_s):
        yield from _request(replica_of[request_id] + 1, request_id, phases)


def _iterations(pid: int, rows: AnyTable) -> Iterator[dict[str, Any]]:
    start_ns, end_ns = _spans_ns(rows)
    kind = iteration_kind(rows)
    seqs = (column(rows, "decode_seqs") + column(rows, "prefill_seqs")).tolist()
    tokens = batch_tokens(rows).tolist()
    columns = (kind.tolist(), start_ns.tolist(), (end_ns - start_ns).tolist(), tokens, seqs)
    names = [name for name in DRAFT_ARGS if name in rows]
    drafts = _rows(rows, names)
    for name, at_ns, took_ns, num_tokens, num_seqs, num_blocks, counts in zip(
        *columns, column(rows, "kv_blocks_used").tolist(), drafts, strict=True
    ):
        more = dict(zip(names, counts, strict=True))
        yield {
            "ph": "X",
            "name": KINDS[name],
            "cat": "iteration",
            "pid": pid,
            "tid": ITERATIONS_TRACK,
            "ts": at_ns / 1e3,
            "dur": took_ns / 1e3,
            "args": {"tokens": num_tokens, "seqs": num_seqs, "blocks": num_blocks, **more},
        }


def _stages(pid: int, rows: AnyTable, model: Roofline | SpeculativeModel) -> Iterator[dict[str, Any]]:
    """Yields one track per pipeline stage with its micro-batches as slices; gaps are bubbles.

    A batch in flight is drawn as late as its end allows, one stage right after the other. With drafts, the
    micro-batches of an iteration are simulated exactly from its start, ignoring the previous iteration, so
    slices of later stages may extend beyond its end. Drafting has no slice.
    """
    assert model.stages is not None
    num_stages = len(model.stages.all)
    for stage in range(num_stages):
        yield _metadata("thread_name", pid, ITERATIONS_TRACK + 1 + stage, f"stage {stage + 1}")
    pipeline = Pipeline(num_stages, waits_for_tokens=False)
    times = _rows(rows, ("iteration", "start_s", "duration_s"))
    for row, (number, start_s, duration_s) in enumerate(times):
        shape = one_shape(rows, row, model)
        if isinstance(model, Roofline):
            one = model.one_batch(shape)
            stage_s, send_s = model.stages.one(one)
            begin_s = start_s + duration_s - float(one.all_s)
            played = pipeline.play([[own_s] for own_s in stage_s], send_s, not_before_s=begin_s)
        else:
            played = pipeline.play(*model.stages.to_play(*model.round(shape)), not_before_s=start_s)
        for stage in range(num_stages):
            spans_s = zip(played.start_s[stage].tolist(), played.sent_s[stage].tolist(), strict=True)
            for batch, (begin_s, end_s) in enumerate(spans_s, start=1):
                yield {
                    "ph": "X",
                    "name": f"micro-batch {batch}",
                    "cat": "stage",
                    "pid": pid,
                    "tid": ITERATIONS_TRACK + 1 + stage,
                    "ts": _ns(begin_s) / 1e3,
                    "dur": (_ns(end_s) - _ns(begin_s)) / 1e3,
                    "args": {"iteration": number},
                }


def _crashes(pid: int, replica: ReplicaRecord) -> Iterator[dict[str, Any]]:
    """Yields a slice for each period in which the replica was down."""
    for down_s, up_s in replica.down:
        start_ns, end_ns = _ns(down_s), _ns(up_s)
        yield {
            "ph": "X",
            "name": "down",
            "cat": "failure",
            "pid": pid,
            "tid": ITERATIONS_TRACK,
            "ts": start_ns / 1e3,
            "dur": (end_ns - start_ns) / 1e3,
        }


def _counters(pid: int, rows: AnyTable, records: RunRecords, replica: int) -> Iterator[dict[str, Any]]:
    """Yields counter values where they change; 0 while the replica has no request."""
    start_ns, end_ns = _spans_ns(rows)
    end_s = column(rows, "start_s") + column(rows, "duration_s")
    mine = records.requests[column(records.requests, "replica") == replica]
    arrived = np.searchsorted(np.sort(column(mine, "arrival_s")), end_s + 1e-9, side="right")
    ended = np.searchsorted(np.sort(column(mine, "finished_s")), end_s + 1e-9, side="right")
    falls_idle = np.append(start_ns[1:] > end_ns[:-1], True)[: len(rows)] & (arrived == ended)
    for name, columns in (("sequences", ("running", "waiting")), ("KV blocks", ("kv_blocks_used",))):
        values = _rows(rows, columns)
        labels = [column.removeprefix("kv_blocks_") for column in columns]
        last: list[Any] | None = None
        for at_ns, to_ns, value, idle in zip(
            start_ns.tolist(), end_ns.tolist(), values, falls_idle.tolist(), strict=True
        ):
            if value != last:
                yield _counter(name, pid, at_ns, dict(zip(labels, value, strict=True)))
                last = value
            if idle:
                yield _counter(name, pid, to_ns, dict.fromkeys(labels, 0))
                last = None


def _request(pid: int, request_id: int, phases: list[RequestPhase]) -> Iterator[dict[str, Any]]:
    """Yields an asynchronous slice for the request, and one inside it for each phase."""
    same = {"cat": "request", "id": str(request_id), "pid": pid, "tid": 0}
    if not phases:
        return
    begin, end = _ns(phases[0].start_s) / 1e3, _ns(phases[-1].end_s) / 1e3
    yield {"ph": "b", "name": "request", "ts": begin, **same, "args": {"request": request_id}}
    for phase in phases:
        if phase.end_s == phase.start_s:
            continue
        why = f" ({phase.cause})" if phase.cause and phase.name in QUEUED else ""
        name = f"{phase.name}{why}"
        args = {f"{cause}_ms": round(part_s * 1e3, 6) for cause, part_s in phase.waited_s.items()}
        yield {"ph": "b", "name": name, "ts": _ns(phase.start_s) / 1e3, **same, "args": args}
        yield {"ph": "e", "name": name, "ts": _ns(phase.end_s) / 1e3, **same}
    yield {"ph": "e", "name": "request", "ts": end, **same}


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}


def _counter(name: str, pid: int, at_ns: int, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_ns / 1e3, "args": values}


def _rows(table: AnyTable, names: Sequence[str]) -> list[list[Any]]:
    """Returns the values of some columns, row by row."""
    columns = [column(table, name).tolist() for name in names]
    return [[values[row] for values in columns] for row in range(len(table))]


def _spans_ns(rows: AnyTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns start and end of iterations, in ns; after rounding, none overlaps the next."""
    start_ns = np.rint(column(rows, "start_s") * 1e9).astype(np.int64)
    end_ns = np.rint((column(rows, "start_s") + column(rows, "duration_s")) * 1e9).astype(np.int64)
    end_ns[:-1] = np.minimum(end_ns[:-1], start_ns[1:])
    return start_ns, end_ns


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)
