"""Says whether an engine may find too little KV memory to start, so that a fleet is not recommended."""

from __future__ import annotations

from dataclasses import replace

from experiments.capacity.candidates import Candidate
from hwmodels.host import GIB
from sim.setup.pool import PoolSettings

LEAST_KV_BYTES = 0.5 * GIB
"""KV memory of a GPU that the errors of the memory model may use up."""
SORTING_VERSION = "0.16.0"
"""Last version of vLLM that sorts all logits: see `hwmodels.iterations.memory`."""


def start_doubt(candidate: Candidate) -> str:
    """Returns a clause if whether an engine starts depends on its version; empty if it surely does.

    vLLM up to 0.16 takes up to 3 GiB more for sampling.
    """
    scenario = candidate.scenario
    if scenario.engine.num_kv_blocks is not None:
        return ""
    kv_bytes = scenario.plan_memory().kv_bytes
    if kv_bytes >= LEAST_KV_BYTES and _starts_with(scenario, SORTING_VERSION):
        return ""
    return (
        f"the KV memory of {candidate.name} is {kv_bytes / GIB:.1f} GiB on each GPU, and whether an engine "
        f"finds that much depends on its version (vLLM {SORTING_VERSION} takes more for sampling)"
    )


def _starts_with(scenario: PoolSettings, version: str) -> bool:
    """Returns whether the replica of a newest vLLM also fits in the memory of an older version."""
    engine = scenario.engine
    if engine.memory_profile != "vllm" or engine.version is not None or engine.num_kv_blocks is not None:
        return True
    try:
        replace(scenario, engine=replace(engine, version=version)).plan_memory()
    except ValueError:
        return False
    return True
