"""CPU time and timing errors of `windtunnel observe`: `python -m experiments.bench.observe [--rate 200]`.

A scripted server in another process streams responses at known times. Printed are the client's CPU time per
chunk and as a share of the run, the delay of requests after their scheduled time, and the deviation of the
gaps between chunks from the script. Server and client need a core each; with fewer cores the gaps deviate
more, while the CPU time stays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from sim.workload.arrivals import Poisson
from sim.workload.distributions import Fixed, Lengths
from sim.workload.synthetic import Synthetic


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each rate and prints one line per rate."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.observe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, nargs="*", default=[50.0, 100.0, 200.0], help="requests/s")
    parser.add_argument("--chunks", type=int, default=50, help="chunks per response, 20 ms apart")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of the arrivals at each rate")
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "experiments.observe.scripted_server", "--gap-s", "0.02"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for rate in given.rate:
                print(measure(url, rate, given.chunks, given.seconds))
        finally:
            server.terminate()


def measure(url: str, rate_per_s: float, num_chunks: int, duration_s: float) -> str:
    """Loads the server at a rate and returns one line of figures."""
    workload = Synthetic(
        arrivals=Poisson(rate_per_s=rate_per_s),
        lengths=Lengths(prompt_tokens=Fixed(value=512), output_tokens=Fixed(value=num_chunks)),
        duration_s=duration_s,
    )
    settings = ObserveSettings(url=url, workload=workload)
    before_s, wall_s = time.process_time(), time.perf_counter()
    observed = asyncio.run(observe(settings))
    cpu_s, wall_s = time.process_time() - before_s, time.perf_counter() - wall_s
    return line(observed, rate_per_s, cpu_s, wall_s)


def line(observed: Observed, rate_per_s: float, cpu_s: float, wall_s: float) -> str:
    """Formats the figures of a run.

    cpu_s and wall_s include making the prompts and asking the server for its limits.
    """
    replies = observed.load.replies
    times_s = [reply.chunks().time_s for reply in replies]
    num_chunks = sum(map(len, times_s))
    gaps_ms = 1e3 * np.concatenate([np.diff(chunk_s) for chunk_s in times_s])
    lag_ms = 1e3 * np.array([reply.sent_s - reply.due_s for reply in replies])
    stall_ms = 1e3 * np.array(observed.load.stalls_s)
    off_ms = np.percentile(np.abs(gaps_ms - 20.0), [50, 99])
    return (
        f"{rate_per_s:g} requests/s, {num_chunks:,} chunks, {num_chunks / wall_s:,.0f} chunks/s: CPU time "
        f"{1e6 * cpu_s / num_chunks:.0f} us per chunk, {100 * cpu_s / wall_s:.0f} % of a core; send delay "
        f"p50 {np.percentile(lag_ms, 50):.2f} p99 {np.percentile(lag_ms, 99):.2f} ms; stalls p99 "
        f"{np.percentile(stall_ms, 99):.2f} ms; gap error p50 {off_ms[0]:.2f} p99 {off_ms[1]:.2f} ms"
    )


if __name__ == "__main__":
    main()
