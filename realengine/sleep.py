"""The sleep mode of an engine, with vLLM's levels: the memory of its device is free for others meanwhile.

    level 1  the weights are kept in host memory, and the KV is dropped
    level 2  both are dropped, and the weights are read again at the wake-up

torch cannot free memory and get it back at the same addresses, which captured graphs hold. So an engine drops
its whole executor, and a new one is built at the wake-up, with as many KV blocks, and captures its graphs
anew. LoRA adapters and the weights of a draft are read again at both levels.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from realengine.engine import Engine
from realengine.model.quantization import Weights, weights_on
from realengine.runner.executor import Executor
from realengine.runner.runner import Runner

LEVELS = (1, 2)


class SleepMode:
    """Puts an engine to sleep, and wakes it, while it has no requests; called in the engine's thread.

    build: builds an executor with weights in host memory, or with those of the checkpoint. new_runner: makes
    the engine's runner of an executor. Nothing else may refer to the executor or to its runner.
    """

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        build: Callable[[Weights | None], Executor],
        new_runner: Callable[[Executor], Runner],
    ) -> None:
        self._engine = engine
        self._executor: Executor | None = executor
        self._build = build
        self._new_runner = new_runner
        self._weights: Weights | None = None

    def sleep(self, level: int) -> None:
        """Frees the memory of the device, and empties the prefix cache; does nothing while it sleeps."""
        engine, executor = self._engine, self._executor
        if executor is None:
            return
        assert not engine.num_unfinished
        engine.step()  # reads the last launch, and makes the copies that are due
        engine.core.block_pool.clear_cache()
        if level == 1:
            assert executor.weights is not None
            self._weights = weights_on(executor.weights, torch.device("cpu"))
        self._executor = None
        del engine.runner  # a step before the wake-up would be an error
        device = executor.device
        executor.release()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Builds a new executor; does nothing in an engine that is awake.

        Raises ValueError or RuntimeError, such as for memory that others have taken; it sleeps on then.
        """
        if self._executor is not None:
            return
        executor = self._build(self._weights)
        self._engine.runner = runner = self._new_runner(executor)
        residents = self._engine.core.residents
        for name in [] if residents is None else sorted(residents.resident):
            assert residents is not None
            slot = residents.slot_of(name)
            assert slot is not None
            runner.load_adapter(name, slot)
        self._executor, self._weights = executor, None
