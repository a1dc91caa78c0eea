"""User processes attached to a run: generator functions of (env, fleet, gateway).

    def my_process(env, fleet, gateway):        # as any process of SimPy's
        yield env.timeout(10)                   # seconds of simulated time
        fleet.crash(fleet.serving[0])

`AttachedFleet`, `AttachedReplica` and `AttachedGateway` have everything that a process may read and change;
`env` is a `simpy.Environment`. Requests sent by a process are in the run's tables and metrics like all
others. The run ends when all requests have ended, even if processes still wait.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Protocol

from simpy import Environment, Event

from policies.batching import BatchingTraits
from policies.core.request import Prompt, Request
from policies.user_code import traits_of
from sim.cluster.failures import FailureInjector
from sim.cluster.fleet import Fleet, Member, State
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.records.run import Failure, FailureKind
from sim.workload.base import Arrival, Source, is_open_loop

UserProcess = Callable[[Any, Any, Any], Generator[Event, Any, Any]]
"""A generator function of env, fleet and gateway."""


class AttachableRun(Protocol):
    """The parts of a `Simulation` that processes act on."""

    fleet: Fleet
    gateway: Gateway
    failure_injector: FailureInjector
    num_ended: int

    @property
    def clock(self) -> Clock:
        """The SimPy environment of the run."""
        ...

    @property
    def migrates(self) -> bool:
        """True if running requests may move to other replicas."""
        ...

    def send(self, arrival: Arrival) -> None:
        """Adds a request that arrives now."""
        ...

    def status_of(self, request_id: int) -> str:
        """Returns the name of the status of a request that has arrived."""
        ...


class ProcessError(Exception):
    """A user process has failed; the message is one sentence."""


def check_processes(attach: Sequence[UserProcess]) -> None:
    """Raises ProcessError unless all are generator functions with three arguments."""
    if callable(attach) or isinstance(attach, str):
        raise ProcessError(f"attach={_name(attach)}: must be a list, such as [my_process]")
    for place, function in enumerate(attach):
        where = f"attach[{place}]={_name(function)}"
        called = getattr(function, "func", function)  # of functools.partial
        if not callable(function):
            raise ProcessError(f"{where}: must be a generator function of env, fleet and gateway")
        if not (inspect.isgeneratorfunction(called) or inspect.isgeneratorfunction(type(called).__call__)):
            raise ProcessError(
                f"{where}: must be a generator function, which has a `yield`, such as `yield env.timeout(1)`"
            )
        try:
            inspect.signature(function).bind(None, None, None)
        except TypeError:
            raise ProcessError(f"{where}: must take three arguments: env, fleet and gateway") from None


class NumberedSource:
    """The traffic of a run to which processes add requests: it assigns their ids, and reports all ends.

    Added requests get the ids after those of an open loop of known length. Other traffic is numbered as it
    arrives: requests after the first added one get shifted ids, which the traffic does not see.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.on_end: Callable[[Request], None] = _ignore
        self.num_added = 0
        self._added: set[int] = set()  # ids in progress
        self._own: dict[int, Request] = {}  # by new id: the request with its original id
        num_requests = source.num_requests if is_open_loop(source) else None
        self._num_reserved = num_requests or 0  # the first ids, used only by the traffic
        self._next_id = self._num_reserved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def new_id(self) -> int:
        """Returns the id of a process's next request."""
        self.num_added += 1
        number, self._next_id = self._next_id, self._next_id + 1
        self._added.add(number)
        return number

    def arrivals(self) -> Iterator[Arrival]:
        """Yields the arrivals of the traffic."""
        return map(self._numbered, self._source.arrivals())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        """Returns the follow-ups of a traffic request; a process's request has none."""
        self.on_end(request)
        if request.request_id in self._added:
            self._added.remove(request.request_id)
            return ()
        own = self._own.pop(request.request_id, request)
        return [self._numbered(arrival) for arrival in self._source.follow_ups(own, now, num_output_tokens)]

    def _numbered(self, arrival: Arrival) -> Arrival:
        request = arrival.request
        if request.request_id < self._num_reserved:
            return arrival
        if not self.num_added:
            self._next_id = max(self._next_id, request.request_id + 1)
            return arrival
        number, self._next_id = self._next_id, self._next_id + 1
        self._own[number] = request
        return arrival._replace(request=request._replace(request_id=number))


