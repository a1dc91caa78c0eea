"""Prepares the imports of vLLM and SGLang: no network, no chatter, and for SGLang a torchvision.

torch for CPUs and torchvision made for CUDA do not fit together: two of its operators are missing, and its
import fails. SGLang needs it; vLLM's dependencies import it where they find it, also in a process of their
own. So `make parity` installs it in a folder that only these tests know. No test calls the operators, so they
are declared without bodies.
"""

import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if find_spec("vllm") is not None or find_spec("sglang") is not None:
    # Without them these tests are skipped, and clients that other tests start would inherit the variables.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

FOR_SGLANG = Path(sys.prefix) / "for_sglang"

if find_spec("torch") is not None and FOR_SGLANG.is_dir():
    sys.path.append(str(FOR_SGLANG))
    torch = import_module("torch")
    try:
        import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")  # it counts for as long as it lives
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

RELEASES = []
if find_spec("vllm") is not None:
    # A package that a newer vLLM imports and the environment lacks is an error here; in a test it is a skip.
    RELEASES.append(f"vLLM {import_module('vllm').__version__}")
if find_spec("sglang") is not None:
    RELEASES.append(f"SGLang {version('sglang')}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the releases that a run was compared with."""
    if RELEASES:
        terminalreporter.write_line(f"compared with {', '.join(RELEASES)}")
