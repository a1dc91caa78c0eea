"""Describes the environment of a GPU run: versions, GPU, clocks as found, and a hash of the sources.

`python -m experiments.gpu.environment cuda` prints it as JSON: the process that starts the parts must not
hold the GPU itself.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "kernels",
    "realengine",
    "policies",
    "sim",
    "hwmodels",
    "experiments/gpu",
    "experiments/calibrate",
    "experiments/validate",
)
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "simpy",
    "hydra-core",
    "plotly",
    "transformers",
    "safetensors",
    "tokenizers",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)
QUERIED = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "power.limit",
    "power.draw",
    "temperature.gpu",
    "ecc.mode.current",
    "mig.mode.current",
)


def main(device: str) -> int:
    """Prints the environment as JSON; returns 1 if the device is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        print("torch", torch.__version__, "finds no GPU", file=sys.stderr)
        return 1
    print(json.dumps(described(device)))
    return 0


def described(device: str) -> dict[str, Any]:
    """Returns the machine, the versions and the hash of the sources."""
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "properties": _properties() if device == "cuda" else {},
        "as_found": _as_found() if device == "cuda" else {},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "packages": {name: _version(name) for name in PACKAGES},
        "processors": os.cpu_count(),
        "platform": platform.platform(),
        "commit": _commit(),
        "sources_sha256": sources_sha256(ROOT),
    }


def sources_sha256(root: Path) -> str:
    """Computes one hash of all measured sources, which also works without a repository."""
    total = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


def _properties() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    driver = triton.runtime.driver.active.get_current_target()
    return {
        "capability": f"{found.major}.{found.minor}",
        "target": f"{driver.backend} {driver.arch}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "free_bytes": torch.cuda.mem_get_info()[0],
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def _as_found() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={','.join(QUERIED)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    values = done.stdout.strip().split("\n")[0].split(", ")
    if done.returncode or len(values) != len(QUERIED):
        return {"nvidia-smi": (done.stdout + done.stderr).strip()[-300:]}
    return dict(zip(QUERIED, values, strict=True))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit, with a trailing `+` if tracked files are changed; None without a repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    head, changed = (
        subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    if head.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
