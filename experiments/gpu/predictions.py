"""The simulator beside measurements: the config of the GPU's hardware, and the module that simulates."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from experiments.gpu.record import UnavailableError

HARDWARE = {
    "H100 PCIe": "h100_pcie",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "A100": "a100_80gb_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "L40S": "l40s",
    "RTX 3090": "rtx_3090",
    "RTX 4090": "rtx_4090",
    "RTX 5090": "rtx_5090",
    "MI300X": "mi300x",
    "MI325X": "mi325x",
    "MI355X": "mi355x",
}
"""Configs of hardware by a part of the name that torch reports."""


def hardware_of(device: torch.device) -> str:
    """Returns the config of a device; of a CPU, in a dry run, that of an H100. Raises UnavailableError."""
    if device.type == "cpu":
        return "h100_sxm"
    name = torch.cuda.get_device_name(device)
    found = next((config for part, config in HARDWARE.items() if part in name), None)
    if found is None:
        raise UnavailableError(f"no config of hardware is known for {name}")
    return found


def simulation() -> ModuleType:
    """Returns `speculation_simulated`. Raises UnavailableError where libraries of it are missing."""
    try:
        return importlib.import_module("experiments.gpu.speculation_simulated")
    except ImportError as error:
        raise UnavailableError(f"the simulator's libraries are missing: {error}") from error
