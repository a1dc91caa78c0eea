"""Serving with several engines inside an asyncio program: one gateway, one process per engine.

    async with AsyncFleet("smollm2", replicas=3, routing=PrefixAffinity(), device="cpu") as fleet:
        async for output in fleet.generate("The capital of France is", output_kind="delta"):
            print(output.outputs[0].text, end="")

The gateway and its policies are those of the simulator (`policies.gateway`). An engine whose process ends
loses its requests, which are sent to other engines, each at most `max_resends` times, from scratch or after
the tokens that are known (`keeps_tokens`). A reader that has seen tokens of an output that begins again gets
EngineLostError.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, get_args

from policies.admission import Admission, AdmissionTraits, AdmitAll
from policies.core.limits import RejectedError
from policies.core.request import Request
from policies.gateway.gateway import (
    AdmissionControl,
    Gateway,
    GatewayAttachment,
    LengthPredictions,
    RequestAttempt,
    Routers,
)
from policies.gateway.signals import Counts
from policies.prediction import LengthPredictor
from policies.routing import Routing, RoutingTraits
from policies.routing.load_balancing import RoundRobin
from policies.scaling import Scaling
from policies.user_code import name_of, traits_of
from realengine.fleet.autoscaler import Autoscaler
from realengine.fleet.fleet import Fleet
from realengine.fleet.log import FleetLog
from realengine.fleet.messages import Began, ClearCache, Progress, Stepped
from realengine.fleet.process import EngineOfFleet
from realengine.fleet.replica import EngineReplica, State
from realengine.fleet.request import FleetRequest
from realengine.model.architecture import Architecture
from realengine.model.backend import choose_device
from realengine.serving.async_llm import OutputKind, SleepWhen, check_choice
from realengine.serving.content_names import ContentNames
from realengine.serving.engine_thread import EngineDeadError
from realengine.serving.forms import Forms
from realengine.serving.intake import check_fields
from realengine.serving.llm import RequestOutput
from realengine.serving.model import Model
from realengine.serving.output_reader import OutputReader
from realengine.serving.sampling_params import SamplingParams, check_vocabulary
from realengine.settings import EngineSettings
from realengine.sleep import LEVELS


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """Settings of the gateway of a fleet; the policies are those of the simulator, used without a copy."""

    routing: Routing = field(default_factory=RoundRobin)
    admission: Admission = field(default_factory=AdmitAll)
    prediction: LengthPredictor | None = None
    """Predicts output lengths for routers that need them."""
    max_resends: int = 1
    """How often a request is sent again after the end of its engine."""
    keeps_tokens: bool = False
    """Whether it then goes on after the tokens that are known; else it begins from scratch."""
    signal_age_s: float = 0.05
    """Maximum age of the load signals that policies read, s; 0: as they come."""
    restarts: bool = True
    """Whether an engine whose process has ended is started again."""
    start_timeout_s: float = 600.0
    """Time in which an engine must start, s."""
    scaling: Scaling | None = None
    """Decides how many engines serve; None: all, always."""
    sleep_level: int | None = None
    """With scaling: the level of sleep of engines that are not needed; None: their processes end."""
    max_waiting: int | None = None
    """Requests that may wait in one engine; when all have so many, further ones are refused. None: any."""

    def check(self, num_engines: int) -> None:
        """Raises ValueError for settings that do not fit a fleet of so many engines."""
        if self.max_waiting is not None and self.max_waiting < 1:
            raise ValueError(f"max_waiting={self.max_waiting}: must be >= 1, or None")
        if self.max_resends < 0:
            raise ValueError(f"max_resends={self.max_resends}: must be >= 0")
        if not 0 < self.start_timeout_s < inf:
            raise ValueError(f"start_timeout_s={self.start_timeout_s}: must be a finite number > 0 s")
        traits = traits_of(self.routing, RoutingTraits)
        if traits.check is not None:
            traits.check(num_engines)
        if traits.needs_predictor and self.prediction is None:
            raise ValueError(f"routing={name_of(self.routing)}: needs predicted lengths; set prediction")
        if self.prediction is not None and self.prediction.needs_truth:
            raise ValueError(
                f"prediction={name_of(self.prediction)}: uses the true output lengths, which only the "
                "simulator knows"
            )


def engines_on_own_devices(model: Model, replicas: int, settings: Mapping[str, Any]) -> list[EngineOfFleet]:
    """Returns equal engines; on GPUs each has the next tensor_parallel_size devices. Not run on GPUs."""
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: must be >= 1")
    checked = EngineSettings(**settings)
    device = choose_device(checked.device)
    if device.type != "cuda":
        return [EngineOfFleet(model, checked) for _ in range(replicas)]
    first, each = device.index or 0, checked.tensor_parallel_size
    return [
        EngineOfFleet(model, replace(checked, device=f"cuda:{first + number * each}"))
        for number in range(replicas)
    ]


class FleetObserver(Protocol):
    """Receives what happens to requests, in the event loop; times in seconds on the clock of the fleet."""

    def emitted(self, own: FleetRequest, replica: EngineReplica, num_tokens: int, now: float) -> None:
        """Handles num_tokens new tokens of the first output of a request."""

    def ended(self, own: FleetRequest, replica: EngineReplica, now: float) -> None:
        """Handles a request that has ended in an engine: it is complete, or was aborted there."""

    def stepped(self, replica: EngineReplica) -> None:
        """Handles the end of a step, after the tokens and ends that it has brought."""

    def began(self, replica: EngineReplica, counts: Counts) -> None:
        """Handles the counts of an iteration that begins."""


class AsyncFleet:
    """The engines of one model behind a gateway. All calls are made in the event loop of `start`.

    model, settings: as for `LLM`. engines: the engines themselves, which may differ in their settings,
    instead of `replicas` equal ones. gateway: the settings of the gateway.
    """

    def __init__(
        self,
        model: str | Path | Architecture | Model,
        *,
        replicas: int = 1,
        gateway: GatewaySettings | None = None,
        engines: Sequence[EngineOfFleet] | None = None,
        **settings: Any,
    ) -> None:
        served = Model.of(model)
        engines = engines_on_own_devices(served, replicas, settings) if engines is None else engines
        _check_models(served, engines)
        self._settings = gateway = gateway or GatewaySettings()
        gateway.check(len(engines))
        self.architecture = served.architecture
        self.tokenizer = served.tokenizer
        eos = tuple(served.architecture.eos_token_ids)
        self.forms = Forms(served.tokenizer, served.architecture.vocab_size, eos)
        self._names = ContentNames(engines[0].settings.caching.block_size)
        self.observer: FleetObserver | None = None
        """Called for what happens to requests, if set."""
        self._requests: dict[int, FleetRequest] = {}
        self._numbers: dict[int | str, int] = {}  # of the requests in progress, by their clients' ids
        self._next_number = count()
        readers: list[AdmissionTraits | RoutingTraits] = [
            traits_of(gateway.admission, AdmissionTraits),
            traits_of(gateway.routing, RoutingTraits),
        ]
        self.fleet = Fleet(
            engines,
            self._requests,
            self,
            clock=self,
            reads_signals=gateway.scaling is not None
            or gateway.max_waiting is not None
            or any(each.reads_signals for each in readers),
            reads_caches=any(each.reads_caches for each in readers),
            signal_age_s=gateway.signal_age_s,
            restarts=gateway.restarts,
            start_timeout_s=gateway.start_timeout_s,
            max_engines=1 if gateway.scaling is None else gateway.scaling.max_replicas,
        )
        self.log = FleetLog(self._requests)
        self.gateway = self._new_gateway()
        self._scaler = self._new_scaler(served, engines, settings)
        self._scaling: asyncio.Task[None] | None = None
        self.gateway.attach(Continuation())
        self.shutdown = weakref.finalize(self, self.fleet.stop)
        """Ends the engines; a second call does nothing. Also called when Python ends."""

    def _new_gateway(self) -> Gateway[EngineReplica, FleetRequest, Request]:
        settings = self._settings
        attempts: dict[int, RequestAttempt[EngineReplica, FleetRequest]] = {}
        predictions: LengthPredictions[EngineReplica, FleetRequest, Request] | None = None
        if settings.prediction is not None:
            predictions = LengthPredictions(
                settings.prediction, attempts, true_length=_unknown, output_length=self._output_length
            )
        gateway: Gateway[EngineReplica, FleetRequest, Request] = Gateway(
            Routers(settings.routing, predictions),
            clock=self,
            requests=self.log,
            attempts=attempts,
            on_end=self._on_end,
            max_resends=settings.max_resends,
            keeps_tokens=settings.keeps_tokens,
        )
        gateway.fleet = self.fleet
        if predictions is not None:
            gateway.attach(predictions)
        if type(settings.admission) is not AdmitAll:
            gateway.attach(AdmissionControl(settings.admission, gateway))
        if settings.max_waiting is not None:
            gateway.attach(WaitingLimit(gateway, settings.max_waiting))
        return gateway

    def _new_scaler(
        self, model: Model, engines: Sequence[EngineOfFleet], settings: Mapping[str, Any]
    ) -> Autoscaler | None:
        """Returns the autoscaler, whose further engines have devices after those of the first ones."""
        policy = self._settings.scaling
        if policy is None:
            return None
        own = list(engines)
        if len(own) < policy.max_replicas:
            own += engines_on_own_devices(model, policy.max_replicas, settings)[len(own) :]
        scaler = Autoscaler(policy, self.fleet, own, sleep_level=self._settings.sleep_level, clock=self)
        self.gateway.attach(scaler)
        return scaler

    @property
    def now(self) -> float:
        """The time of the gateway in seconds, on the clock of the engines."""
        return time.monotonic()

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    async def start(self) -> None:
        """Starts the engines, and returns when all are warm. Raises RuntimeError, with the engine's name."""
        await self.fleet.start()
        if self._scaler is not None:
            self._scaling = asyncio.create_task(self._scaler.run())

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
        """Serves one prompt as `AsyncLLM.generate` does.

        Raises ValueError for a request that cannot be served, RefusedError, EngineLostError and
        EngineDeadError.
        """
        check_choice("output_kind", output_kind, get_args(OutputKind))
        params = params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r}: must be SamplingParams")
        tokens = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.forms.check, params.structured_outputs)
        self.check_health()
        arrival_s = self.now
        deadline_s = None if window_s is None else arrival_s + window_s
        check_fields(priority, tenant, arrival_s, deadline_s, lora, cache_salt)
        check_vocabulary(tokens, params, self.architecture.vocab_size)
        if request_id in self._numbers:
            raise ValueError(f"request_id={request_id}: is in use by an unfinished request")
        number = next(self._next_number)
        own = FleetRequest(
            number,
            tokens,
            params,
            request_id=number if request_id is None else request_id,
            priority=priority,
            tenant=tenant,
            lora=lora,
            cache_salt=cache_salt,
            is_final_only=output_kind == "final_only",
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            segments=self._names.name(tokens, lora, cache_salt, as_new=params.prompt_logprobs is not None),
            answer_id=self._names.new_id(),
        )
        text = prompt if isinstance(prompt, str) else None
        eos = self.architecture.eos_token_ids
        reader = OutputReader(own, text, self.tokenizer, eos, output_kind == "delta")
        self._requests[number], self._numbers[own.request_id] = own, number
        try:
            self.gateway.arrive(own)
            is_finished = False
            while not is_finished:
                await own.news.wait()
                own.news.clear()
                if own.failure is not None:
                    raise own.failure
                state = own.state
                if reader.has_news(state):
                    yield reader.read(state)
                is_finished = state.is_finished
        finally:
            self._give_up(number)

    async def abort(self, request_id: int | str) -> None:
        """Aborts a request; its iterator ends with finish_reason "aborted". Does nothing if it has ended."""
        if request_id in self._numbers:
            self._give_up(self._numbers[request_id])

    def _give_up(self, number: int) -> None:
        attempt = self.gateway.attempts.get(number)
        if attempt is not None and not attempt.is_given_up and not self.fleet.is_stopping:
            self.gateway.give_up(attempt)

    def clear_prefix_cache(self) -> None:
        """Evicts, before the next step of each engine, the KV that no running request uses."""
        for replica in self.fleet.replicas:
            if replica.process is not None:
                replica.process.send(ClearCache())

    @property
    def is_sleeping(self) -> bool:
        """True from the start of a sleep of all engines to the end of the wake-up."""
        return self.fleet.is_paused

    async def sleep(self, level: int = 1, mode: SleepWhen = "abort") -> None:
        """Frees the memory of all devices, as `AsyncLLM.sleep` does; requests wait at the gateway."""
        if level not in LEVELS:
            raise ValueError(f"level={level}: must be one of {', '.join(map(str, LEVELS))}")
        check_choice("mode", mode, get_args(SleepWhen))
        self._check_sleep_mode()
        self.fleet.is_paused = True
        if mode == "abort":
            for number in list(self._requests):
                self._give_up(number)
        await asyncio.gather(*(self.fleet.drain(each, level) for each in self.fleet.of(State.serving)))

    async def wake_up(self) -> None:
        """Wakes all engines; then requests are served. Raises ValueError or RuntimeError, as `AsyncLLM`."""
        self._check_sleep_mode()
        await asyncio.gather(*(self.fleet.wake(each) for each in self.fleet.of(State.asleep)))
        self.fleet.is_paused = False

    def _check_sleep_mode(self) -> None:
        if not all(each.spec.settings.enable_sleep_mode for each in self.fleet.replicas):
            raise ValueError("the sleep mode is not enabled; set enable_sleep_mode=True")

    def check_health(self) -> None:
        """Raises EngineDeadError if no more requests are accepted."""
        if self.fleet.is_stopping:
            raise EngineDeadError("the fleet was shut down; create a new AsyncFleet")
        may_start = self._scaler is not None or self.fleet.is_paused
        if not may_start and not self.fleet.of(State.serving, State.starting, State.waking):
            reasons = "; ".join(f"{each.name}: {each.failure}" for each in self.fleet.replicas)
            raise EngineDeadError(f"no engine serves ({reasons})")

    async def __aenter__(self) -> AsyncFleet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer; give token ids")
        return self.tokenizer.encode(text)

    # What the fleet reports.

    def stepped(self, replica: EngineReplica, stepped: Stepped) -> None:
        """Takes the tokens of a step, and ends the requests that it has ended."""
        for progress in stepped.progress:
            self._progressed(replica, progress)
        if self.observer is not None:
            self.observer.stepped(replica)

    def _progressed(self, replica: EngineReplica, progress: Progress) -> None:
        """Takes what a step has brought one request."""
        number = progress.request_id
        if not replica.has(number):
            return
        own = self._requests[number]
        num_new = 0 if progress.is_refused else own.grow(progress)
        if num_new and self.observer is not None:
            self.observer.emitted(own, replica, num_new, self.now)
        if num_new and replica.is_first_token(number):
            self.gateway.first_token(number)
        if not progress.is_finished:
            return
        replica.ended(number)
        if progress.is_refused:
            attempt = self.gateway.attempts[number]
            self.gateway.release(attempt)
            self.gateway.fail(attempt, progress.error or "", inf)
            return
        if self.observer is not None:
            self.observer.ended(own, replica, self.now)
        self._learn(own)
        self.gateway.end(own.request)

    def began(self, replica: EngineReplica, began: Began) -> None:
        """Tells the observer; the replica has the counts."""
        if self.observer is not None:
            self.observer.began(replica, began.counts)

    def lost(self, numbers: list[int]) -> None:
        """Has the gateway send lost requests again; after a stop, their readers get an error."""
        for number in numbers:
            if self.fleet.is_stopping:
                self._requests[number].fail(
                    EngineDeadError("the fleet was shut down; create a new AsyncFleet")
                )
            else:
                self.gateway.lost(number)

    def fleet_changed(self) -> None:
        """Has the gateway dispatch the requests that it holds."""
        self.gateway.fleet_changed()

    def _learn(self, own: FleetRequest) -> None:
        """Names the tokens of a complete request, which a later prompt may contain."""
        if len(own.outputs) == 1:
            known = own.tokens + own.outputs[0].tokens[:-1]
            segments = own.request.prompt.segments
            self._names.learn(known, segments, own.answer_id, own.request.adapter, own.cache_salt)

    def _output_length(self, number: int) -> int | None:
        """Returns the output tokens of a complete request; None for one that was aborted or refused."""
        own = self._requests[number]
        reasons = {output.finish_reason for output in own.outputs}
        return sum(len(output.tokens) for output in own.outputs) if reasons <= {"stop", "length"} else None

    def _on_end(self, request: Request) -> None:
        own = self._requests.pop(request.request_id)
        del self._numbers[own.request_id]
        if not own.has_ended:
            own.abort()


