"""Measures reading sessions of agents and recordings, as `experiments.bench.traces` does other traces.

python -m experiments.bench.session_traces [rows ...]        # default: 100000 1000000
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path

from experiments.bench.traces import Format, drawn, main, measure
from policies.core.request import Prompt, Request, Segment
from sim.report.files import write_table
from sim.workload.arrivals import Poisson
from sim.workload.formats import TraceLabJsonl
from sim.workload.recording import Recording, TrafficLog
from sim.workload.untimed_traces import WekaJsonl

CALLS = 50
"""Calls of a session of agents."""
LENGTH_S = 100
"""Length of a session; one begins every second."""


def write_weka(path: Path, num_rows: int) -> None:
    """Writes `WekaJsonl`: sessions of `CALLS` calls in `LENGTH_S`, whose prompts grow by 64 tokens."""
    with path.open("w") as file:
        for session in range(num_rows // CALLS):
            calls = [
                {
                    "t": call * LENGTH_S / CALLS,
                    "type": "n",
                    "in": 64 * (call + 1),
                    "out": 9 + session % 90,
                    "hash_ids": [*range(call + 1)],
                }
                for call in range(CALLS)
            ]
            head = {"id": f"session-{session}", "block_size": 64, "hash_id_scope": "local"}
            file.write(json.dumps(head | {"requests": calls}) + "\n")


def write_tracelab(path: Path, num_rows: int) -> None:
    """Writes `TraceLabJsonl`: the rounds of one session after the other, as `write_weka` has them."""
    with path.open("w") as file:
        for number in range(num_rows):
            session, call = divmod(number, CALLS)
            at_s = 1.77e9 + session + call * LENGTH_S / CALLS
            event = {
                "event_type": "user_message",
                "timestamp": datetime.fromtimestamp(at_s, UTC).isoformat(),
            }
            row = {
                "session_id": f"session-{session}",
                "input_tokens_total": 64 * (call + 1),
                "prefix_tokens": 64 * call,
                "output_tokens": 9 + session % 90,
                "timing_events": [event],
            }
            file.write(json.dumps(row) + "\n")


def write_recording(path: Path, num_rows: int) -> None:
    """Writes `Recording`, with two segments per prompt."""
    log, numbers = TrafficLog(), count()
    for times, prompts, outputs in drawn(num_rows):
        for time_s, prompt, output in zip(times, prompts, outputs, strict=True):
            segments = (Segment(prompt, 16), Segment(output, 8))
            request = Request(next(numbers), time_s, Prompt(prompt + 23, segments), max_tokens=output)
            log.add(request, output, time_s)
    write_table(log.table({}), path)


FORMATS = {
    ".weka.jsonl": Format(partial(WekaJsonl, arrivals=Poisson(rate_per_s=1.0)), write_weka),
    ".tracelab.jsonl": Format(TraceLabJsonl, write_tracelab),
    ".recording": Format(Recording, write_recording),
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--file"]:
        print(*measure(Path(sys.argv[2]), FORMATS))
    else:
        rows = [int(float(number)) for number in sys.argv[1:]] or [100_000, 1_000_000]
        main(rows, FORMATS, "experiments.bench.session_traces")