class AttachedReplica:
    """A replica, as a process sees it."""

    def __init__(self, member: Member, fleet: Fleet) -> None:
        self._member = member
        self._fleet = fleet

    @property
    def _replica(self) -> Replica:
        return self._member.replica

    def __repr__(self) -> str:
        return f"<replica {self.index}: {self.state}>"

    @property
    def index(self) -> int:
        """Its number, as in the tables."""
        return self._replica.index

    @property
    def pool(self) -> str:
        """The name of its pool; "" without pools."""
        return self._replica.pool.name

    @property
    def state(self) -> str:
        """Its state: starting, serving, draining, down or gone."""
        return self._member.state.name

    @property
    def num_outstanding(self) -> int:
        """Number of requests sent to it that have not ended."""
        return self._replica.num_outstanding

    @property
    def num_running(self) -> int:
        """Requests with a slot in the engine."""
        return self._replica.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, or are on their way to the engine."""
        return self._replica.num_waiting + self._replica.num_unseen

    @property
    def kv_usage(self) -> float:
        """The share of its KV memory that is in use."""
        replica = self._replica
        return 1 - replica.num_free_kv_tokens / replica.num_kv_tokens

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum tokens per iteration. A change holds from the next plan until the replica crashes."""
        return int(traits_of(self._replica.core.batching, BatchingTraits).max_num_batched_tokens or 0)

    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, value: int) -> None:
        replica = self._replica
        batching: Any = replica.core.batching
        if traits_of(batching, BatchingTraits).max_num_batched_tokens is None:
            raise ValueError(f"max_num_batched_tokens={value}: {type(batching).__name__} has no such limit")
        if replica.core.drafts is not None:
            raise ValueError(f"max_num_batched_tokens={value}: it cannot change with speculation")
        if value != self.max_num_batched_tokens:
            changed = replace(batching, max_num_batched_tokens=value)
            replica.before_external_event()
            replica.core.use_batching(changed)
            replica.replan()

    def slow_down(self, factor: float) -> None:
        """Multiplies the duration of iterations that begin from now on by `factor`; 1: normal speed."""
        if not 0 < factor < inf:
            raise ValueError(f"factor={factor}: must be a finite number > 0")
        self._replica.slow_down(factor)


class AttachedFleet:
    """The fleet, as a process sees it."""

    def __init__(self, simulation: AttachableRun) -> None:
        self._simulation = simulation
        self._fleet = simulation.fleet
        self._clock = simulation.clock
        self._crashes: dict[int, Failure] = {}  # by replica index

    @property
    def replicas(self) -> list[AttachedReplica]:
        """The replicas that still exist, by index."""
        return self._in(*(state for state in State if state is not State.gone))

    @property
    def serving(self) -> list[AttachedReplica]:
        """The replicas that accept requests, by index."""
        return self._in(State.serving)

    def _in(self, *states: State) -> list[AttachedReplica]:
        return [AttachedReplica(m, self._fleet) for m in self._fleet.members if m.state in states]

    def start(self, pool: str | None = None) -> AttachedReplica:
        """Starts one more replica of a pool (None: the first), which serves after its cold start."""
        names = [each.name for each in self._fleet.pools]
        if pool is not None and pool not in names:
            raise ValueError(f"pool={pool}: must be one of {', '.join(names)}")
        index = 0 if pool is None else names.index(pool)
        member = self._fleet.start(index, self._clock.now)
        self._fleet.serve_after(member, self._fleet.pools[index].cold_start_s)
        self._simulation.failure_injector.add(member)
        return AttachedReplica(member, self._fleet)

    def drain(self, replica: AttachedReplica) -> None:
        """Sends no more requests to a replica, and removes it after its last request has ended."""
        if len(self.serving) == 1 and replica.state == "serving":
            raise ValueError(f"drain: replica {replica.index} is the last that serves, and requests need one")
        self._fleet.drain(replica._member, self._clock.now)

    def crash(self, replica: AttachedReplica) -> None:
        """Crashes a serving or draining replica: its KV is lost, and it is down until `repair`.

        Its requests are resent according to `max_resends` and `recovery`.
        """
        if replica.state not in ("serving", "draining"):
            raise ValueError(f"crash: replica {replica.index} is {replica.state}; it must serve")
        if self._simulation.migrates:
            raise ValueError("crash: a crash during a migration is not modelled; choose migration=none")
        failure = Failure(self._clock.now, replica.index, -1, FailureKind.crash, inf)
        self._crashes[replica.index] = failure
        self._simulation.failure_injector.begin(replica._member, failure)

    def repair(self, replica: AttachedReplica) -> None:
        """Puts a crashed replica back into service, with an empty cache."""
        failure = self._crashes.pop(replica.index, None)
        if failure is None:
            raise ValueError(f"repair: replica {replica.index} is {replica.state}, and no process crashed it")
        self._simulation.failure_injector.end(replica._member, failure)


