"""The peak memory of a process."""

from __future__ import annotations

import re
import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_mib() -> float:
    """Returns the peak resident memory of this process in MiB.

    On Linux it leaves out the memory of the process that began this one, which `ru_maxrss` counts as its own.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024
