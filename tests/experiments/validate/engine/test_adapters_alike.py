"""The engine's adapters follow the decisions of the simulator's policies: plans, slots and loads."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from experiments.validate.engine.drive import Drive, PromptTokens  # noqa: E402
from experiments.validate.engine.engine_run import settings_of  # noqa: E402
from experiments.validate.engine.recording import Recorder  # noqa: E402
from experiments.validate.engine.replay import replay  # noqa: E402
from policies.adapters.exchange import Exchange  # noqa: E402
from policies.adapters.fixed_slots import FixedSlots  # noqa: E402
from realengine.build import assemble  # noqa: E402
from realengine.model.architecture import Architecture  # noqa: E402
from realengine.runner.rank import build_executor  # noqa: E402
from realengine.serving.model import Model  # noqa: E402
from sim.workload.modified import WithAdapters  # noqa: E402
from tests.experiments.validate.engine.engine_runs import CPU, UnevenClock, scenario_of, traffic  # noqa: E402
from tests.realengine.adapters import random_adapter  # noqa: E402
from tests.realengine.small_models import LLAMA  # noqa: E402

SERVINGS = {
    "lru": FixedSlots(max_loras=2, max_lora_rank=8),
    "lfu, loaded ahead": FixedSlots(max_loras=3, max_lora_rank=8, eviction="lfu", prefetch=2),
    "turns": Exchange(max_loras=2, max_lora_rank=8, max_active_adapters=1, cycle_time_s=2e-3),
}


class ToyTraffic:
    """The traffic of these tests, as a workload."""

    def source(self, *, seed, max_model_len):
        return traffic()


def run_with(scenario, source, adapters, *, overlap):
    """Runs the scenario's engine with random adapters; returns recording, core and adapter bank."""
    architecture = Architecture.from_hf(LLAMA)
    weights = {a.name: random_adapter(architecture, a.rank, seed=i) for i, a in enumerate(adapters)}
    served, plain = scenario.adapters, replace(scenario, adapters=None)
    settings = replace(settings_of(plain, CPU), adapters=served, lora_adapters=weights, overlap=overlap)
    model = Model.of(architecture)
    executor, memory = build_executor(model, settings, CPU)
    engine = assemble(model, settings, executor, memory, clock=UnevenClock())
    recorder = engine.observer = Recorder(engine.core)
    Drive(engine, source, PromptTokens(architecture.vocab_size)).run()
    engine.core.check_integrity()
    return recorder.recording({}), engine.core, executor.adapters


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("serving", SERVINGS.values(), ids=SERVINGS)
def test_a_recording_is_decided_again_and_the_bank_holds_what_the_policy_says(serving, overlap):
    workload = WithAdapters(of=ToyTraffic(), num=6, zipf=0.5, ranks=(2, 4, 8), base_share=0.2)
    scenario = scenario_of(num_kv_blocks=30, overlap=overlap, adapters=serving)
    source = workload.source(seed=0, max_model_len=scenario.max_model_len)
    recording, core, bank = run_with(scenario, source, workload.adapters, overlap=overlap)
    fresh = scenario.core(30, served=workload.adapters)
    equivalence = replay(recording, fresh)
    assert equivalence.difference is None
    assert equivalence.num_equal == len(recording.steps) > 0
    assert core.residents.counts.num_loads == fresh.residents.counts.num_loads > 6
    assert core.residents.counts.num_evicted > 3
    held = {name: core.residents.slot_of(name) for name in core.residents.resident}
    assert held == {name: fresh.residents.slot_of(name) for name in fresh.residents.resident}
    assert held.items() <= bank.resident.items()


def test_another_policy_is_found_out():
    workload = WithAdapters(of=ToyTraffic(), num=6, zipf=0.5, ranks=(2, 4, 8))
    scenario = scenario_of(num_kv_blocks=30, adapters=SERVINGS["lru"])
    source = workload.source(seed=0, max_model_len=scenario.max_model_len)
    recording, _, _ = run_with(scenario, source, workload.adapters, overlap=False)
    other = replace(scenario, adapters=FixedSlots(max_loras=3, max_lora_rank=8))
    assert replay(recording, other.core(30, served=workload.adapters)).difference is not None
