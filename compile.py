"""Compiles the modules in which a simulation spends its time with mypyc: `make compiled`.

The compiled modules lie beside their sources and are imported instead of them; results are bit-identical. The
sources stay plain Python: the attributes that mypyc needs are written into a copy.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from mypyc.build import mypycify
from setuptools import setup

# The path of a request: its engine, cache, iteration times and records. Policies stay interpreted, because
# users subclass them, and so do settings, whose class variables subclasses change. Everything else takes
# little time.
MODULES = (
    "policies/core/*.py",
    "policies/speculation/engine/*.py",
    *(f"policies/caching/{name}.py" for name in ("pool", "prefix_pool", "runs", "content", "pins")),
    *("hwmodels/iterations/decodes.py", "hwmodels/assembly/whole_batches.py", "hwmodels/by_count.py"),
    *(f"sim/engine/{name}.py" for name in ("replica", "recorder", "intake", "polled_intake", "running_step")),
    *(f"sim/engine/{name}.py" for name in ("load_counts", "engine_loop")),
    *(f"sim/engine/{name}.py" for name in ("clock", "iteration_times", "shape", "last_tokens")),
    "sim/engine/pipelined_replica.py",
    *(f"sim/speculation/{name}.py" for name in ("replica", "recorder", "log")),
    *("hwmodels/iterations/equal_passes.py", "hwmodels/speculation/leaps.py"),
    "sim/cluster/gateway.py",
    *(f"sim/records/{name}.py" for name in ("events", "event_rows", "iterations", "requests")),
)
LEFT_OUT = ("__init__.py", "sequence_view.py", "waiting.py", "core.py", "async_core.py")
"""Not compiled: policies' views of a sequence are only declarations, the queue compares tuples by identity,
while compiled code creates tuples anew, and an engine that speculates has two base classes.
"""
ROOT = Path(__file__).resolve().parent
COPY = ROOT / "build" / "compiled"

ATTRIBUTES = "@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)\n"
EXTENDED = (
    *("EngineBase", "TransferringEngine", "EngineCore", "AsyncEngineCore"),
    *("EngineState", "BlockPool", "PrefixPool", "RequestLog"),
)
"""Classes that interpreted classes extend. Their methods are looked up at every call, which would cost a
tenth of a run for all classes. mypyc skips the `__init__` of a class that is only serializable."""

FUTURE = "from __future__ import annotations\n"


def annotated(source: str) -> str:
    """Returns the source of a module with the attributes that mypyc needs at classes that are extended."""
    marked = re.sub(rf"^class (?:{'|'.join(EXTENDED)})\b", rf"{ATTRIBUTES}\g<0>", source, flags=re.MULTILINE)
    if marked == source:
        return source
    return marked.replace(FUTURE, f"{FUTURE}\nfrom mypy_extensions import mypyc_attr\n", 1)


def main() -> None:
    """Copies the packages, compiles MODULES with mypyc, and puts the extensions beside the sources."""
    shutil.rmtree(COPY, ignore_errors=True)
    for package in ("policies", "hwmodels", "sim"):
        shutil.copytree(ROOT / package, COPY / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    os.chdir(COPY)
    paths = [path for pattern in MODULES for path in sorted(Path().glob(pattern))]
    files = [str(path) for path in paths if path.name not in LEFT_OUT]
    for name in files:
        Path(name).write_text(annotated(Path(name).read_text()))
    # A fused multiply-add would round once, while the interpreter rounds twice.
    os.environ["CFLAGS"] = "-ffp-contract=off"
    options = ["--follow-imports=silent", "--ignore-missing-imports"]
    setup(
        name="windtunnel-compiled",
        packages=[],
        ext_modules=mypycify([*options, *files]),
        script_args=["--quiet", "build_ext", "--inplace"],
    )
    for path in COPY.rglob("*.so"):
        if "build" not in path.relative_to(COPY).parts:
            shutil.copy2(path, ROOT / path.relative_to(COPY))


if __name__ == "__main__":
    main()
