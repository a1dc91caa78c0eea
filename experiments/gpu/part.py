"""Runs one part of the GPU run: `python -m experiments.gpu.part NAME --folder DIR ...`.

It is started by experiments.gpu_run, which kills it when its time is up. Exit status: 0 passed, 1 failed, 70
the GPU is unusable for this process and a new process may continue (`--resume`).
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.gpu.parts import PARTS
from experiments.gpu.record import Record


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the part and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.part")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args(argv)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(asked.limit_s, 1.0))  # shows in the log where it hangs
    device = torch.device(asked.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # two threads on a busy machine are ten times slower
    torch.manual_seed(asked.seed)
    record = Record(
        asked.folder / f"{asked.part}.json",
        asked.part,
        device,
        quick=asked.quick,
        limit_s=asked.limit_s,
        seed=asked.seed,
    )
    if asked.resume:
        record.resume()
    record.save("running")
    importlib.import_module(f"experiments.gpu.{PARTS[asked.part].module}").run(record)
    return 0 if record.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
