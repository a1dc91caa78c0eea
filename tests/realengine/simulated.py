"""Plans of an engine, and of a simulated replica with the same core and the same requests."""

from experiments.conformance.toys import ToyModel
from hwmodels.iterations.layout import Pass
from policies.core.request import Prompt, Request
from realengine.observer import Observers
from sim.engine.clock import Clock, Interrupt
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.records.requests import RequestLog

LENGTHS = (1, 15, 33, 16, 40, 7, 22, 9, 30, 12, 5, 19)


def unlike_prompts():
    """Returns prompts of which none begins as another one does."""
    return [[n, *((7 * n + place) % 96 for place in range(size - 1))] for n, size in enumerate(LENGTHS)]


class Noted(Observers):
    """Notes the digest of every plan of an engine, and how many batches are in flight before it."""

    def __init__(self, core):
        super().__init__([])
        self.core = core
        self.digests = []
        self.in_flight = []

    def planned(self, plan, num_iterations, now_s):
        if self.core.batches is not None:
            self.in_flight.append(len(self.core.batches.in_flight))
        self.digests.append(plan.digest())


class ToyStages(ToyModel):
    """Stages that each take one tick."""

    def __init__(self, num_stages):
        super().__init__(flat=True)
        self.stages, self.all = self, range(num_stages)

    def stage_times(self, shape):
        return Pass(0.0, [1.0] * len(self.all), 0.0, 0.0, None)


def simulated_digests(lengths, num_output_tokens, core, num_stages=1):
    """Returns the digests of the plans of a simulated replica that gets all requests at once."""
    digests, clock, log = [], Clock(), RequestLog()
    model = ToyStages(num_stages) if num_stages > 1 else ToyModel(flat=True)
    pool = ReplicaPool(core=core, model=model, batches_in_flight=num_stages)
    context = RunContext(clock=clock, requests=log, on_end=lambda seq: None, leap=False)
    replica = Replica(0, pool, context)
    plan_of = replica.core.plan

    def planned(now):
        plan = plan_of(now)
        if plan is not None:
            digests.append(plan.digest())
        return plan

    replica.core.plan = planned
    for number, length in enumerate(lengths):
        request = Request(number, 0.0, Prompt(length))
        log.arrive(request)
        replica.submit(request, num_output_tokens)
    clock.run_some(10_000, 1e9, Interrupt())
    return digests
