"""The parts of the GPU run in their order, and the share of the time that each may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the GPU run: `run(record)` of experiments.gpu.<module>.

    call: the call of at most nine minutes in which it runs; parts of a call fit together. share: relative
    share of a call's time; time that a part leaves goes to later parts. least_s: with fewer seconds left than
    this it is not begun. needs: parts that run before it unless the results folder holds them.
    """

    module: str
    call: int
    about: str
    share: float
    least_s: float
    needs: tuple[str, ...] = ()


PARTS: Mapping[str, Part] = {
    "limits": Part(
        "limits", 1, "limits of the GPU: copies, reads, matrix products, launches, transfers", 40, 15
    ),
    "compile": Part(
        "compiling",
        1,
        "all kernels compiled in parallel: registers, spills; later parts find them in Triton's cache",
        55,
        15,
    ),
    "kernels_correct": Part(
        "kernels_correct",
        1,
        "kernels against their references: tests/kernels on the device, and at real models' sizes",
        120,
        30,
    ),
    "engine_correct": Part(
        "engine_correct",
        1,
        "the engine's tokens: kernels against torch, graphs and overlap on and off",
        45,
        30,
    ),
    "speculation_correct": Part(
        "speculation_correct",
        1,
        "greedy tokens with every way to draft, against the engine without speculation",
        75,
        30,
    ),
    "engine_llama_8b": Part(
        "engine_speed",
        1,
        "decode, prefill, idle gaps and a public workload at Llama-3.1-8B's sizes",
        75,
        40,
        ("limits",),
    ),
    "engine_cases": Part(
        "engine_cases",
        1,
        "large, long and mixed batches, steps with prompts and decodes, and arrivals over time",
        80,
        40,
        ("limits",),
    ),
    "engine_peer": Part(
        "engine_peer", 1, "transformers' continuous batching compared with the engine", 60, 40
    ),
    "kernels_speed": Part(
        "kernels_speed",
        2,
        "speed of the kernels relative to this run's limits and to torch's kernels",
        110,
        30,
        ("limits", "compile"),
    ),
    "attention_backends": Part(
        "attention_backends",
        2,
        "attention of prompts by our kernels and by libraries: right, and its speed beside the GEMM's",
        36,
        20,
        ("limits",),
    ),
    "engine_variants": Part(
        "engine_variants",
        2,
        "decoding with quantised weights and KV, a mixture of experts, and LoRA adapters",
        90,
        40,
    ),
    "engine_qwen3_0_6b": Part(
        "engine_speed",
        2,
        "decode, prefill, idle gaps and a public workload at Qwen3-0.6B's sizes",
        45,
        25,
        ("limits",),
    ),
    "speculation_speed": Part(
        "speculation_speed",
        2,
        "speed-up by drafts that a coin accepts, at Llama-3.1-8B's sizes, against the hardware models",
        140,
        60,
    ),
    "speculation_kernels": Part(
        "speculation_kernels",
        2,
        "attention of passes with 1 to 8 draft tokens, and acceptance, relative to this run's bandwidth",
        65,
        30,
        ("limits",),
    ),
    "nccl": Part(
        "nccl", 2, "collectives in CUDA graphs on one GPU; two ranks where there are two GPUs", 18, 6
    ),
    "counters": Part(
        "counters", 2, "hardware counters of the kernels that have a target, where ncu can read them", 30, 15
    ),
    "tiles": Part("tiles", 2, "other tile sizes than those in the launch tables", 50, 30, ("limits",)),
    "calibrate_llama_8b": Part(
        "calibrating",
        3,
        "operator times under our engine, fitted into tables, at Llama-3.1-8B's sizes",
        180,
        60,
    ),
    "validate_llama_8b": Part(
        "validating",
        3,
        "runs of our engine, recorded and simulated: loads, policies, kinds of workload",
        220,
        60,
        ("calibrate_llama_8b",),
    ),
    "calibrate_llama_1b": Part("calibrating", 3, "like calibrate_llama_8b, at Llama-3.2-1B's sizes", 70, 40),
    "validate_llama_1b": Part(
        "validating", 3, "like validate_llama_8b, at Llama-3.2-1B's sizes", 70, 40, ("calibrate_llama_1b",)
    ),
}
"""In the order in which they run: the most valuable ones first."""

CALLS: Mapping[str, tuple[str, ...]] = {
    f"call{call}": tuple(name for name, part in PARTS.items() if part.call == call) for call in (1, 2, 3)
}
"""The parts of each call; together they are all parts."""


def named(word: str) -> list[str]:
    """Returns the parts of a call, or those with that name or prefix: `engine` names all `engine_...`."""
    if word in CALLS:
        return list(CALLS[word])
    return [name for name in PARTS if name == word or name.startswith(f"{word}_")]


def in_order(words: Sequence[str], done: Sequence[str] = ()) -> list[str]:
    """Returns the requested parts and those that they need, in the order of PARTS.

    No words: those of call1. Parts in `done` are not added as needs.
    """
    wanted = {name for word in words or ("call1",) for name in named(word)}
    wanted |= {need for name in wanted for need in PARTS[name].needs if need not in done}
    return [name for name in PARTS if name in wanted]


def limit_s(name: str, later: Sequence[str], left_s: float) -> float:
    """Returns the seconds that a part may take of left_s, its share among itself and the `later` parts."""
    shares = PARTS[name].share + sum(PARTS[other].share for other in later)
    return left_s * PARTS[name].share / shares