class AttachedGateway(GatewayAttachment):
    """The gateway, as a process sees it."""

    def __init__(self, simulation: AttachableRun, source: NumberedSource) -> None:
        self._simulation = simulation
        self._source = source
        self._clock = simulation.clock
        self._gateway = simulation.gateway
        self._ends: dict[int, Event] = {}  # by request id
        self._replicas: dict[int, int] = {}  # index of the fixed replica, by request id
        source.on_end = self._on_end
        self._gateway.attach(self)

    @property
    def num_in_progress(self) -> int:
        """Number of arrived requests that have not ended."""
        return len(self._gateway.attempts)

    @property
    def num_ended(self) -> int:
        """Requests that have ended."""
        return self._simulation.num_ended

    @property
    def in_progress(self) -> list[Request]:
        """The arrived requests that have not ended, in the order of arrival."""
        return [attempt.arrival.request for attempt in self._gateway.attempts.values()]

    def send(
        self,
        prompt: Prompt | int,
        output_tokens: int,
        *,
        replica: AttachedReplica | None = None,
        tenant: str = "",
    ) -> Event:
        """Sends a request now; returns the event of its end, the value of which is its status ("finished").

        prompt: its number of tokens, or a `Prompt`, for example another request's to get the same content.
        output_tokens: length of the output. replica: the replica that gets it; None: the router chooses.
        """
        if isinstance(prompt, int):
            prompt = Prompt(prompt)
        if prompt.num_tokens < 1 or output_tokens < 1:
            raise ValueError(f"prompt={prompt.num_tokens}, output_tokens={output_tokens}: each must be >= 1")
        request_id = self._source.new_id()
        if replica is not None:
            self._replicas[request_id] = replica.index
        request = Request(request_id, self._clock.now, prompt, output_tokens, tenant=tenant)
        end = self._ends[request_id] = self._clock.event()
        self._simulation.send(Arrival(request, output_tokens))
        return end

    def ended(self, request: Request | int) -> Event:
        """Returns the end event of a request in progress, given the request or its id."""
        request_id = request if isinstance(request, int) else request.request_id
        if request_id not in self._gateway.attempts and request_id not in self._ends:
            raise ValueError(f"request_id={request_id}: it is not in progress; see gateway.in_progress")
        return self._ends.setdefault(request_id, self._clock.event())

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        index = self._replicas.get(attempt.arrival.request.request_id)
        return [replica for replica in serving if replica.index == index] or serving

    def _on_end(self, request: Request) -> None:
        end = self._ends.pop(request.request_id, None)
        self._replicas.pop(request.request_id, None)
        if end is not None:
            end.succeed(self._simulation.status_of(request.request_id))


def begin_processes(attach: Sequence[UserProcess], simulation: AttachableRun, source: NumberedSource) -> None:
    """Starts the user processes of a run."""
    clock = simulation.clock
    fleet, gateway = AttachedFleet(simulation), AttachedGateway(simulation, source)
    for function in attach:
        clock.begin(_checked(_name(function), function(clock, fleet, gateway), clock))


def _checked(name: str, process: Generator[Event, Any, Any], clock: Clock) -> Generator[Event, Any, Any]:
    """Runs a user process; its errors are raised as ProcessError."""
    value: Any = None
    thrown: Exception | None = None
    while True:
        try:
            event = process.send(value) if thrown is None else process.throw(thrown)
        except StopIteration as stop:
            return stop.value
        except Exception as error:
            raise _raised(name, error, clock.now) from error
        if not isinstance(event, Event) or event.env is not clock:
            raise ProcessError(
                f"attach: {name} yielded {event!r} at {clock.now:g} s: must be an event of env, such as "
                "env.timeout(1)"
            )
        try:
            value, thrown = (yield event), None
        except GeneratorExit:
            process.close()
            raise
        except Exception as error:  # an interrupt, or the failure of the event
            thrown = error


def _raised(name: str, error: BaseException, now: float) -> ProcessError:
    """Returns the message for an error in a user process."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    return ProcessError(
        f"attach: {name} raised {type(error).__name__} at {now:g} s: {error} "
        f"(line {line.lineno} of {line.filename})"
    )


def unhandled(error: BaseException, now: float) -> ProcessError | None:
    """Returns the message if SimPy raised the error because no process handles a failed event.

    The event, or a process begun with `env.process`, failed in the user's code.
    """
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    if error.__cause__ is None or raised_in.filename != inspect.getfile(Environment):
        return None
    return _raised("a process of env.process", error.__cause__, now)


def _name(function: object) -> str:
    return str(getattr(function, "__name__", None) or repr(function))


def _ignore(request: Request) -> None:
    pass
