"""A model served by an engine on some hardware: the source of the iteration times and memory of a replica.

The module also checks that a proposer, its draft and the model are compatible, and holds their effects.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fieldlimits import Checked, check
from hwmodels.assembly.attention import WithAttentionWeights
from hwmodels.assembly.site import Kernels
from hwmodels.device import Device
from hwmodels.host import GIB, HostOverhead
from hwmodels.iterations import IterationModel, Jitter
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import MemoryPlan, adapter_bytes, plan_memory, weight_bytes
from hwmodels.levels import Calibrated, LatencyLevel, Replica, Spec, jitter_of
from hwmodels.model import ModelSpec
from hwmodels.model.weights import Lora
from hwmodels.operators import Calibration
from hwmodels.speculation import SpeculativeModel
from hwmodels.speculation.draft import Draft, HeadDraft, LayerDraft
from hwmodels.speculation.steps import CHAIN, DraftHost, DraftShape, draft_host_of
from policies.adapters import AdapterServing
from policies.adapters.serving import AdapterMemory
from policies.batching import Batching, BatchingTraits, DataParallel
from policies.caching.block_tables import KvGroup, KvLayerKind, kv_groups
from policies.caching.content import FutureUses
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.core.release import Release
from policies.scheduling import Scheduling
from policies.speculation import DraftLength, Proposer, num_places
from policies.user_code import name_of, traits_of
from sim.engine.replica_pool import KvLayout
from sim.setup.combinations import (
    check_chain,
    check_experts,
    check_ranks,
    check_replica,
    check_shares,
    num_groups,
)
from sim.setup.engine_profile import EngineProfile
from sim.speculation import Acceptance

if TYPE_CHECKING:
    from policies.speculation.engine.drafting import Drafting


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment(Checked):
    """Settings of a replica, as objects. Raises ValueError for settings that are incompatible."""

    model: ModelSpec
    hardware: Device
    engine: EngineProfile
    batching: Batching
    scheduling: Scheduling
    caching: Caching
    calibration: Calibration = Calibration()
    """Efficiency of kernels on the hardware, for `latency=calibrated`."""
    latency: LatencyLevel = Calibrated()
    """Hardware model that computes the duration of iterations."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage; None: equal numbers."""
    context_parallel_size: int = 1
    attention_data_parallel_size: int = 1
    expert_parallel_size: int = 1
    sequence_parallel: bool = False
    """Whether sequence parallelism is used; for this and the sizes see `hwmodels.iterations.layout`."""
    attention_data_parallel_padding: bool = False
    """Whether attention groups are padded to the most loaded one."""
    layout_notes: tuple[str, ...] = ()
    """Reasons for the sizes, if a policy has chosen them: see `sim.setup.estimates`."""
    lora: Lora | None = None
    """LoRA adapters that are part of every batch; None: no adapters."""
    adapters: AdapterServing | None = None
    """Policy that serves the requests' LoRA adapters; None: requests have no adapters."""
    speculation: Proposer | None = None
    """Proposer of draft tokens; None: a sequence gets one token per pass."""

    def __post_init__(self) -> None:
        check(self)
        check_replica(self)
        self.layout.check(self.model, self.hardware)
        check_ranks(self.batching, self.layout, self.latency)
        check_shares(self.data_parallel, self.engine, self.batching)
        check_experts(self.model, self.engine, self.layout, self.latency)
        check_chain(self.hardware, self.engine, self.caching)
        if self.speculation is not None:
            check_proposer(self.speculation, self.model, self.layout)
        limit = self.model.max_position_embeddings
        if self.engine.max_model_len is not None and self.engine.max_model_len > limit:
            raise ValueError(
                f"engine.max_model_len={self.engine.max_model_len}: must be <= {limit}, "
                f"the context of {self.model.name}"
            )

    @property
    def layout(self) -> ParallelLayout:
        """Parallel layout of one replica."""
        return ParallelLayout(
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            pp_layer_partition=self.pp_layer_partition,
            context_parallel_size=self.context_parallel_size,
            attention_data_parallel_size=self.attention_data_parallel_size,
            expert_parallel_size=self.expert_parallel_size,
            sequence_parallel=self.sequence_parallel,
            attention_data_parallel_padding=self.attention_data_parallel_padding,
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks of data-parallel attention in a replica, each with an equal share of all limits."""
        return num_groups(self.layout, self.latency)

    @property
    def data_parallel(self) -> DataParallel | None:
        """The ranks of data-parallel attention in a replica; None: there is one."""
        if self.num_ranks == 1:
            return None
        method = self.engine.load_balance_method
        if method is None:
            method = "round_robin" if self.engine.family == "sglang" else "total_requests"
        return DataParallel(size=self.num_ranks, load_balance_method=method)

    @property
    def replica(self) -> Replica:
        """The replica as seen by the hardware models."""
        return Replica(
            model=self.model,
            device=self.hardware,
            layout=self.layout,
            calibration=self.calibration,
            host=self.host,
            cuda_graphs=self.engine.cuda_graphs,
            kernels=self.kernels,
            lora=self.lora,
            offload=self.engine.offload if self.engine.offload.is_used else None,
        )

    @property
    def kernels(self) -> Kernels:
        """Kernels of the engine, with the slots of its adapters in their grid."""
        kernels = self.engine.kernels
        num_slots, _ = (0, 0) if self.adapters is None else self.adapters.slots
        if not num_slots or kernels.lora.max_loras is not None:
            return kernels
        return replace(kernels, lora=replace(kernels.lora, max_loras=num_slots))

    @property
    def host(self) -> HostOverhead:
        """Host overhead of the engine; synchronous if the proposer of drafts does not overlap."""
        return host_of(self.engine.launching_host, self.speculation)

    @property
    def jitter(self) -> Jitter | None:
        """Random scatter of the iteration times; some latency levels lack this setting."""
        return jitter_of(self.latency)

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens of one sequence."""
        return self.engine.max_model_len or self.model.max_position_embeddings

    @property
    def max_num_seqs(self) -> int:
        """Maximum running sequences, limited by the engine and by the memory for states."""
        state_slots = self.plan_memory().state_slots
        return self.engine.max_num_seqs if state_slots is None else min(self.engine.max_num_seqs, state_slots)

    @property
    def max_num_batched_tokens(self) -> int:
        """Maximum number of tokens of one iteration: the limit of the batching policy, else of the engine."""
        limit = traits_of(self.batching, BatchingTraits).max_num_batched_tokens
        return self.engine.max_num_batched_tokens if limit is None else limit

    def plan_memory(self) -> MemoryPlan:
        """Returns the memory plan of each device. Raises ValueError if the model does not fit.

        Plans are cached by settings, because a run reads its plan ten times.
        """
        settings: dict[str, Any] = {
            "model": self.model,
            "device": self.hardware,
            "layout": self.layout,
            "gpu_memory_utilization": self.engine.gpu_memory_utilization,
            "profile": self.engine.memory,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.engine.max_num_seqs,
            "max_model_len": self.max_model_len,
            "block_size": self.caching.block_size,
            "num_kv_blocks": self.engine.num_kv_blocks,
            "kv_cache_memory_bytes": self.engine.kv_cache_memory_bytes,
            "cuda_graphs": self.engine.cuda_graphs,
            "lora": self.lora if self.adapters is None else self._adapter_slots(self.adapters),
            "offload": self.engine.offload,
            "blocks_hold_states": self.caching.holds_states,
            "finds_prefixes": self.caching.finds_prefixes,
            "draft": None if self.speculation is None else draft_of(self.speculation),
            "num_redundant_experts": self.engine.kernels.routing.num_redundant_experts,
            "kv_group_layers": self.kv_groups[0].num_layers if self.kv_groups else None,
        }
        kept = tuple(_memory_plans)  # another thread may add one
        plan = next((one for known, one in kept if known == settings), None)
        if plan is None:
            plan = plan_memory(**settings)
            _memory_plans.appendleft((settings, plan))
        self._check_longest_sequence(plan)
        return plan

    @property
    def memory_share(self) -> float:
        """Share of device memory that the engine takes, by the rule of its `memory_profile`."""
        return self.engine.memory.share(
            self.engine.gpu_memory_utilization,
            self.hardware,
            self.layout,
            max_num_batched_tokens=self.max_num_batched_tokens,
            graphs=self.engine.cuda_graphs,
        )

    @property
    def usable_bytes(self) -> float:
        """Bytes of one device for weights, activations and KV."""
        total = self.engine.memory.total_bytes(self.hardware, self.layout)
        return total if self.engine.memory_profile == "tensorrt_llm" else self.memory_share * total

    def longest_sequence(self, plan: MemoryPlan) -> int:
        """Returns the tokens of the longest sequence that KV memory holds."""
        usable = plan.num_blocks // self.layout.attention_data_parallel_size
        low, high = 0, usable * plan.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_of(middle, plan) <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    def _blocks_of(self, length: int, plan: MemoryPlan) -> int:
        """Returns the maximum number of blocks of a sequence of `length` tokens, over all layer groups."""
        states, block_size = self._state_blocks(plan), plan.block_size
        if not self.kv_groups:
            return states - (-length // block_size)
        most = self.max_in_flight_tokens
        return states + sum(group.max_blocks(most, length, block_size) for group in self.kv_groups)

    @property
    def max_in_flight_tokens(self) -> int:
        """Maximum number of tokens in planned, unfinished steps (vLLM 0.33, `VllmConfig`).

        Asynchronous scheduling has two such steps, a pipeline one per stage.
        """
        num_stages = self.layout.pipeline_parallel_size
        num_steps = 2 if self.host.overlapped and num_stages == 1 else num_stages
        return num_steps * self.max_num_batched_tokens

    def _state_blocks(self, plan: MemoryPlan) -> int:
        """Returns a sequence's number of blocks for its states, on all devices that share its tokens."""
        return plan.state_blocks * self.layout.context_parallel_size

    def _check_longest_sequence(self, plan: MemoryPlan) -> None:
        """Raises ValueError, like vLLM at startup, if no sequence of engine.max_model_len fits."""
        length = self.engine.max_model_len
        if length is None or self.engine.num_kv_blocks is not None or self.caching.changes_outputs:
            return
        usable = plan.num_blocks // self.layout.attention_data_parallel_size
        if self._blocks_of(length, plan) > usable:
            raise ValueError(
                f"engine.max_model_len={length}: {self.kv_shortage(plan, length)}. Try increasing "
                "engine.gpu_memory_utilization or decreasing engine.max_model_len"
            )

    def kv_shortage(self, plan: MemoryPlan, length: int) -> str:
        """Returns vLLM's sentences on a sequence of `length` tokens for which KV memory does not suffice."""
        blocks = self._blocks_of(length, plan) / self.layout.context_parallel_size
        needed = blocks * plan.block_size * plan.kv_bytes_per_token
        longest = self.longest_sequence(plan)
        return (
            f"to serve at least one request with the model's max seq len ({length}), {needed / GIB:.2f} GiB "
            f"KV cache is needed, which is larger than the available KV cache memory "
            f"({plan.kv_bytes / GIB:.2f} GiB). Based on the available memory, the estimated maximum model "
            f"length is {longest}"
        )

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """KV groups of the model, for a cache with groups; empty for others."""
        if not self.caching.has_groups:
            return ()
        return kv_groups(
            KvLayerKind(layers.count, layers.window, layers.window_is_chunk, layers.bytes_per_token)
            for layers in self.model.kv_layers()
        )

    @property
    def kv_layout(self) -> KvLayout:
        """Division of the KV of a sequence over the devices of a replica."""
        attentions = [block.attention for block in self.model.blocks]
        is_latent = any(attention.kv_is_latent for attention in attentions)
        return KvLayout(
            1 if is_latent else min(attention.num_kv_heads for attention in attentions),
            self.model.num_layers,
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.pp_layer_partition,
        )

    def adapter_memory(self) -> AdapterMemory:
        """Returns the memory that an adapter takes in a replica."""
        one_rank = adapter_bytes(self.model, self.layout, Lora(rank=1)) * self.layout.num_devices
        return AdapterMemory(one_rank, self.caching.block_size * self.kv_bytes_per_token)

    @staticmethod
    def _adapter_slots(adapters: AdapterServing) -> Lora | None:
        """Returns the adapter slots for which memory is reserved; None: no memory is reserved."""
        num_slots, rank = adapters.slots
        return Lora(rank=rank, num_active=num_slots) if num_slots else None

    def kv_memory(self, num_blocks: int, future: FutureUses | None = None) -> KvMemory:
        """Returns the KV memory of a replica with num_blocks blocks; `future` is for offline bounds."""
        return KvMemory(
            num_blocks=num_blocks,
            bytes_per_token=self.kv_bytes_per_token,
            num_devices=self.layout.num_devices,
            max_model_len=self.max_model_len,
            future=future,
            groups=self.kv_groups,
            max_in_flight_tokens=self.max_in_flight_tokens,
            state_blocks=self._state_blocks(self.plan_memory()),
        )

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV per token in a block, over all devices that hold a part of the block."""
        plan, layout = self.plan_memory(), self.layout
        of_target = plan.kv_bytes_per_token - plan.draft_kv_bytes_per_token
        of_draft = plan.draft_kv_bytes_per_token / layout.pipeline_parallel_size  # the last stage has it
        return (of_target + of_draft) * layout.num_devices / plan.num_pools

    @property
    def merge_s(self) -> float:
        """Seconds to unmerge one adapter and merge another: all weights are read and written twice."""
        bandwidth = self.hardware.memory_bandwidth_bytes_per_s
        return 4 * weight_bytes(self.model, self.layout) / bandwidth

    def iteration_model(self) -> IterationModel:
        """Returns the model of iteration times. Raises ValueError if `latency` cannot price the replica.

        Equal deployments share one object because it caches results, which saves 10 % of the time of a short
        run.
        """
        replica, proposer = self.replica, self.speculation
        reads = self.caching.weight_reads
        settings = self.latency, replica, proposer, self.engine.draft_host, reads
        for known, model in tuple(_iteration_models):  # another thread may add one
            if known == settings:
                return model
        model = self.latency.iteration_model(replica)
        if proposer is not None:
            model = with_drafts(model, proposer, replica, self.engine.draft_host)
        if reads is not None and not isinstance(model, recorded_times()):
            calibration = Calibration() if isinstance(self.latency, Spec) else self.calibration
            site = replica.roofline(calibration).site
            model = WithAttentionWeights(model, site, **reads._asdict())
        _iteration_models.appendleft((settings, model))
        return model


def recorded_times() -> type[IterationModel]:
    """Returns the class of models with times of complete iterations, including reads of attention weights."""
    from hwmodels.levels.recorded import Recorded  # noqa: PLC0415 (it imports scipy)

    return Recorded


_memory_plans: deque[tuple[dict[str, Any], MemoryPlan]] = deque(maxlen=16)
"""The latest plans of this process, with their settings."""

_iteration_models: deque[tuple[tuple[Any, ...], IterationModel]] = deque(maxlen=16)
"""The latest models of this process, with their settings."""


KEY = "speculation"
ASSUMED = ("iid", "beta")
"""Acceptance models whose rates have a default that is not specific to a model or workload."""


def draft_of(proposer: Proposer) -> Draft:
    """Returns the cost and the memory of a proposer's draft. Raises ValueError if it has none."""
    draft = proposer.draft
    if not callable(getattr(draft, "weight_bytes", None)):
        raise ValueError(
            f"{KEY}.draft={draft}: must be what a draft costs, such as hwmodels.speculation.draft.ModelDraft"
        )
    return cast("Draft", draft)


def host_of(host: HostOverhead, proposer: Proposer | None) -> HostOverhead:
    """Returns the host overhead with a proposer: synchronous if drafts need the tokens on the host first."""
    if proposer is None or proposer.rules.overlaps or not host.overlapped:
        return host
    return replace(host, overlapped=False)


def check_proposer(proposer: Proposer, model: ModelSpec, layout: ParallelLayout) -> None:
    """Raises ValueError, with the key of the setting, if a model on some devices cannot have a draft."""
    draft = draft_of(proposer)
    try:
        draft.check(model, layout)
    except ValueError as error:
        raise ValueError(f"{KEY}.draft.{error}") from None
    _check_places(proposer, draft)
    if isinstance(draft, LayerDraft) and draft.kind == "mtp":
        _check_modules(draft, model)
    if isinstance(draft, LayerDraft) and (draft.vocab_size or 0) > model.vocab_size:
        raise ValueError(
            f"{KEY}.draft.vocab_size={draft.vocab_size}: must be <= {model.vocab_size}, the vocabulary of "
            f"{model.name}"
        )


def _check_places(proposer: Proposer, draft: Draft) -> None:
    """Raises ValueError if a proposer drafts more places than there are heads."""
    places = num_places(proposer)
    if isinstance(draft, HeadDraft) and places > draft.num_heads:
        setting = f"num_speculative_tokens={places}" if proposer.tree is None else f"tree: its depth {places}"
        raise ValueError(
            f"{KEY}.{setting}: must be <= {KEY}.draft.num_heads={draft.num_heads}, as each head predicts one "
            "place"
        )


def _check_modules(draft: LayerDraft, model: ModelSpec) -> None:
    """Raises ValueError unless a model has enough modules for multi-token prediction."""
    modules = model.num_mtp_modules
    if not modules:
        raise ValueError(
            f"{KEY}=mtp: {model.name} has no layers for multi-token prediction; choose another proposer, "
            "such as speculation=eagle3 or draft_model, or a model with them, such as deepseek_r1"
        )
    if draft.num_modules > modules:
        raise ValueError(
            f"{KEY}.num_nextn_predict_layers={draft.num_modules}: must be <= {modules}, the modules of "
            f"{model.name}"
        )


def max_tokens_per_pass(proposer: Proposer | None) -> int:
    """Returns the maximum number of tokens of a sequence per pass."""
    return 1 if proposer is None else 1 + num_places(proposer)


def with_drafts(
    base: IterationModel, proposer: Proposer, replica: Replica, hosts: Mapping[str, DraftHost]
) -> IterationModel:
    """Returns the iteration model of a replica that speculates.

    Raises ValueError if it cannot be priced. hosts: the host time of draft tokens, by method.
    """
    tree = proposer.tree
    shape = CHAIN
    if tree is not None:
        by_level = Counter(tree.depths)
        shape = DraftShape.of_tree(tuple(by_level[depth] for depth in range(1, tree.depth + 1)))
    host = draft_host_of(hosts, proposer.method)
    return SpeculativeModel(base, draft_of(proposer), replica, shape=shape, host=host)


def drafting_of(
    proposer: Proposer,
    draft_length: DraftLength,
    model: IterationModel,
    tpot_s: float | None,
) -> Callable[[BlockPool, Release], Drafting]:
    """Returns the factory of the part of an engine that verifies draft tokens.

    model: for policies that need the price of a pass.
    """
    # Runs without speculation do not import these.
    from policies.speculation.engine.drafting import Drafting  # noqa: PLC0415
    from policies.speculation.engine.drafts import Speculation  # noqa: PLC0415

    assert isinstance(model, SpeculativeModel)
    speculation = Speculation(
        proposer=proposer, draft_length=draft_length, estimate=model.pass_seconds, tpot_s=tpot_s
    )
    return partial(Drafting, speculation)


def stores_kv(proposer: Proposer | None, model: ModelSpec, layout: ParallelLayout) -> bool:
    """Returns whether drafts have their own KV, which must also be computed for the prompt."""
    return proposer is not None and draft_of(proposer).kv_bytes_per_token(model, layout) > 0


def speculation_notes(proposer: Proposer, acceptance: Acceptance | None, host: HostOverhead) -> Iterator[str]:
    """Yields the notes on a pool whose sequences speculate. host: as set."""
    from sim.speculation.acceptance.iid import (  # noqa: PLC0415 (most runs do not speculate)
        TASKS,
        Iid,
        rate_sentence,
    )

    if isinstance(acceptance, Iid) and acceptance.rate is None:
        yield rate_sentence(proposer.method, acceptance.task or TASKS[0])
    elif name_of(acceptance) in ASSUMED:
        yield (
            f"acceptance={name_of(acceptance)}: how many draft tokens are accepted is assumed, not "
            "measured, and speed-ups depend on it; set it for your requests, or choose acceptance=table, "
            "text or spec_bench."
        )
    if host.overlapped and not proposer.rules.overlaps:
        yield (
            f"speculation={proposer.method}: is not run with asynchronous scheduling, so the engine "
            "schedules synchronously, although engine.host.overlapped=true."
        )
