"""The parts of the GPU run in their order, and the share of the time that each may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the GPU run: `run(record)` of experiments.gpu.<module>.

    share: relative share of a call's time; time that a part leaves goes to later parts. least_s: with fewer
    seconds left than this it is not begun. needs: parts that run before it unless the results folder holds
    them. if_asked: it runs only if it is named.
    """

    module: str
    about: str
    share: float
    least_s: float
    needs: tuple[str, ...] = ()
    if_asked: bool = False


PARTS: Mapping[str, Part] = {
    "limits": Part(
        "limits",
        "limits of the GPU: copies, reads, matrix products, launches, transfers",
        share=40,
        least_s=15,
    ),
    "compile": Part(
        "compiling",
        "all kernels compiled in parallel: registers, spills; later parts find them in Triton's cache",
        share=55,
        least_s=15,
    ),
    "kernels_correct": Part(
        "kernels_correct",
        "kernels against their references: tests/kernels on the device, and at real models' sizes",
        share=125,
        least_s=30,
    ),
    "kernels_speed": Part(
        "kernels_speed",
        "speed of the kernels relative to this run's limits and to torch's kernels",
        share=110,
        least_s=30,
        needs=("limits", "compile"),
    ),
    "tiles": Part(
        "tiles", "other tile sizes than those in the launch tables", share=50, least_s=30, needs=("limits",)
    ),
    "engine_correct": Part(
        "engine_correct",
        "the engine's tokens: kernels against torch, graphs and overlap on and off",
        share=45,
        least_s=30,
    ),
    "engine_llama_8b": Part(
        "engine_speed",
        "decode, prefill, idle gaps and a public workload at Llama-3.1-8B's sizes",
        share=75,
        least_s=40,
        needs=("limits",),
    ),
    "engine_qwen3_0_6b": Part(
        "engine_speed",
        "decode, prefill, idle gaps and a public workload at Qwen3-0.6B's sizes",
        share=45,
        least_s=30,
        needs=("limits",),
    ),
    "engine_peer": Part(
        "engine_peer", "transformers' continuous batching compared with the engine", share=60, least_s=40
    ),
    "speculation_correct": Part(
        "speculation_correct",
        "greedy tokens with every way to draft, against the engine without speculation",
        share=90,
        least_s=30,
        if_asked=True,
    ),
    "speculation_kernels": Part(
        "speculation_kernels",
        "attention of passes with 1 to 8 draft tokens, and acceptance, relative to this run's bandwidth",
        share=110,
        least_s=30,
        needs=("limits",),
        if_asked=True,
    ),
    "speculation_speed": Part(
        "speculation_speed",
        "speed-up by drafts that a coin accepts, at Llama-3.1-8B's sizes, against the hardware models",
        share=200,
        least_s=60,
        if_asked=True,
    ),
    "calibrate_llama_8b": Part(
        "calibrating",
        "operator times under our engine, fitted into tables, at Llama-3.1-8B's sizes",
        share=180,
        least_s=60,
        if_asked=True,
    ),
    "validate_llama_8b": Part(
        "validating",
        "runs of our engine, recorded and simulated: loads, policies, kinds of workload",
        share=220,
        least_s=60,
        needs=("calibrate_llama_8b",),
        if_asked=True,
    ),
    "calibrate_llama_1b": Part(
        "calibrating", "like calibrate_llama_8b, at Llama-3.2-1B's sizes", share=70, least_s=40, if_asked=True
    ),
    "validate_llama_1b": Part(
        "validating",
        "like validate_llama_8b, at Llama-3.2-1B's sizes",
        share=70,
        least_s=40,
        needs=("calibrate_llama_1b",),
        if_asked=True,
    ),
}


def named(word: str) -> list[str]:
    """Returns the parts with that name or prefix: `engine` names every part that begins with `engine_`."""
    return [name for name in PARTS if name == word or name.startswith(f"{word}_")]


def in_order(words: Sequence[str], done: Sequence[str] = ()) -> list[str]:
    """Returns the requested parts and those that they need, in the order of PARTS.

    No words: all parts but those marked if_asked. Parts in `done` are not added as needs.
    """
    usual = {name for name, part in PARTS.items() if not part.if_asked}
    wanted = {name for word in words for name in named(word)} if words else usual
    wanted |= {need for name in wanted for need in PARTS[name].needs if need not in done}
    return [name for name in PARTS if name in wanted]


def limit_s(name: str, later: Sequence[str], left_s: float) -> float:
    """Returns the seconds that a part may take of left_s, its share among itself and the `later` parts."""
    shares = PARTS[name].share + sum(PARTS[other].share for other in later)
    return left_s * PARTS[name].share / shares
