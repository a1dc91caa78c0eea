"""An engine with adapters, step by step."""

from __future__ import annotations

from policies.adapters.serving import Adapter, AdapterMemory, Registry
from policies.batching.chunked import Chunked
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome
from policies.core.request import Prompt, Request, Segment
from policies.scheduling.fcfs import Fcfs


def registry_of(names="abcd", rank=4, **memory):
    """Returns adapters of one rank; by default a rank takes one byte, and a block has four."""
    adapters = [Adapter(name=name, rank=rank) for name in names]
    return Registry(adapters, "base", AdapterMemory(**{"bytes_per_rank": 1.0, "block_bytes": 4.0} | memory))


class Machine:
    """An engine whose adapters arrive when the test says so."""

    def __init__(self, serving, registry=None, *, num_blocks=100, caching=None, max_num_seqs=8):
        pool = (caching or Paged(block_size=4)).pool(KvMemory(num_blocks))
        self.core = EngineCore(
            batching=Chunked(),
            scheduling=Fcfs(),
            block_pool=pool,
            max_num_seqs=max_num_seqs,
            max_model_len=400,
            residents=serving.residents(registry or registry_of(), pool),
        )
        self.residents = self.core.residents
        self.loads = []  # on their way
        self.log = []  # (name, where from)
        self.now = 0.0
        self._next_id = 0

    def ask(self, adapter=None, num_prompt_tokens=4, num_output_tokens=3, segments=()):
        prompt = Prompt(num_prompt_tokens, tuple(Segment(*segment) for segment in segments))
        request = Request(self._next_id, self.now, prompt, adapter=adapter)
        self._next_id += 1
        return self.core.add(request, num_output_tokens)

    def step(self, come=True, now=None):
        """Runs one step; if `come`, requested adapters arrive before its end. Returns its plan, or None."""
        self.now = self.now + 1.0 if now is None else now
        plan = self.core.plan(self.now)
        loads = self.core.take_adapter_loads()
        self.log += [(load.name, load.source) for load in loads]
        self.loads += loads
        if come:
            self.come()
        self.served = set() if plan is None else set(plan.tokens_by_request)
        if plan is not None:
            self.core.commit(plan, StepOutcome(), self.now)
            self.core.check_integrity()
        return plan

    def come(self):
        for load in self.loads:
            self.core.adapter_loaded(load.name)
        self.loads = []

    def run(self, max_steps=300):
        for _ in range(max_steps):
            if not self.core.num_unfinished:
                return
            self.step()
        raise AssertionError("the requests do not end")
