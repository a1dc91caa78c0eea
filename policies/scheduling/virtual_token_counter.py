"""Fair shares per tenant by virtual token counters (VTC; Sheng et al., OSDI 2024).

Every tenant has a counter of its service: input_weight per prompt token (counted at admission) plus
output_weight per output token (counted when produced), divided by the tenant's weight. The tenant with the
smallest counter among those with waiting requests is next (its requests in order of arrival). When a tenant
without waiting requests gets one, its counter is lifted to the smallest counter of the waiting tenants or, if
there are none, to the counter of the tenant of the last admitted request: idle time earns no credit. Two
tenants that always have waiting requests differ in service by at most 2 max(input_weight L, output_weight M):
L tokens in the longest prompt, M tokens in the largest running batch (the paper's bound, for equal weights
and without preemptions). No tenant of a fixed set starves. With a continuous supply of new tenants one may,
because each new tenant is lifted to the smallest counter and may be served before it. Tokens that are
recomputed after a preemption are not counted again. Memory pressure: the last arrival of any tenant is
preempted. Horizon: while several tenants wait, until output tokens change their order; one iteration after an
admission.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated

from fieldlimits import Ge, Gt
from policies.core.plan import StepPlan
from policies.core.sequence import Sequence, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.core.waiting_queue import WaitingQueue
from policies.scheduling import Scheduling


@dataclass(slots=True)
class _Account:
    """Tokens served since the counter was last lifted; integers, so that sums are exact."""

    lifted_to: float = 0.0
    num_input: int = 0
    num_output: int = 0


@dataclass(slots=True)
class _Ledger:
    accounts: dict[str, _Account] = field(default_factory=dict)  # by tenant
    charged: set[int] = field(default_factory=set)  # ids of requests with a prompt that was counted
    last_tenant: str | None = None  # the tenant of the request that left the queue last
    queue: FairQueue | None = None
    step: StepBuilder | None = None

    def account(self, tenant: str) -> _Account:
        return self.accounts.setdefault(tenant, _Account())


@dataclass(frozen=True, kw_only=True, slots=True)
class VirtualTokenCounter(Scheduling):
    """The tenant with the least service is next."""

    input_weight: Annotated[float, Ge(0)] = 1.0
    """Weight of a prompt token."""
    output_weight: Annotated[float, Ge(0)] = 2.0
    """Weight of an output token."""
    tenant_weights: dict[str, Annotated[float, Gt(0)]] = field(default_factory=dict)
    """Relative shares of the tenants; tenants that are not listed have 1."""

    _ledger: _Ledger = field(init=False, default_factory=_Ledger, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if not self.input_weight + self.output_weight > 0:
            raise ValueError("input_weight=0, output_weight=0: at least one must be > 0")

    def counter(self, tenant: str) -> float:
        """Computes the weighted service of a tenant, lifts included."""
        account = self._ledger.account(tenant)
        served = self.input_weight * account.num_input + self.output_weight * account.num_output
        return account.lifted_to + served / self.tenant_weights.get(tenant, 1.0)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key for the order of a tenant's requests and of preemptions: (arrival,)."""
        return (seq.request.arrival_s,)

    def queue(self) -> WaitingQueue:
        """Returns a queue of queues, one per tenant."""
        self._ledger.queue = FairQueue(self)
        return self._ledger.queue

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Adds new requests; the step holds until the counter of a waiting tenant exceeds the next one."""
        ledger = self._ledger
        ledger.step = step
        assert ledger.queue is not None
        ledger.queue.take_in()
        order = ledger.queue.tenants_in_order()
        if len(order) < 2:
            return
        num_decodes: dict[str, int] = {}
        for seq in view.decoding:
            tenant = seq.request.tenant
            num_decodes[tenant] = num_decodes.get(tenant, 0) + 1
        for (value, tenant), (next_value, next_tenant) in pairwise(order):
            pace = self._pace(tenant, num_decodes) - self._pace(next_tenant, num_decodes)
            if pace > 0:  # one iteration early rather than a rounding error late
                step.hold(max(1, int(min((next_value - value) / pace, 2**31))))

    def on_commit(self, plan: StepPlan, num_iterations: int, now: float) -> None:
        """Counts output tokens."""
        account = self._ledger.account
        if plan.num_decodes:
            idle = set(plan.idle)
            for seq in plan.decoding:
                if seq not in idle:
                    account(seq.request.tenant).num_output += num_iterations
        for chunk in plan.chunks:
            account(chunk.seq.request.tenant).num_output += chunk.completes

    def on_end(self, seq: SequenceView) -> None:
        """Removes the request; the tenant's counter is kept."""
        self._ledger.charged.discard(seq.request_id)

    def charge(self, seq: SequenceView) -> None:
        """Counts the prompt of an admitted sequence, once."""
        ledger = self._ledger
        if seq.request_id not in ledger.charged:
            ledger.charged.add(seq.request_id)
            ledger.account(seq.request.tenant).num_input += seq.num_prompt_tokens

    def lift(self, tenant: str, value: float) -> None:
        """Raises a tenant's counter to a value, if the counter is below it."""
        if self.counter(tenant) < value:
            self._ledger.accounts[tenant] = _Account(value)

    def _pace(self, tenant: str, num_decodes: dict[str, int]) -> float:
        """Computes the increase of a tenant's counter per iteration of decodes."""
        return self.output_weight * num_decodes.get(tenant, 0) / self.tenant_weights.get(tenant, 1.0)


