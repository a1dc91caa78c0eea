"""The steps of a GPU run in their order, each with its share of the time; this file imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A table of measurements, `module:function(run)`, which one process makes.

    share_s: seconds of a run of eight minutes. needs: a step whose results it reads, which runs before it
    unless the folder has them. is_main: whether `gpu_run main` has it; others are asked for with --only.
    """

    where: str
    share_s: float
    about: str
    needs: str = ""
    is_main: bool = True

    def table(self) -> Callable[[Any], Sequence[Any]]:
        """Imports and returns the function of the table."""
        module, _, name = self.where.partition(":")
        found: Callable[[Any], Sequence[Any]] = getattr(
            importlib.import_module(f"experiments.gpu.{module}"), name
        )
        return found


STEPS: Mapping[str, Step] = {
    "limits": Step("limits:table", 25, "the machine; rates of copies, reads and products; launches"),
    "smoke": Step("engine_speed:smoke", 40, "Qwen3-0.6B's sizes serve 16 requests, with CUDA graphs"),
    "kernels_correct": Step("kernels_correct:table", 50, "kernels against float64 at real models' sizes"),
    "engine_correct": Step("engine_correct:table", 80, "tokens of all attention kinds against torch"),
    "llama_8b": Step("engine_speed:llama_8b", 105, "Llama-3.1-8B: start, decode, prefill, host", "limits"),
    "calibrate": Step("fidelity:calibrate", 60, "operator times of Llama-3.1-8B, fitted into tables"),
    "validate": Step("fidelity:validate", 90, "a load on the engine, recorded and simulated", "calibrate"),
    "peers": Step("peers:table", 60, "torch's SDPA and transformers' batching", "limits"),
    "tiles": Step("tiles:table", 170, "neighbours of the tiles in the launch tables", "", False),
    "kernels_speed": Step("kernels_speed:table", 150, "each kernel's share of the limits", "limits", False),
    "drafts": Step("engine_correct:drafts", 100, "greedy tokens with every way to draft", "", False),
    "variants": Step("engine_speed:variants", 150, "quantised, experts, adapters, drafts", "limits", False),
    "validate_more": Step("fidelity:validate_more", 170, "loads, policies, workloads", "calibrate", False),
}


def in_order(names: Sequence[str], done: Sequence[str] = ()) -> list[str]:
    """Returns the named steps (none: those of main) and what they need that is not done, in their order."""
    wanted = set(names) or {name for name, step in STEPS.items() if step.is_main}
    wanted |= {STEPS[name].needs for name in wanted} - set(done)
    return [name for name in STEPS if name in wanted]


def limit_s(name: str, later: Sequence[str], left_s: float) -> float:
    """Returns the seconds that a step may take of left_s: its share among its own and those later.

    So the shares shrink alike if they exceed the run's time, and the rest of a step that ends early goes to
    those after it, in proportion.
    """
    return left_s * STEPS[name].share_s / (STEPS[name].share_s + sum(STEPS[other].share_s for other in later))
