"""Reads clocks, power and temperature of the GPU while a part runs, from nvidia-smi."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PERIOD_MS = 500
SENSORS = {
    "clocks.sm": ("sm_clock_mhz", "MHz"),
    "clocks.mem": ("memory_clock_mhz", "MHz"),
    "power.draw": ("power_w", "W"),
    "temperature.gpu": ("temperature_c", "°C"),
}
"""Names of nvidia-smi, with the names of our fields and their units."""


@contextmanager
def sampled(file: Path) -> Iterator[None]:
    """Writes a line of readings to a file every PERIOD_MS; writes none where nvidia-smi is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    query = [f"--query-gpu={','.join(SENSORS)}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}"]
    with file.open("w") as lines:
        process = subprocess.Popen(
            [tool, *query], stdin=subprocess.DEVNULL, stdout=lines, stderr=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def readings(file: Path) -> dict[str, Any]:
    """Returns minimum, median and maximum of each sensor; a sensor without a number is left out."""
    found: dict[str, list[float]] = {name: [] for name, _ in SENSORS.values()}
    if not file.exists():
        return {}
    for line in file.read_text().splitlines():
        for (name, _), text in zip(SENSORS.values(), line.split(", "), strict=False):
            with suppress(ValueError):  # [N/A], or the last line, which may be torn
                found[name].append(float(text))
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in found.items()
        if values
    }


def in_words(sensors: dict[str, Any]) -> str:
    """Returns the readings in one line: "clocks.sm 1980 MHz (1755 to 1980)"; empty if there are none."""
    return ", ".join(
        f"{label} {values['median']:.0f} {unit} ({values['min']:.0f} to {values['max']:.0f})"
        for label, (name, unit) in SENSORS.items()
        if (values := sensors.get(name))
    )
