"""The KV events of a simulated fleet: each replica has a publisher of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from experiments.serve.backend import Generation
from experiments.serve.kv_events.block_chain import BlockChain, PromptAndOutput
from experiments.serve.kv_events.cache_events import CacheEvents
from experiments.serve.kv_events.publisher import Publisher
from experiments.serve.kv_events.settings import NOTHING_TO_REPORT
from experiments.serve.settings import ServerSetup
from experiments.serve.simulated.answers import Answer
from experiments.serve.simulated.fleet import SimulatedFleet
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.attachment import Attachment
from sim.engine.replica import Replica
from sim.settings.errors import ConfigError

_LOG = logging.getLogger("windtunnel.serve")


@asynccontextmanager
async def publishing(fleet: SimulatedFleet, setup: ServerSetup) -> AsyncIterator[Mapping[int, Publisher]]:
    """Lets the replicas of a fleet publish events meanwhile, also those that start later.

    No request may have come before. Yields the publishers by index of the replica. Raises ConfigError if an
    endpoint cannot be used, or if no cache has contents to report.
    """
    has_own_ports, tokens, is_open = setup.settings.expose == "replicas", Tokens(fleet), False
    publishers: dict[int, Publisher] = {}
    replicas: list[ReplicaEvents] = []

    def publisher_of(replica: Replica) -> Publisher:
        index, port = replica.index, setup.address.port
        if has_own_ports and port:
            port += 1 + index
        topic = setup.kv_events.topic_of(index, port, replica.pool.serves)
        return Publisher(setup.kv_events, index, topic=topic, rank=0 if has_own_ports else index)

    def added(replica: Replica) -> None:
        if not replica.core.block_pool.finds_kv:
            return
        try:
            publisher = publisher_of(replica)
        except ValueError as error:
            if not is_open:
                raise ConfigError(str(error)) from None
            _LOG.warning("Replica %d publishes no KV events: %s", replica.index, error)
            return
        events = ReplicaEvents(replica, publisher, tokens)
        if events.listens:
            publishers[replica.index] = publisher
            replicas.append(events)
            replica.attach(events)

    try:
        fleet.attach(added)
        if not publishers:
            raise ConfigError(NOTHING_TO_REPORT)
        is_open = True
        yield publishers
    finally:
        for each in replicas:
            each.flush()
        await asyncio.gather(*(publisher.close() for publisher in publishers.values()))


class Tokens(GatewayAttachment):
    """The requests in progress and the tokens of their outputs, by request id."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        self._known: dict[int, tuple[Generation, Answer]] = {}
        fleet.on_begin.append(self._begun)
        fleet.simulation.gateway.attach(self)

    def chain(self, seq: Sequence, block_size: int) -> BlockChain:
        """Returns the blocks of a sequence."""
        generation, answer = self._known[seq.request_id]
        adapter = seq.request.adapter
        return BlockChain(
            PromptAndOutput(generation.prompt_token_ids, lambda: answer.num_tokens, answer.token_ids),
            block_size,
            lora=generation.lora,
            lora_number=None if adapter is None else self._fleet.adapter_number(adapter),
            lora_path=adapter or "",
            cache_salt=generation.cache_salt,
        )

    def left(self, attempt: RequestAttempt, now: float) -> None:
        self._known.pop(attempt.arrival.request.request_id, None)

    def _begun(self, request_id: int, generation: Generation) -> None:
        self._known[request_id] = generation, self._fleet.answer(request_id)


class ReplicaEvents(Attachment):
    """Publishes the events of one replica: a batch for each plan that has changed its cache."""

    def __init__(self, replica: Replica, publisher: Publisher, tokens: Tokens) -> None:
        self._replica = replica
        self._publisher = publisher
        self._tokens = tokens
        self._chains: dict[int, BlockChain] = {}  # by request id
        self._left: set[int] = set()  # ids of the requests that have ended here since the last plan
        self._events = CacheEvents(self._chains, self._flush_soon)
        self.listens = self._events.listen(replica.core.block_pool)
        """Whether the cache reports its contents."""

    def flush(self) -> None:
        """Publishes what has happened since the last batch."""
        events = self._events.take()
        if events:
            self._publisher.publish(events)

    def _flush_soon(self) -> None:
        """Publishes what is not followed by a plan, such as the eviction of an idle cache."""
        asyncio.get_running_loop().call_soon(self.flush)

    def entered(self, seq: Sequence) -> None:
        self._chains[seq.request_id] = self._tokens.chain(seq, self._replica.core.block_pool.block_size)

    def planned(self, plan: StepPlan | None, now: float) -> None:
        core = self._replica.core
        core.block_pool.report_delayed(core.running.values())
        self.flush()
        if self._left:
            for request_id in self._left - core.running.keys():
                del self._chains[request_id]
            self._left &= core.running.keys()

    def left(self, seq: Sequence) -> None:
        self._left.add(seq.request_id)  # an engine with asynchronous scheduling still has its blocks

    def crashed(self, now: float) -> None:
        self._chains.clear()
        self._left.clear()
        self._events.listen(self._replica.core.block_pool)
