"""Seconds of every operator on a GPU: a step runs once, its calls are recorded and timed by operator.

Calls of different layers have their own weights and KV, so that the L2 cache holds nothing for the next call.
Short calls are timed in CUDA graphs (`experiments.calibrate.engine.timing`), because the launch from Python
counts as host time. The time of a decode step beyond its operators is called "inputs".

Written for torch 2.11; it has not run on a GPU yet.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from experiments.calibrate.engine.grids import Point
from experiments.calibrate.engine.measure import Progress, Sections, Total
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import Chunk, Step
from experiments.calibrate.engine.timing import synchronize, timed, wall_s
from experiments.calibrate.engine.watch import HEAD, INPUTS, Catcher

LAYERS_TIMED = 6
REP_MS = 20.0
BY_ROWS = (HEAD, "sampler")
ATTENTION = ("decode_attention", "prefill_attention")
REPEATS = 9
LAUNCHED_TOKENS = 48
"""Tokens of a step whose launch is measured: so few that the device does not hold up the host."""


@torch.inference_mode()  # the calls were recorded in this mode, and some write in place
def measure_sections(served: Served, points: Sequence[Point], progress: Progress) -> list[Sections]:
    """Times the operators of every point, in seconds.

    An operator whose time depends only on the number of tokens is timed once per size.
    """
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
    largest.seconds.setdefault(INPUTS, inputs_s)  # tiny kernels, whose time does not depend on the size
    return found


def _whole_s(served: Served, step: Step) -> float:
    """Times a whole step until the device has finished, in wall seconds.

    Each run has its own input, because a decode step writes into it.
    """
    works = iter([served.work(step) for _ in range(REPEATS + 1)])
    return wall_s(lambda: served.plain.run(next(works)), served.device, REPEATS)


def measure_launches(served: Served) -> float:
    """Measures the host seconds to launch a step with a chunk of a prompt, as in service.

    Decodes are one launch of a CUDA graph; other steps have a launch per kernel, or per piece between two
    attentions.
    """
    step = Step(contexts=(64,) * min(8, served.padding.slot - 1), chunks=(Chunk(0, LAUNCHED_TOKENS),))
    found = []
    for work in [served.work(step) for _ in range(REPEATS + 1)]:
        synchronize(served.device)
        begin = time.perf_counter()
        served.plain.run(work)
        found.append(time.perf_counter() - begin)
    synchronize(served.device)
    return statistics.median(found[1:])


def measure_totals(served: Served, steps: Sequence[Step]) -> list[Total]:
    """Times whole steps; the spread of repetitions is not measured and set to 0."""
    return [Total(step, _whole_s(served, step), 0.0) for step in steps]


def _calls(served: Served, step: Step) -> dict[str, tuple[int, list[Callable[[], Any]]]]:
    """Returns for each operator how often a step calls it, and some of its calls.

    A decode step has the rows of the CUDA graph that serves it, with its padding, but runs call by call.
    """
    catcher = Catcher(LAYERS_TIMED)
    served.watched.watch = catcher
    try:
        served.executor.run(replace(served.work(step), size=None))
    finally:
        served.watched.watch = None
    calls = {name: (catcher.counts[name], each) for name, each in catcher.calls.items()}
    return calls | _ends(served, step)


def _ends(served: Served, step: Step) -> dict[str, tuple[int, list[Callable[[], Any]]]]:
    """Returns the calls that no hook records: the embedding with the first norm, the head with the last."""
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
