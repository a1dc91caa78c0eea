"""Serving inside an asyncio program: outputs stream while other requests come and go.

    async with AsyncLLM("smollm2", device="cpu") as llm:
        async for output in llm.generate("The capital of France is", output_kind="delta"):
            print(output.outputs[0].text, end="")

Callers are coroutines, in any number of event loops and threads; engine_thread.py drives the engine.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from realengine.build import build
from realengine.model.architecture import Architecture
from realengine.serving.engine_thread import EngineThread, Stream
from realengine.serving.forms import Forms
from realengine.serving.llm import RequestOutput
from realengine.serving.model import Model
from realengine.serving.output_reader import OutputReader
from realengine.serving.sampling_params import SamplingParams
from realengine.serving.warm_up import PARAMS as WARM_UP_PARAMS
from realengine.serving.warm_up import SALT as WARM_UP_SALT
from realengine.serving.warm_up import warm_up_prompt
from realengine.settings import EngineSettings
from realengine.sleep import LEVELS, SleepMode

OnFull = Literal["wait", "reject"]
OutputKind = Literal["cumulative", "delta", "final_only"]
SleepWhen = Literal["abort", "wait"]


class AsyncLLM:
    """A model and the engine that serves it, in its own thread.

    model, settings: as for `LLM`. max_waiting: maximum number of requests in the engine's queue. on_full:
    treatment of more requests: "wait" queues them, first come, first served; "reject" raises QueueFullError.
    engine: owned by its thread; it may be read, but not called.
    """

    def __init__(
        self,
        model: str | Path | Architecture | Model,
        *,
        max_waiting: int = 1024,
        on_full: OnFull = "wait",
        **settings: Any,
    ) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting={max_waiting}: must be >= 1")
        check_choice("on_full", on_full, get_args(OnFull))
        checked = EngineSettings(**settings)
        served = Model.of(model)
        self.architecture = served.architecture
        self.tokenizer = served.tokenizer
        self.engine, self._sleep_mode = build(served, checked)
        self._thread = EngineThread(self.engine, max_waiting=max_waiting, rejects=on_full == "reject")
        self.shutdown = weakref.finalize(self, self._thread.stop)
        """Aborts unfinished requests and ends the thread; a second call does nothing.

        Also called when this object is collected, or Python ends. Waits for the running step.
        """

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended, queued ones included."""
        return self._thread.num_unfinished

    @property
    def forms(self) -> Forms:
        """The forms that outputs may have."""
        return self.engine.forms

    async def start(self) -> None:
        """Serves one short request, so that no client waits for what happens once. Raises its errors."""
        prompt = warm_up_prompt(self.engine.vocab_size, self.engine.core.max_model_len)
        stream = self.generate(prompt, WARM_UP_PARAMS, cache_salt=WARM_UP_SALT, output_kind="final_only")
        async for _ in stream:
            pass

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        lora: str | None = None,
        cache_salt: str = "",
        output_kind: OutputKind = "cumulative",
        window_s: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Serves one prompt; yields outputs as they come, until each has a finish_reason.

        output_kind: "cumulative" yields everything so far each time; "delta" yields what is new since the
        last output (an ended output repeats its finish_reason); "final_only" yields the end only. A consumer
        that is slower than the engine gets several tokens at a time. A prompt given as text is encoded in the
        caller's thread. request_id: for `abort`, and in the outputs; None: a number. cache_salt: requests
        with different salts share no KV. window_s: seconds from now in which the whole output is needed, for
        policies that read deadlines. Cancelling the consumer or closing the iterator aborts the request;
        if a loop is left by break, contextlib.aclosing closes it at once, otherwise the event loop does when
        the iterator is collected.

        Raises ValueError for a request that cannot be served, QueueFullError, and EngineDeadError. A request
        that fails later (for example because the device is out of memory) ends with an output that has an
        error.
        """
        check_choice("output_kind", output_kind, get_args(OutputKind))
        tokens = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        params = params or SamplingParams()
        if params.structured_outputs is not None:  # read here, so that others need not wait
            await asyncio.to_thread(self.forms.check, params.structured_outputs)
        stream = Stream(
            tokens,
            params,
            priority,
            tenant,
            lora,
            cache_salt,
            output_kind == "final_only",
            window_s,
        )
        reader = OutputReader(
            stream,
            prompt if isinstance(prompt, str) else None,
            self.tokenizer,
            self.architecture.eos_token_ids,
            output_kind == "delta",
        )
        self._thread.submit(stream, request_id)
        try:
            is_finished = False
            while not is_finished:
                await stream.news.wait()
                state = self._thread.take(stream)
                if reader.has_news(state):
                    yield reader.read(state)
                is_finished = state.is_finished
        finally:
            self._thread.abort(stream)

    async def abort(self, request_id: int | str) -> None:
        """Aborts a request before the next step; its iterator ends with finish_reason "aborted".

        Does nothing if the request is unknown or has ended.
        """
        stream = self._thread.find(request_id)
        if stream is not None:
            self._thread.abort(stream)

    def clear_prefix_cache(self) -> None:
        """Evicts, before the engine's next step, the KV that no running request uses."""
        self._thread.clear_prefix_cache()

    @property
    def is_sleeping(self) -> bool:
        """True from the start of a sleep to the end of the wake-up."""
        return self._thread.is_paused

    async def sleep(self, level: int = 1, mode: SleepWhen = "abort") -> None:
        """Frees the memory of the device, and empties the prefix cache; needs enable_sleep_mode.

        level: 1 keeps the weights in host memory, 2 drops them. mode: requests in progress are aborted
        ("abort"), or served to their end before ("wait"). Requests that come meanwhile wait for the wake-up.
        Raises ValueError.
        """
        if level not in LEVELS:
            raise ValueError(f"level={level}: must be one of {', '.join(map(str, LEVELS))}")
        check_choice("mode", mode, get_args(SleepWhen))
        sleep_mode = self._enabled_sleep_mode()
        self._thread.pause(aborts=mode == "abort")
        await asyncio.wrap_future(self._thread.when_idle(lambda: sleep_mode.sleep(level)))

    async def wake_up(self) -> None:
        """Loads the weights, allocates the KV and captures the graphs again; then requests are served.

        Raises ValueError or RuntimeError if the device has no memory left; the engine sleeps on then.
        """
        sleep_mode, thread = self._enabled_sleep_mode(), self._thread

        def wake_up() -> None:
            sleep_mode.wake_up()
            thread.resume()

        await asyncio.wrap_future(thread.when_idle(wake_up))

    def _enabled_sleep_mode(self) -> SleepMode:
        if self._sleep_mode is None:
            raise ValueError("the sleep mode is not enabled; set enable_sleep_mode=True")
        return self._sleep_mode

    def check_health(self) -> None:
        """Raises EngineDeadError if no more requests are accepted."""
        self._thread.check_health()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; give token ids")
        return self.tokenizer.encode(text)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError, with the name, for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value}: must be one of {', '.join(allowed)}")
