"""The settings of one engine for a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.calibrate.engine.drafting import drafting_of
from experiments.calibrate.engine.served import TORCH_DTYPES, kv_dtype_of, quantization_of
from hwmodels.model import ModelSpec
from policies.admission import AdmitAll
from policies.batching import LOAD_BALANCE_METHODS
from policies.placement.experts import Eplb, ExpertPlacing, InOrder
from realengine.settings import EngineSettings
from sim.metrics.slo import check_no_workload_terms
from sim.setup.scenario import Scenario
from sim.workload.base import Answers


def alone_settings_of(
    scenario: Scenario, device: torch.device, config: Mapping[str, Any] | None = None
) -> EngineSettings:
    """Returns the settings of one engine, on any number of devices, for a scenario.

    config: its resolved configuration; only a draft model needs it. Raises ValueError, with the key, for an
    unsupported setting.
    """
    _check_alone(scenario)
    if scenario.prediction is not None and scenario.prediction.needs_truth:
        name = type(scenario.prediction).__name__
        raise ValueError(f"prediction={name}: uses the true output lengths, which only the simulator knows")
    if scenario.lora is not None:
        raise ValueError("lora: not supported by an engine run; set it to null")
    if scenario.adapters is not None:
        raise ValueError(
            "adapters: not supported by an engine run, as they have no weights here; set adapters=none"
        )
    answers = getattr(scenario.workload, "branching", None)
    if isinstance(answers, Answers) and answers.every is not None:
        raise ValueError(
            f"workload.branching.every={answers.every}: the engine has no beam search; set it to null"
        )
    model, profile, ranks = scenario.model, scenario.engine, scenario.data_parallel
    return EngineSettings(
        device=device.type,
        dtype=TORCH_DTYPES[model.dtype],
        quantization=quantization_of(model),
        kv_cache_dtype=_kv_cache_dtype(model),
        max_model_len=scenario.max_model_len,
        max_num_seqs=profile.max_num_seqs,
        num_kv_blocks=profile.num_kv_blocks,
        gpu_memory_utilization=scenario.memory_share,
        swap_space_gib=profile.swap_space_gib,
        cudagraph_mode=None if profile.cuda_graphs.enabled else "NONE",
        overlap=scenario.host.overlapped,
        pp_max_micro_batch_size=scenario.max_batch_seqs,
        load_balance_method=LOAD_BALANCE_METHODS[0] if ranks is None else ranks.load_balance_method,
        expert_placement=_expert_placement(scenario),
        batching=scenario.batching,
        scheduling=scenario.scheduling,
        caching=scenario.caching,
        predictor=scenario.prediction,
        speculative_config=drafting_of(scenario, config or {}),
        seed=scenario.seed,
        release=profile.release,
    ).with_layout(scenario.layout)


def _check_alone(scenario: Scenario) -> None:
    """Raises ValueError for settings beyond one engine, which are only simulated."""
    check_no_workload_terms(scenario.slo, "an engine run")
    if scenario.pools:
        raise ValueError(f"pools={', '.join(scenario.pools)}: only one engine is run; set pools=none")
    if scenario.replicas > 1:
        raise ValueError(f"replicas={scenario.replicas}: only one engine is run; set it to 1")
    if scenario.scaling is not None:
        raise ValueError(
            f"scaling={type(scenario.scaling).__name__}: only one engine is run; set scaling=none"
        )
    if scenario.failures.events:
        raise ValueError("failures: an engine run has no failures; set failures=none")
    if not isinstance(scenario.admission, AdmitAll):
        name = type(scenario.admission).__name__
        raise ValueError(f"admission={name}: an engine run admits all requests; set admission=none")
    if scenario.retries.max_attempts > 1 or scenario.retries.timeout_s is not None:
        raise ValueError("retries: clients of an engine run wait without limit; set retries=none")


def _expert_placement(scenario: Scenario) -> ExpertPlacing:
    """Returns the placement of experts: with copies of popular ones if the simulator prices these."""
    routing = scenario.engine.kernels.routing
    if routing.placement != "eplb":
        return InOrder()
    return Eplb(num_redundant_experts=routing.num_redundant_experts)


def _kv_cache_dtype(model: ModelSpec) -> str:
    kv_dtype_of(model)  # raises ValueError for an unsupported data type
    return "auto" if model.kv_dtype == model.dtype else model.kv_dtype
