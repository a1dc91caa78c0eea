"""Settings of a serving engine (its limits, memory and host overhead) and of the measuring client.

`Client` is the time that a load generator adds to the TTFT that it reports. Its clock starts before the
engine has the request: it opens a connection, writes the request, and may read the answer late. This is part
of the measurement, not of the engine: `engine.frontend_s` and `engine.frontend` hold the engine's own time.
If runs of a load generator show a larger value for one engine than for others, the cause is unknown, and the
value holds only for runs of this load generator. A run reports which parts its TTFT includes in addition to
the engine: the front end's time and the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fieldlimits import (
    Checked,
    Ge,
    Le,
    NonNegative,
    NonNegativeInt,
    OneOf,
    Positive,
    PositiveInt,
    Unit,
    check,
)
from hwmodels.assembly.site import Kernels
from hwmodels.host import Compilation, CudaGraphs, HostOverhead, Offload
from hwmodels.iterations.memory import MEMORY_RULES, MemoryProfile
from hwmodels.speculation.steps import DraftHost
from policies.core.release import SGLANG_0_5, VLLM_0_32, Release, release_of
from sim.engine.frontend import TOKENS, Frontend, check_range

MAX_SLOTS = 1_000_000
"""Maximum number of running sequences of an engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineProfile(Checked):
    """Settings of an engine apart from its policies; names as in vLLM."""

    max_num_seqs: Annotated[int, Ge(1), Le(MAX_SLOTS), "as each slot is in memory"]
    """Maximum number of sequences that hold KV at the same time."""
    max_num_batched_tokens: PositiveInt
    """Default token budget of the batching policies; activation memory is reserved for this number of tokens.
    """
    host: HostOverhead
    cuda_graphs: CudaGraphs
    compilation: Compilation | None = None
    """How the model runs outside CUDA graphs; None: inductor if CUDA graphs are used, otherwise eager, as
    with vLLM's --enforce-eager.
    """
    kernels: Kernels = Kernels()
    family: str | None = None
    """Engine whose simulated metrics were compared with measurements: vllm, sglang, tensorrt_llm; None: never
    compared. See `sim.setup.notes`.
    """
    default_limits: str | None = None
    """Engine whose device rule set the null limits: see `sim.settings.engine_limits`."""
    load_balance_method: str | None = None
    """Choice of the rank of data-parallel attention for a request, see `policies.core.ranks`; None: the
    engine's choice, round_robin for SGLang and total_requests for others.
    """
    frontend_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds from the arrival of a request until it reaches the scheduler, in addition to the work of
    `frontend`.
    """
    frontend: Frontend | None = None
    """Work of the API server, for whose processes requests wait; None: no work."""
    scheduler_recv_interval: PositiveInt = 1
    """Decode iterations between two checks for new requests; see `sim.engine.frontend`."""
    pp_max_micro_batch_size: Annotated[
        NonNegativeInt | None, "0 for max_num_seqs over the stages", "null for no limit"
    ] = None
    """Maximum number of sequences of a pipeline batch with admissions; 0: max_num_seqs divided by the stages,
    None: no limit (vLLM). See `policies.core.parts`.
    """
    gpu_memory_utilization: float | None = 0.9
    """Share of device memory by the rule of `memory_profile`; None: the share that SGLang computes itself."""
    memory_profile: Annotated[str, OneOf(MEMORY_RULES)] = "vllm"
    """Rule by which the engine determines the memory for KV: see `hwmodels.iterations.memory`."""
    version: str | None = None
    """Version of vLLM whose scheduler and memory profile are modelled, such as 0.11.0; None: the newest."""
    flashinfer_sampler: bool = False
    """Whether FlashInfer samples in vLLM, see `MemoryProfile`."""
    max_model_len: Annotated[int | None, Ge(2), "a prompt and an output token"] = None
    """Maximum number of prompt and output tokens of one sequence, for which KV memory must suffice; None: the
    context length of the model, or as much as KV memory holds (vLLM's `--max-model-len auto`)."""
    swap_space_gib: Annotated[NonNegative, Unit("GiB")] = 4.0
    """Host memory per GPU for the KV of sequences preempted by swapping."""
    num_kv_blocks: Annotated[PositiveInt | None, "null for all that fit"] = None
    """Number of KV blocks of a replica; None: as many as fit in the remaining memory."""
    kv_cache_memory_bytes: Annotated[Positive | None, Unit("B"), "null for the rest of the memory"] = None
    """Bytes of KV per device (vLLM's option), instead of the rest of the engine's share of memory; None: that
    rest.
    """
    offload: Offload = field(default_factory=Offload)
    """Weights in host memory: vLLM's cpu_offload_gb, llama.cpp's n_gpu_layers."""
    draft_host: Mapping[str, DraftHost] = field(default_factory=dict)
    """Host time of draft tokens by method, such as ngram; `others`: all methods that are not listed."""

    def __post_init__(self) -> None:
        check(self)
        if self.gpu_memory_utilization is None:
            if self.memory_profile != "sglang":
                raise ValueError(
                    "gpu_memory_utilization=null: must be > 0 and <= 1; only memory_profile=sglang "
                    "computes it"
                )
        elif not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be > 0 and <= 1")
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise ValueError(
                f"kv_cache_memory_bytes={self.kv_cache_memory_bytes:g}: num_kv_blocks={self.num_kv_blocks} "
                "gives the memory for KV, too; leave one of them out"
            )
        _ = self.memory  # its own checks

    @property
    def launching_host(self) -> HostOverhead:
        """The host overhead with the launches of `compilation`."""
        default = Compilation.inductor if self.cuda_graphs.enabled else Compilation.eager
        return self.host.under(self.compilation or default)

    @property
    def release(self) -> Release:
        """The rules of its scheduler, which differ between engines and releases of vLLM."""
        if self.family == "sglang":
            return SGLANG_0_5
        return release_of(self.version) if self.family == "vllm" else VLLM_0_32

    @property
    def idle_frontend_s(self) -> float:
        """Seconds of an idle front end for a prompt of `TOKENS` tokens."""
        work = self.frontend or Frontend()
        return self.frontend_s + work.request_s + TOKENS * work.prompt_token_s

    def num_frontend_servers(self, data_parallel_size: int) -> int:
        """Returns the processes of the front end; vLLM starts one for each data-parallel rank."""
        if self.frontend is not None and self.frontend.servers is not None:
            return self.frontend.servers
        return data_parallel_size if self.family == "vllm" else 1

    @property
    def memory(self) -> MemoryProfile:
        """The rule by which the engine determines the memory for KV. Raises ValueError for an unknown one."""
        return MemoryProfile(
            rule=self.memory_profile, version=self.version, flashinfer_sampler=self.flashinfer_sampler
        )


OTHERS = "others"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
"""Names of engines by family."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Client(Checked):
    """A load generator. Without any `seconds`, requests reach the front end as soon as they are sent."""

    name: str = "none"
    seconds: Mapping[str, Annotated[NonNegative, Unit("s")]] = field(default_factory=dict)
    """Seconds that it adds to the TTFT, by engine family; `others`: all other engines."""
    range_s: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    """Measured range of these seconds, by engine family; None: not measured."""

    def __post_init__(self) -> None:
        for name in ("seconds", "range_s"):
            for engine in getattr(self, name):
                if engine not in (*ENGINES, OTHERS):
                    raise ValueError(f"{name}.{engine}: must be one of {', '.join((*ENGINES, OTHERS))}")
        check(self)
        for engine, range_s in self.range_s.items():
            if range_s is not None:
                check_range(f"range_s.{engine}", range_s)

    def added_s(self, family: str | None) -> float:
        """Returns the seconds that it adds to the TTFT of an engine."""
        return self.seconds.get(family or OTHERS, self.seconds.get(OTHERS, 0.0))

    def added_range_s(self, family: str | None) -> tuple[float, float] | None:
        """Returns the measured range of these seconds; None: not measured."""
        return self.range_s.get(family or OTHERS, self.range_s.get(OTHERS))


NO_CLIENT = Client()
"""The client of a run without a load generator, which adds no time."""


def frontend_json(engine: EngineProfile, client: Client) -> dict[str, Any]:
    """Returns the times of front end and client for summary.json, s."""
    range_s = None if engine.frontend is None else engine.frontend.range_s
    return {
        "engine_s": engine.idle_frontend_s,
        "engine_range_s": None if range_s is None else list(range_s),
        "client_s": client.added_s(engine.family),
        "client_range_s": (of := client.added_range_s(engine.family)) and list(of),
    }


def frontend_note(engine: EngineProfile, client: Client) -> str:
    """Returns the note on what the TTFT includes, with the range of measurements."""
    whose = ENGINES.get(engine.family or "", "the engine")
    own_range_s = None if engine.frontend is None else engine.frontend.range_s
    own = _ms(engine.idle_frontend_s, own_range_s)
    own = f"{own} of {whose}'s idle front end (prompt of {TOKENS:,} tokens)"
    if client.name == "none":
        return f"TTFT includes {own}, and no time of a client (client=none)."
    range_s = client.added_range_s(engine.family)
    return f"TTFT includes {own}, and {_ms(client.added_s(engine.family), range_s)} of client={client.name}."


def _ms(value_s: float, range_s: tuple[float, float] | None) -> str:
    """Returns a time with the range of its measurements, ms."""
    if range_s is None:
        return f"{value_s * 1e3:.3g} ms (not measured)" if value_s else "0 ms (not measured)"
    return f"{value_s * 1e3:.3g} ms (measured: {range_s[0] * 1e3:.3g} to {range_s[1] * 1e3:.3g})"
