"""Seconds of every operator on a GPU: a step is run once, its calls are kept, and timed one kind at a time.

Calls of different layers have weights and KV of their own, so that caches hold none of them for the next;
short ones are timed in CUDA graphs (`experiments.calibrate.engine.timing`): what Python needs to launch them
is the host's. What a step of decodes takes beyond its operators is called inputs.

Written for torch 2.11; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from experiments.calibrate.engine.grids import Point
from experiments.calibrate.engine.measure import Progress, Sections, Total
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import Step
from experiments.calibrate.engine.timing import timed, wall_s
from experiments.calibrate.engine.watch import HEAD, INPUTS, Catcher

LAYERS_TIMED = 6
REP_MS = 20.0
BY_ROWS = (HEAD, "sampler")
ATTENTION = ("decode_attention", "prefill_attention")
REPEATS = 9


@torch.inference_mode()  # as the calls were made: some write in place
def measure_sections(served: Served, points: Sequence[Point], progress: Progress) -> list[Sections]:
    """As those of a CPU. Operators that depend on tokens alone are timed where a size first comes up."""
    known: set[tuple[str, int]] = set()
    found = []
    inputs_s = 0.0
    for place, point in enumerate(points):
        progress(f"step {place + 1} of {len(points)}")
        step = point.step
        is_first = step.kind == "decode" and (HEAD, step.num_drawn) not in known
        seconds: dict[str, float] = {}
        for name, (count, calls) in _calls(served, step).items():
            key = (name, step.num_drawn if name in BY_ROWS else step.num_tokens)
            if name in ATTENTION or key not in known:
                known.add(key)
                seconds[name] = count * timed(calls, served.device, rep_ms=REP_MS).median_s
        if is_first:
            inputs_s = max(_whole_s(served, step) - sum(seconds.values()), 0.0)
            seconds[INPUTS] = inputs_s
        found.append(Sections(point, seconds))
    largest = max(found, key=lambda sections: sections.point.step.num_tokens)
    largest.seconds.setdefault(INPUTS, inputs_s)  # tiny kernels: as long for a large step as for a batch
    return found


def _whole_s(served: Served, step: Step) -> float:
    """By the wall clock, waited for. Each run has words of its own: a decode step writes into them."""
    works = iter([served.work(step) for _ in range(REPEATS + 1)])
    return wall_s(lambda: served.plain.run(next(works)), served.device, REPEATS)


def measure_totals(served: Served, steps: Sequence[Step]) -> list[Total]:
    """Whole steps; what repetitions spread by is not known."""
    return [Total(step, _whole_s(served, step), 0.0) for step in steps]


def _calls(served: Served, step: Step) -> dict[str, tuple[int, list[Callable[[], Any]]]]:
    """By operator: how often a step runs it, and some of its calls."""
    catcher = Catcher(LAYERS_TIMED)
    served.watched.watch = catcher
    try:
        served.executor.run(served.work(step))
    finally:
        served.watched.watch = None
    calls = {name: (catcher.counts[name], each) for name, each in catcher.calls.items()}
    return calls | _ends(served, step)


def _ends(served: Served, step: Step) -> dict[str, tuple[int, list[Callable[[], Any]]]]:
    """The embedding with the first norm, and the head with the last: what no hook sees."""
    table_VH, head_VH = served.weights["embedding.weight"], served.weights["head.weight"]
    norm_H = served.weights["norm.weight"]
    assert isinstance(table_VH, torch.Tensor)
    assert isinstance(head_VH, torch.Tensor)
    eps = served.architecture.rms_norm_eps
    tokens_T = torch.randint(0, len(table_VH), (step.num_tokens,), device=served.device)
    hidden_SH = torch.randn(step.num_drawn, table_VH.shape[1], dtype=table_VH.dtype, device=served.device)

    def embedding() -> Any:
        return served.backend.rms_norm(F.embedding(tokens_T, table_VH), norm_H, eps)

    def head() -> Any:
        normed_SH, _ = served.backend.add_rms_norm(hidden_SH, hidden_SH.clone(), norm_H, eps)
        return F.linear(normed_SH, head_VH)

    ends: dict[str, tuple[int, list[Callable[[], Any]]]] = {"embedding": (1, [embedding])}
    if step.num_drawn:
        ends[HEAD] = (1, [head])
    return ends