class FairQueue(WaitingQueue):
    """The waiting sequences by tenant.

    A pushed sequence is considered from the next step on, because counters may be outdated until then.
    """

    def __init__(self, policy: VirtualTokenCounter) -> None:
        super().__init__()
        self._policy = policy
        self._ledger = policy._ledger
        self._queues: dict[str, WaitingQueue] = {}  # by tenant; none is empty
        self._new: list[SequenceView] = []

    def __len__(self) -> int:
        return len(self._new) + sum(map(len, self._queues.values()))

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and (
            seq in self._queues.get(seq.request.tenant, ()) or seq in self._new
        )

    @property
    def first(self) -> SequenceView | None:
        """The first sequence of the tenant that is served next."""
        return next(iter(self), None)

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence."""
        self._new.append(seq)

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence: admitted if a step is being built, else aborted. Raises KeyError if absent."""
        tenant, ledger = seq.request.tenant, self._ledger
        if seq in self._new:
            self._new.remove(seq)
        else:
            queue = self._queues[tenant]
            queue.remove(seq)
            ledger.last_tenant = tenant
            if not queue:
                del self._queues[tenant]
        if ledger.step is not None and ledger.step.is_open:
            self._policy.charge(seq)
            ledger.step.hold(1)

    def take_in(self) -> None:
        """Adds the sequences pushed since the last step; lifts tenants that had no waiting requests."""
        policy, ledger, queues = self._policy, self._ledger, self._queues
        for seq in self._new:
            tenant = seq.request.tenant
            if tenant not in queues:
                if queues:
                    policy.lift(tenant, min(map(policy.counter, queues)))
                elif ledger.last_tenant is not None:
                    policy.lift(tenant, policy.counter(ledger.last_tenant))
                queues[tenant] = WaitingQueue()
            queues[tenant].push(seq)
        self._new.clear()

    def tenants_in_order(self) -> list[tuple[float, str]]:
        """Returns (counter, tenant) of the waiting tenants; the first is served next."""
        return sorted((self._policy.counter(tenant), tenant) for tenant in self._queues)

    def __iter__(self) -> Iterator[SequenceView]:
        counter, queues = self._policy.counter, self._queues
        while queues:
            _, tenant = min((counter(tenant), tenant) for tenant in queues)
            first = queues[tenant].first
            assert first is not None
            yield first
            if tenant in queues and queues[tenant].first is first:  # the caller may leave it in the queue
                for _, other in self.tenants_in_order():
                    yield from (seq for seq in queues.get(other, ()) if seq is not first)
                return
