"""The parts of the GPU run, in their order, and how the time of a call is shared among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """One part: `run(record)` of experiments.gpu.<module>.

    share: of a call's time, relative to the other parts' shares; what one leaves, the later ones get.
    least_s: with less time than this it is not begun. needs: parts that go before it where the folder of
    results has none of them. if_asked: it is not among those that run where none is named.
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
        "what the chip can do: copies, reads, matrix products, launches, transfers",
        share=40,
        least_s=15,
    ),
    "compile": Part(
        "compiling",
        "every kernel compiled on all processors: registers, spills; later parts find them compiled",
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
        "kernels against the limits of this run and against the library's own",
        share=110,
        least_s=30,
        needs=("limits", "compile"),
    ),
    "tiles": Part(
        "tiles", "other launch tables than the present ones", share=50, least_s=30, needs=("limits",)
    ),
    "engine_correct": Part(
        "engine_correct",
        "the engine's tokens: kernels against torch, graphs and overlap on and off",
        share=45,
        least_s=30,
    ),
    "engine_llama_8b": Part(
        "engine_speed",
        "decode, prefill, gaps and a public workload at Llama-3.1-8B's sizes",
        share=75,
        least_s=40,
        needs=("limits",),
    ),
    "engine_qwen3_0_6b": Part(
        "engine_speed", "the same at Qwen3-0.6B's", share=45, least_s=30, needs=("limits",)
    ),
    "engine_peer": Part(
        "engine_peer", "transformers' continuous batching beside the engine", share=60, least_s=40
    ),
    "calibrate_llama_8b": Part(
        "calibrating",
        "the machine under our engine, operator by operator, at Llama-3.1-8B's sizes",
        share=180,
        least_s=60,
        if_asked=True,
    ),
    "validate_llama_8b": Part(
        "validating",
        "runs of our engine, recorded and simulated: loads, policies, kinds of traffic",
        share=220,
        least_s=60,
        needs=("calibrate_llama_8b",),
        if_asked=True,
    ),
    "calibrate_llama_1b": Part(
        "calibrating", "as calibrate_llama_8b, at Llama-3.2-1B's", share=70, least_s=40, if_asked=True
    ),
    "validate_llama_1b": Part(
        "validating",
        "as validate_llama_8b, at Llama-3.2-1B's",
        share=70,
        least_s=40,
        needs=("calibrate_llama_1b",),
        if_asked=True,
    ),
}


def named(word: str) -> list[str]:
    """The parts of that name, or of that family: `engine` means every part that begins with `engine_`."""
    return [name for name in PARTS if name == word or name.startswith(f"{word}_")]


def in_order(words: Sequence[str], done: Sequence[str] = ()) -> list[str]:
    """The parts asked for (none: the usual ones) and those they need that are not `done`, in PARTS' order."""
    usual = {name for name, part in PARTS.items() if not part.if_asked}
    wanted = {name for word in words for name in named(word)} if words else usual
    wanted |= {need for name in wanted for need in PARTS[name].needs if need not in done}
    return [name for name in PARTS if name in wanted]


def limit_s(name: str, later: Sequence[str], left_s: float) -> float:
    """What a part may take of the time left, when the `later` ones are still to come."""
    shares = PARTS[name].share + sum(PARTS[other].share for other in later)
    return left_s * PARTS[name].share / shares