class WaitingLimit(GatewayAttachment[EngineReplica, FleetRequest, Request]):
    """Lets the router choose only engines in which fewer than max_waiting requests wait, by their signals.

    A request that finds no such engine is refused.
    """

    def __init__(self, gateway: Gateway[EngineReplica, FleetRequest, Request], max_waiting: int) -> None:
        self._gateway = gateway
        self._max_waiting = max_waiting

    def candidates(
        self,
        attempt: RequestAttempt[EngineReplica, FleetRequest],
        serving: list[EngineReplica],
        now: float,
    ) -> list[EngineReplica] | None:
        free = [each for each in serving if each.num_waiting + each.num_unseen < self._max_waiting]
        if not free:
            self._gateway.fail(attempt, f"the queue is full (max_waiting={self._max_waiting})")
            return None
        return serving if len(free) == len(serving) else free


class Continuation(GatewayAttachment[EngineReplica, FleetRequest, Request]):
    """Lets a request go on in another engine after the tokens that a lost engine has generated."""

    def sends(
        self, attempt: RequestAttempt[EngineReplica, FleetRequest], replica: EngineReplica, request: Request
    ) -> bool:
        own = attempt.arrival
        known = own.known if attempt.is_resumed else None
        if known is None:
            return False
        num_known = request.prompt.num_tokens + len(known.tokens)
        if not replica.can_resume(num_known):
            raise RejectedError(f"{num_known} tokens: too many to continue in {replica.name}")
        replica.take_in(request, known)
        return True

    def will_retry(
        self, attempt: RequestAttempt[EngineReplica, FleetRequest], retry_after_s: float | None
    ) -> bool:
        attempt.arrival.retry_after_s = retry_after_s
        return False


def _check_models(model: Model, engines: Sequence[EngineOfFleet]) -> None:
    """Raises ValueError unless all engines have the model of the fleet."""
    for number, engine in enumerate(engines):
        if engine.model.architecture != model.architecture or engine.model.source != model.source:
            raise ValueError(
                f"engines[{number}].model={_shown(engine.model)}: must be {_shown(model)}, the model of the "
                "fleet, as a request may continue in any engine; run one fleet per model"
            )


def _shown(model: Model) -> str:
    architecture = model.architecture
    if model.source is not None:
        return str(model.source)
    return f"{architecture.model_type} with {architecture.num_layers} layers of {architecture.hidden_size}"


def _unknown(own: FleetRequest) -> int:
    raise AssertionError("refused by GatewaySettings.check")
