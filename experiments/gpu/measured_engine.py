"""An engine whose construction is a row of its own, so that one that cannot be built costs no other rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from experiments.gpu.engine_models import served
from experiments.gpu.record import Record
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM

ENGINE_S = 20.0  # an engine is not built with less time left than this
START_S = 60.0  # target of a start, random weights included


@contextmanager
def measured_engine(record: Record, name: str, spec: Architecture, **settings: Any) -> Iterator[LLM | None]:
    """Yields an engine with random weights; None if it cannot be built or no time is left."""
    if record.left_s < (0.0 if record.quick else ENGINE_S):
        record.not_measured.append(f"{name}/build")
        yield None
        return
    begin, llm, failure = time.perf_counter(), None, None
    with ExitStack() as stack:
        try:
            llm = stack.enter_context(served(spec, record.device, **settings))
        except Exception as error:  # the other engines are measured
            failure = error
        parts_s = {} if llm is None else llm.engine.start_s
        record.measure(f"{name}/build", partial(_built, time.perf_counter() - begin, parts_s, failure))
        yield llm


def _built(seconds: float, parts_s: dict[str, float], failure: Exception | None) -> dict[str, Any]:
    if failure is not None:
        raise failure
    parts = "".join(f"; {what.lower()} {part_s:.1f} s" for what, part_s in parts_s.items())
    target = {"target": START_S, "reached": seconds, "met": seconds <= START_S}
    return {"seconds": seconds, "parts_s": parts_s, **target, "said": f"{seconds:.1f} s{parts}"}
