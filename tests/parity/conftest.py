"""Prepares the imports of vLLM and SGLang: no network, no chatter, and a torchvision that can be imported.

torch for CPUs and torchvision made for CUDA do not fit together: two of its operators are missing, and its
import fails. SGLang imports it, and vLLM's dependencies do if it is there. No test calls these operators, so
they are declared without bodies.
"""

import os
from importlib import import_module
from importlib.util import find_spec

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if find_spec("torch") is not None and find_spec("torchvision") is not None:
    torch = import_module("torch")
    try:
        import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")  # it counts for as long as it lives
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
