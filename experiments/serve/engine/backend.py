"""The real engine as a back end: the outputs of one or several, with the names of the API; the sleep mode.

Requests that come while it sleeps wait for the wake-up, as in vLLM.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from http import HTTPStatus

from experiments.serve.backend import Delta, Generation, ServedModel, Structure
from experiments.serve.engine.conversion import (
    beam_sampling,
    check_functions,
    delta_of,
    form_of,
    prompt_logprobs,
    results_of,
    sampling_params,
)
from experiments.serve.engine.model_to_serve import ModelToServe
from experiments.serve.errors import ApiError, ConnectionReset, priority_ignored
from experiments.serve.http.control import Mode, Part, check_loaded_adapter, check_new_adapter
from experiments.serve.metrics.engine import EngineMetrics
from experiments.serve.model_tokenizer import ModelTokenizer
from realengine.fleet.async_fleet import AsyncFleet
from realengine.fleet.request import EngineLostError, RefusedError
from realengine.serving.async_llm import AsyncLLM
from realengine.serving.engine_thread import EngineDeadError, QueueFullError
from realengine.serving.forms import CANNOT_GO_ON, FormError

STARTING = "the engine is starting: it loads the model and warms up"
Engines = AsyncLLM | AsyncFleet
"""One engine in this process, or a fleet of engine processes."""


class EngineBackend:
    """Engines that are loaded while the server already listens; until they are warm, requests get status 503.

    load: builds the engine, in another thread. adapters: names of the LoRA adapters. has_priorities: whether
    its scheduling reads the priority of requests.
    """

    def __init__(
        self,
        served: ModelToServe,
        load: Callable[[], Engines],
        *,
        max_model_len: int,
        adapters: Sequence[str] = (),
        has_priorities: bool = False,
    ) -> None:
        assert served.model.tokenizer is not None
        self.tokenizer = ModelTokenizer(served.model.tokenizer)
        self.tokenizer.vocab_size = served.model.architecture.vocab_size
        self._load = load
        self._has_priorities = has_priorities
        self._vocab_size = served.model.architecture.vocab_size
        base = ServedModel(served.name, max_model_len)
        self._base = base
        self._adapters = {name: ServedModel(name, max_model_len, served.name) for name in adapters}
        self._loaded = dict.fromkeys(adapters)  # names that requests may give now, in the order of loads
        self.num_refused: Counter[str] = Counter()
        """Requests that were not let into the engine, by reason."""
        self.metrics: list[EngineMetrics] = []
        """Metrics of the engine, once it is observed."""
        self._llm: Engines | None = None
        self._is_warm = False

    async def start(self) -> Engines:
        """Loads the engine and warms it up; returns the engine, idle. Raises its errors."""
        self._llm = await asyncio.to_thread(self._load)
        await self._llm.start()
        return self._llm

    def open(self) -> None:
        """Lets requests in."""
        self._is_warm = True

    async def stop(self) -> None:
        """Aborts what is unfinished, and ends the engine."""
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown)

    def llm(self) -> Engines:
        """Returns the engine. Raises ApiError while it starts."""
        if self._llm is None or not self._is_warm:
            raise ApiError(STARTING, HTTPStatus.SERVICE_UNAVAILABLE)
        return self._llm

    def clear_prefix_cache(self) -> None:
        """Evicts, before the next step, the KV that no running request uses."""
        if self._llm is not None:
            self._llm.clear_prefix_cache()

    def models(self) -> Sequence[ServedModel]:
        return [self._base, *(self._adapters[name] for name in self._loaded)]

    def load_adapter(self, name: str, rank: int | None, *, replaces: bool) -> None:
        """Lets requests name an adapter that the engine has read at its start. Raises ApiError.

        rank: ignored, as it is that of the file.
        """
        check_new_adapter(name, [self._base.name], self._loaded, replaces=replaces)
        known = ", ".join(self._adapters) or "none"
        check_loaded_adapter(
            name,
            self._adapters,
            ": no request may name a path of this machine, so the engine has those of "
            f"serve.engine.lora_modules only ({known})",
        )
        self._loaded[name] = None

    def unload_adapter(self, name: str) -> None:
        """Hides an adapter until it is loaded again; requests in progress keep it. Raises ApiError."""
        check_loaded_adapter(name, self._loaded)
        del self._loaded[name]

    @property
    def num_in_progress(self) -> int:
        return 0 if self._llm is None else self._llm.num_unfinished

    @property
    def is_asleep(self) -> bool:
        """True while the engine sleeps, and requests wait for its wake-up."""
        return self._llm is not None and self._llm.is_sleeping

    async def fall_asleep(self, level: int, mode: Mode) -> None:
        await self.llm().sleep(level, mode)

    async def load(self, parts: Collection[Part], *, is_last: bool) -> None:
        """Wakes the engine with the last of its parts, as its memory comes back as a whole."""
        if is_last:
            try:
                await self.llm().wake_up()
            except (ValueError, RuntimeError) as error:
                raise ApiError(str(error), HTTPStatus.INTERNAL_SERVER_ERROR) from None

    def unhealthy_because(self) -> str | None:
        if self._llm is None or not self._is_warm:
            return STARTING
        try:
            self._llm.check_health()
        except EngineDeadError as error:
            return str(error)
        return None

    def _check(self, generation: Generation) -> None:
        """Raises ApiError for what the engine does not do."""
        if generation.priority and not self._has_priorities:
            raise priority_ignored(generation.priority)
        structure, min_tokens = generation.structure, generation.sampling.min_tokens
        if structure is None or form_of(structure) is None:
            return
        if min_tokens:
            raise ApiError(
                f"min_tokens={min_tokens}: must be 0 with {structure.param}, which says where it ends",
                param="min_tokens",
            )
        if generation.beam_search is not None:
            raise ApiError(f"{structure.param}: not with use_beam_search=true", param=structure.param)

    def _form_error(self, structure: Structure | None, error: FormError) -> ApiError:
        """Returns the error of a form, with the field that asks for it. Takes up to seconds for tools."""
        if structure is None:
            return ApiError(str(error))
        if structure.kind == "tools":
            try:
                check_functions(self.llm().forms, structure.value)
            except FormError as narrower:
                error = narrower
        return ApiError(f"{structure.param}: {error}", param=structure.param)

    def _unserved(self, error: Exception) -> Exception:
        """Returns the error for a client whose request is not served, or not to its end; counts a refusal."""
        if isinstance(error, EngineLostError):
            return ConnectionReset(str(error))
        names: dict[type[Exception], str] = {QueueFullError: "queue_full", EngineDeadError: "engine_dead"}
        self.num_refused[names.get(type(error), str(error))] += 1
        return ApiError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)

    async def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        llm = self.llm()
        self._check(generation)
        try:
            search, ends = generation.beam_search, tuple(llm.architecture.eos_token_ids)
            if search is None:
                form = form_of(generation.structure)
                params = sampling_params(generation.sampling, self._vocab_size, form)
            else:
                params = beam_sampling(search, generation.sampling, self._vocab_size, ends)
            stream = llm.generate(
                generation.prompt_token_ids,
                params,
                priority=generation.priority,
                tenant=generation.tenant,
                lora=generation.lora,
                cache_salt=generation.cache_salt,
                output_kind="delta" if search is None and generation.streamed else "final_only",
                window_s=generation.window_s,
            )
            has_begun = False
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if output.error is not None:
                        raise _error_of(output.error, generation.structure)
                    if search is not None:
                        for result in results_of(output, ends):
                            yield result
                        continue
                    yield delta_of(output, prompt_logprobs=None if has_begun else prompt_logprobs(output))
                    has_begun = True
        except FormError as error:
            raise await asyncio.to_thread(self._form_error, generation.structure, error) from None
        except ValueError as error:
            raise ApiError(str(error)) from None
        except (QueueFullError, RefusedError, EngineDeadError, EngineLostError) as error:
            raise self._unserved(error) from None
        finally:
            if generation.output_index == 0:
                for metrics in self.metrics:
                    metrics.parameters(generation.num_outputs)


def _error_of(reason: str, structure: Structure | None) -> ApiError:
    """Returns the error of an output that has ended without its tokens."""
    if structure is not None and reason.startswith(CANNOT_GO_ON):
        return ApiError(f"{structure.param}: {reason}", param=structure.param)
    return ApiError(reason, HTTPStatus.INTERNAL_SERVER_ERROR)
