"""Latencies of `windtunnel serve` against those of `windtunnel simulate`, on the same requests.

    python -m experiments.bench.serve --rate 10 50 200 100 --output 64 64 64 205 --repeats 3 -- replicas=8

The server runs in another process; this one sends the requests as `windtunnel observe` does. Printed are, for
TTFT, TPOT and E2E: the simulated mean and by how much that at the client differs; how late the client sees
the tokens of a scripted server that only streams at set times (its own time and that of the connection), and
the difference without it, which is the server's; the p99; the server's CPU time per token; how late its clock
was at most; and the load average of the machine. Server and client need a core each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from experiments.app.terminal import plain_table, terminal_console
from experiments.observe.session import Observed, observe
from experiments.observe.settings import ObserveSettings
from experiments.observe.tables import records_of
from sim import simulate
from sim.metrics.dialects import MetricsSettings
from sim.metrics.measured import measure
from sim.metrics.summary import request_figures
from sim.records.requests import Status
from sim.workload.arrivals import Poisson
from sim.workload.distributions import Lengths, Lognormal
from sim.workload.synthetic import Synthetic

LATENCIES = ("ttft", "tpot", "e2e")
STOP_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures each rate and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", type=float, nargs="*", default=[10.0, 50.0, 200.0], help="requests/s")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the arrivals at each rate")
    parser.add_argument("--prompt", type=float, default=512, help="mean prompt tokens")
    parser.add_argument(
        "--output",
        type=float,
        nargs="*",
        default=[64.0],
        help="mean output tokens; one for all rates or each",
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="runs of each row; the one with the lowest TTFT is shown"
    )
    parser.add_argument("overrides", nargs="*", help="settings of the scenario")
    given = parser.parse_args(arguments)
    outputs = given.output * len(given.rate) if len(given.output) == 1 else given.output
    if len(outputs) != len(given.rate):
        parser.error(
            f"--output: has {len(outputs)} values; give one, or one for each of {len(given.rate)} rates"
        )
    rows: list[list[str]] = [
        [
            *(
                "requests/s",
                "streams",
                "latency",
                "mean ms",
                "client",
                "own ms",
                "server",
                "p99 ms",
                "client",
            ),
            *("us/token", "late ms", "load"),
        ]
    ]
    for rate, output_tokens in zip(given.rate, outputs, strict=True):
        workload = Synthetic(
            arrivals=Poisson(rate_per_s=rate),
            lengths=Lengths(
                prompt_tokens=Lognormal(mean=given.prompt, cv=0.5),
                output_tokens=Lognormal(mean=output_tokens, cv=0.5),
            ),
            duration_s=given.seconds,
        )
        rows += compare(workload, given.overrides, f"{rate:g}", given.repeats)
    terminal_console().print(plain_table(rows))


def compare(
    workload: Synthetic, overrides: Sequence[str], label: str, num_repeats: int = 1
) -> list[list[str]]:
    """Serves and simulates a workload; returns a row per latency.

    num_repeats: runs of the server, and of the scripted one. Those with the lowest mean TTFT count, as other
    programs of the machine only add to it.
    """
    summary = simulate(*overrides, workload=workload).summary
    runs = [_served(workload, overrides) for _ in range(num_repeats)]
    found, used_s, late_s, num_tokens = min(runs, key=lambda run: run[0]["ttft"]["mean_s"])
    shares = [client_share(workload, summary) for _ in range(num_repeats)]
    own = min(shares, key=lambda share: share["ttft"])
    rows = []
    for name in LATENCIES:
        cells = [label, f"{found['streams']:.0f}", name.upper()]
        for statistic in ("mean_s", "p99_s"):
            seen_s, simulated_s, own_s = found[name][statistic], summary[name][statistic], own[name]
            cells += [f"{1e3 * simulated_s:.2f}", _difference(seen_s, simulated_s)]
            if statistic == "mean_s":
                cells += [f"{1e3 * own_s:.2f}", _difference(seen_s - own_s, simulated_s)]
        load = f"{os.getloadavg()[0]:.1f}"
        rows.append([*cells, f"{1e6 * used_s / num_tokens:.0f}", f"{1e3 * late_s:.0f}", load])
    return rows


def _served(workload: Synthetic, overrides: Sequence[str]) -> tuple[dict[str, Any], float, float, int]:
    """Returns the figures at the client, the CPU seconds and lateness of the server, and the tokens."""
    with serving(*overrides) as server:
        began_s = server.cpu_s()
        observed = _observe(server.url, workload)
        used_s = server.cpu_s() - began_s
        late_s = server.metrics()["windtunnel:serve_max_late_seconds"]
    num_tokens = sum(reply.num_tokens for reply in observed.load.replies)
    return figures_of(observed), used_s, late_s, num_tokens


def _observe(url: str, workload: Synthetic) -> Observed:
    """Sends the workload; garbage is not collected meanwhile, as the pauses would count as latencies."""
    gc.collect()
    gc.disable()
    try:
        return asyncio.run(observe(ObserveSettings(url=url, workload=workload)))
    finally:
        gc.enable()


def client_share(workload: Synthetic, summary: Mapping[str, Any]) -> dict[str, float]:
    """Returns by how many seconds the client sees each mean latency of a scripted server too late.

    The server streams outputs with the given mean TTFT and TPOT and does nothing else. It is told to send
    half a millisecond early, as its timers are up to one millisecond late.
    """
    first_s, gap_s = summary["ttft"]["mean_s"], summary["tpot"]["mean_s"]
    command = [sys.executable, "-m", "experiments.observe.scripted_server"]
    command += ["--first-s", str(first_s - 0.0005), "--gap-s", str(gap_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            observed = _observe(url, workload)
        finally:
            server.terminate()
    found = figures_of(observed)
    lengths = [reply.num_tokens for reply in observed.load.replies if reply.status is Status.finished]
    scripted_s = {"ttft": first_s, "tpot": gap_s, "e2e": first_s + gap_s * (mean(lengths) - 1)}
    return {name: found[name]["mean_s"] - scripted_s[name] for name in LATENCIES}


def _difference(seen_s: float, simulated_s: float) -> str:
    return f"{100 * (seen_s / simulated_s - 1):+.1f} %"


def figures_of(observed: Observed) -> dict[str, Any]:
    """Returns the latencies that the client has seen, and the mean number of open streams."""
    load = observed.load
    records = records_of(load.replies, load.end_s, interrupted=False)
    measured = measure(records, MetricsSettings(), None)
    return {"streams": measured.table["e2e_s"].sum() / load.end_s, **request_figures(records, measured, None)}


@dataclass(frozen=True, slots=True)
class Server:
    """A server in another process, and the folder of its run."""

    url: str
    process: subprocess.Popen[str]
    folder: Path

    def stop(self) -> None:
        """Ends the server, which writes its run folder."""
        self.process.terminate()
        self.process.communicate(timeout=STOP_S)

    def cpu_s(self) -> float:
        """Returns the CPU seconds that the process has used since its start (Linux)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Returns the resident memory of the process (Linux)."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Returns the sums of the metrics by name, and those of buckets without other labels by name{le}."""
        # The address is that of the server which this program has started.
        with urlopen(f"{self.url}/metrics") as response:  # nosec B310
            text = response.read().decode()
        found: defaultdict[str, float] = defaultdict(float)
        for name, labels, value in re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
            bucket = re.fullmatch(r'le="([^"]+)"', labels)
            found[f"{name}{{{bucket[1]}}}" if bucket else name] += float(value)
        return dict(found)


@contextmanager
def serving(*overrides: str) -> Iterator[Server]:
    """Starts `windtunnel serve` on a free port; it ends, and its run folder is gone, afterwards."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.app.cli", "serve", "port=0", "output.report=false"]
        process = subprocess.Popen(
            [*command, *overrides, f"hydra.run.dir={folder}"], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        server = Server(process.stdout.readline().split()[0], process, Path(folder))
        try:
            yield server
        finally:
            if process.poll() is None:
                server.stop()


if __name__ == "__main__":
    main()
