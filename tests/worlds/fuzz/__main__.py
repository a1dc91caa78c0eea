"""Runs random worlds of the whole configuration space, and shrinks those that fail a check.

python -m tests.worlds.fuzz                       # 100 worlds from seed 0
python -m tests.worlds.fuzz seeds=5000 count=1000 seconds=600
python -m tests.worlds.fuzz seed=5017             # one world again, shrunk if it fails
"""

from __future__ import annotations

import sys
import time

from tests.worlds.fuzz.drawing import as_list
from tests.worlds.fuzz.fuzzing import Tally, fuzz_one, shrunk

USUAL = {"seeds": 0, "count": 100, "seconds": 0}


def main(arguments: list[str]) -> int:
    """Runs the worlds that the arguments name; returns 1 if one failed."""
    try:
        options = USUAL | {key: int(value) for key, value in (text.split("=") for text in arguments)}
    except ValueError:
        options = {}
    if not options or set(options) - {*USUAL, "seed"}:
        print(__doc__, file=sys.stderr)
        return 2
    seeds = range(options["seeds"], options["seeds"] + options["count"])
    if "seed" in options:
        seeds = range(options["seed"], options["seed"] + 1)
    tally, begin_s = Tally(), time.monotonic()
    for seed in seeds:
        if options["seconds"] and time.monotonic() - begin_s > options["seconds"]:
            break
        found = fuzz_one(seed, tally)
        if found is not None:
            world, finding = shrunk(found) if "seed" in options else found
            print(
                f"seed={seed}: {finding}\n  windtunnel simulate {' '.join(map(repr, as_list(world)))}",
                flush=True,
            )
    print(tally)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
