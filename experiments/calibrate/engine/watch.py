"""A decoder that reports every operator that it runs to a watch.

On a CPU, a stopwatch reads the thread time after each operator in the middle of real steps, so that the CPU
caches are in the state that they have in service. The time between two operators (views, Python) counts for
the second one. Watching an operator adds 5 to 10 us, because the watch itself is not in the caches;
`experiments.calibrate.engine.measure` subtracts it. On a GPU, where the host runs ahead, the calls are
recorded and timed one by one later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from realengine.model.backend import Backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.linear import Linear
from realengine.model.moe import Experts
from realengine.runner.batch import Batch

INPUTS = "inputs"
"""Work of the executor before the first layer."""
OUTPUTS = "outputs"
"""Work after sampling."""
HEAD = "lm_head"
"""Last norm and LM head of the sampled rows."""


class Watch(Protocol):
    """Observer of operators by name."""

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs an operator and returns its result."""
        ...

    def mark(self, name: str) -> None:
        """Assigns the time since the previous mark to this operator."""
        ...


class Stopwatch:
    """Thread time in seconds by operator since `start`; marks: number of marks by operator."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Resets the times and starts measuring."""
        self.seconds: dict[str, float] = {}
        self.marks: dict[str, int] = {}
        self._last_s = time.thread_time()

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        self.mark(name)
        return result

    def mark(self, name: str) -> None:
        now_s = time.thread_time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self.marks[name] = self.marks.get(name, 0) + 1
        self._last_s = now_s


class Catcher:
    """Recorder of calls with their arguments, to be timed later; limit: recorded calls per operator."""

    def __init__(self, limit: int) -> None:
        self.calls: dict[str, list[Callable[[], Any]]] = {}
        self.counts: dict[str, int] = {}
        """Number of all calls by operator, recorded or not."""
        self._limit = limit

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        calls = self.calls.setdefault(name, [])
        self.counts[name] = self.counts.get(name, 0) + 1
        if len(calls) < self._limit:
            kept = {key: _kept(value) for key, value in options.items()}
            calls.append(partial(function, *map(_kept, args), **kept))
        return function(*args, **options)

    def mark(self, name: str) -> None:
        pass


def _kept(value: Any) -> Any:
    """Copies index tensors, alone or in a NamedTuple, because a decode step increments contexts in place."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_kept, value))
    is_index = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return value.clone() if is_index else value


class Watched:
    """Holder of the current watch, which may change; without one, operators run unwatched."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.in_head = False

    def call(self, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs an operator, watched if there is a watch."""
        if self.watch is None:
            return function(*args, **options)
        return self.watch.call(name, function, *args, **options)

    def mark(self, name: str) -> None:
        if self.watch is not None:
            self.watch.mark(name)

    def backend(self, backend: Backend) -> Backend:
        """Returns the backend with watched operators; operators that linear layers call stay unwatched."""

        def norm(*args: Any, **options: Any) -> Any:
            return self.call(HEAD if self.in_head else "layernorm", backend.add_rms_norm, *args, **options)

        def greedy(logits_SV: torch.Tensor) -> Any:
            self.mark(HEAD)
            return self.call("sampler", backend.greedy, logits_SV)

        def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            return partial(self.call, name, function)

        return backend._replace(
            rms_norm=watched("embedding", backend.rms_norm),
            add_rms_norm=norm,
            qk_norm=watched("qk_norm", backend.qk_norm),
            rope_and_write_kv=watched("rope_and_write_kv", backend.rope_and_write_kv),
            decode_attention=watched("decode_attention", backend.decode_attention),
            prefill_attention=watched("prefill_attention", backend.prefill_attention),
            silu_mul=watched("activation", backend.silu_mul),
            greedy=greedy,
        )


class WatchedDecoder(Decoder):
    """Decoder whose linear layers, experts and head are watched as well."""

    def __init__(self, watched: Watched, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.watched = watched

    def sampled_states(self, batch: Batch, cache: KvCache) -> torch.Tensor | None:
        """Computes the final hidden states of the sampled rows."""
        self.watched.in_head = False
        self.watched.mark(INPUTS)
        return super().sampled_states(batch, cache)

    def _linear(self, at: tuple[int, str], linear: Linear, x_TK: torch.Tensor, batch: Batch) -> torch.Tensor:
        _, name = at
        out_TN: torch.Tensor = self.watched.call(name, super()._linear, at, linear, x_TK, batch)
        return out_TN

    def mlp(self, index: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Computes the MLP or the experts of a layer."""
        if isinstance(self._layers[index].mlp, Experts):
            out_TH: torch.Tensor = self.watched.call("experts", super().mlp, index, hidden, batch)
        else:
            out_TH = super().mlp(index, hidden, batch)
        self.watched.in_head = index == self.architecture.num_layers - 1
        return out_TH
