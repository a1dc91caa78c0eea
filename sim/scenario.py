"""Everything that a simulated run consists of, put together: from settings to records and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import pandas as pd

from hwmodels.energy import EnergySettings, PowerModel
from hwmodels.iteration import IterationModel, IterationShape, UnknownIterationError
from hwmodels.memory import GIB, MemoryPlan
from hwmodels.precision import precision_notes
from hwmodels.storage import Storage
from hwmodels.tariff import Tariff
from policies.caching.content import prompt_runs
from policies.caching.eviction.future import FutureUses
from policies.engine import EngineCore
from policies.prediction import LengthPredictor
from policies.routing import Routing
from policies.scheduling.longest_prefix import LongestPrefix
from sim.deployment import Deployment
from sim.links import Links
from sim.metrics.slo import Slo
from sim.metrics.summary import request_metrics, summarise
from sim.records import RunRecords, Status
from sim.signals import check_age
from sim.simulation import Simulation, check_fleet
from sim.workload.answers import Answers
from sim.workload.base import Source, Workload, WorkloadNotes


@dataclass(frozen=True, kw_only=True, slots=True)
class SimSettings:
    """How the simulation is run."""

    leap: bool = True
    """Run iterations that repeat as one event; false steps through each, with the same result."""
    until_s: float | None = None
    """End at this simulated time, whatever is then unfinished."""

    def __post_init__(self) -> None:
        if self.until_s is not None and not 0 < self.until_s < inf:
            raise ValueError(f"until_s={self.until_s}: must be > 0 s; null for no limit")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsSettings:
    """Which part of the run is measured."""

    warmup_s: float = 0.0
    """Simulated seconds at the start that no figure counts."""
    cooldown_s: float = 0.0
    """The same at the end."""

    def __post_init__(self) -> None:
        for name in ("warmup_s", "cooldown_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number >= 0 s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """A run's records, the figures computed from them, and what is needed to draw them."""

    records: RunRecords
    requests: pd.DataFrame
    """The request records with TTFT, TPOT, E2E, queue time and whether the SLO was met."""
    summary: dict[str, Any]
    model: IterationModel
    slo: Slo | None

    @property
    def replicas(self) -> pd.DataFrame:
        """One row a replica: what it was sent, what it did, and for how long it was busy."""
        iterations = self.records.iterations.groupby("replica")
        requests = self.requests[self.requests["replica"] >= 0].groupby("replica")
        table = pd.DataFrame(index=pd.RangeIndex(self.records.num_replicas, name="replica"))
        table["requests"] = requests.size()
        for status in Status:
            mine = self.requests[self.requests["status"] == status.name]
            table[status.name] = mine.groupby("replica").size()
        table["prompt_tokens"] = requests["prompt_tokens"].sum()
        table["output_tokens"] = requests["output_tokens"].sum()
        table["preemptions"] = requests["preemptions"].sum()
        table["iterations"] = iterations.size()
        table = table.fillna(0).astype("int64")
        table["busy_s"] = iterations["duration_s"].sum()
        table["busy_share"] = table["busy_s"] / self.records.end_s if self.records.end_s else 0.0
        return table.fillna(0.0).reset_index()


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(Deployment):
    """One run's settings, as objects. Raises ValueError for settings that do not go together."""

    workload: Workload
    routing: Routing
    slo: Slo | None = None
    prediction: LengthPredictor | None = None
    """Who guesses how long answers will be, for policies that ask."""
    storage: Storage = Storage()
    """Memory below the GPUs'."""
    tariff: Tariff | None = None
    """What clients pay; for the bill in the summary."""
    replicas: int = 1
    """Engines behind the router, all alike."""
    signal_age_s: float = 0.05
    """How old what the router knows of them may be; 0: it is fresh. 50 ms is the Gateway API's default."""
    energy: EnergySettings = EnergySettings()
    seed: int = 0
    sim: SimSettings = SimSettings()
    metrics: MetricsSettings = MetricsSettings()

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas={self.replicas}: must be >= 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: must be >= 0")
        check_age(self.signal_age_s)
        try:
            check_fleet(self.routing, self.replicas)
        except ValueError as error:
            raise ValueError(f"routing.{error}") from None
        Deployment.__post_init__(self)  # super() does not know classes with slots
        if not getattr(self.batching, "serves_alone", True):
            raise ValueError(
                f"batching={type(self.batching).__name__}: half of a disaggregated service, no answer ends "
                "without the other; choose one that does both, such as batching=chunked"
            )
        name = type(self.scheduling).__name__
        if self.scheduling.needs_predictor and self.prediction is None:
            raise ValueError(
                f"prediction=none: {name} needs predicted output lengths; "
                "choose one, such as prediction=histogram"
            )
        if self.caching.needs_predictor and self.prediction is None:
            raise ValueError(
                "caching.reserve=predicted, prediction=none: it needs predicted output lengths; choose a "
                "predictor, such as prediction=histogram, or caching.reserve=max_tokens"
            )
        if self.scheduling.preemption_mode == "swap" and not self.engine.swap_space_gib:
            raise ValueError(
                "scheduling.preemption_mode=swap, engine.swap_space_gib=0: give it host memory, or recompute"
            )
        self._check_branching()
        host_gib, disk_gib = self.caching.tiers_gib
        swap_gib = self.engine.swap_space_gib if self.scheduling.preemption_mode == "swap" else 0.0
        if host_gib + swap_gib > self.storage.host_memory_gib:
            raise ValueError(
                f"caching.host_gib={host_gib:g} and engine.swap_space_gib={swap_gib:g}: "
                f"together must be <= storage.host_memory_gib={self.storage.host_memory_gib:g}, "
                "a GPU's share of the host's memory"
            )
        if disk_gib > self.storage.disk_gib:
            raise ValueError(
                f"caching.disk_gib={disk_gib:g}: must be <= storage.disk_gib="
                f"{self.storage.disk_gib:g}, a GPU's share of the disk"
            )

    def _check_branching(self) -> None:
        """Raise ValueError where no request with several answers could ever be served."""
        answers = getattr(self.workload, "branching", None)
        if not isinstance(answers, Answers) or answers.width == 1:
            return
        asked = f"workload.branching.width={answers.width}"
        pool = self.caching.pool(self.kv_memory(self.plan_memory().num_blocks, FutureUses(())))
        if not pool.can_fork:
            raise ValueError(
                f"{asked}, caching={type(self.caching).__name__}: it cannot share KV between branches; "
                "choose caching=paged, prefix or radix, or workload.branching.width=1"
            )
        for name, limit in (
            ("engine.max_num_seqs", self.engine.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
        ):
            if answers.width > limit:
                raise ValueError(
                    f"{asked}, {name}={limit}: all branches decode together; raise {name} or ask for fewer"
                )

    def source(self) -> Source:
        """The run's traffic. Raises ValueError for a trace that cannot be read."""
        return self.workload.source(seed=self.seed, max_model_len=self.max_model_len)

    def core(self, num_kv_blocks: int, future: FutureUses | None = None) -> EngineCore:
        """One replica's engine, with policies of its own: what they remember stays there."""
        return EngineCore(
            batching=deepcopy(self.batching),
            scheduling=deepcopy(self.scheduling),
            pool=self.caching.pool(self.kv_memory(num_kv_blocks, future)),
            max_num_seqs=self.engine.max_num_seqs,
            max_model_len=self.max_model_len,
            predictor=deepcopy(self.prediction),
            num_swap_blocks=self.num_swap_blocks,
        )

    def future(self) -> FutureUses | None:
        """The traffic to come, for a cache that is an offline bound; None for all others."""
        if not self.caching.needs_future:
            return None
        source = self.source()
        prompts = [tuple(prompt_runs(arrival.request)) for arrival in source.arrivals()]
        if self.replicas > 1 or len(prompts) != source.num_requests:
            raise ValueError(
                "caching.eviction=belady: is told all requests beforehand, which works for a trace or an "
                "open loop on replicas=1"
            )
        return FutureUses(prompts)

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of host memory of a replica for preempted KV."""
        block_bytes = self.caching.block_size * self.kv_bytes_per_token
        return int(self.engine.swap_space_gib * GIB * self.layout.num_devices / block_bytes)

    def links(self) -> Links:
        """The ways between a replica's memory tiers, idle."""
        num_devices = self.layout.num_devices
        return Links(
            bytes_per_token=self.kv_bytes_per_token,
            host_bytes_per_s=self.hardware.pcie.bandwidth_bytes_per_s * self.storage.pcie_share * num_devices,
            disk_bytes_per_s=self.storage.disk_bytes_per_s * num_devices,
            latency_s=self.hardware.pcie.latency_s,
            overlapped=self.storage.overlapped,
        )

    def simulate(self, source: Source, report: Callable[[float, int], None] | None = None) -> RunRecords:
        """Simulate only; `report`: see `Simulation.run`."""
        num_blocks = self.plan_memory().num_blocks
        simulation = Simulation(
            source=source,
            cores=[self.core(num_blocks, self.future()) for _ in range(self.replicas)],
            model=self.iteration_model(),
            routing=deepcopy(self.routing),
            leap=self.sim.leap,
            until_s=self.sim.until_s,
            frontend_s=self.engine.frontend_s,
            plans_ahead=self.engine.host.overlapped,
            links=self.links,
            seed=self.seed,
            signal_age_s=self.signal_age_s,
        )
        return simulation.run(report)

    def run(
        self, source: Source | None = None, report: Callable[[float, int], None] | None = None
    ) -> RunResult:
        """Simulate and measure. `source`: the traffic, if already made."""
        source = source or self.source()
        records = self.simulate(source, report)
        model, memory = self.iteration_model(), self.plan_memory()
        summary = summarise(
            records,
            model=model,
            slo=self.slo,
            price_usd_per_hour_per_replica=self.hardware.price_usd_per_hour * self.layout.num_devices,
            power=PowerModel.of(self.hardware),
            num_devices_per_replica=self.layout.num_devices,
            energy=self.energy,
            tariff=self.tariff,
            warmup_s=self.metrics.warmup_s,
            cooldown_s=self.metrics.cooldown_s,
        )
        summary["memory"] = asdict(memory)
        summary["workload"] = asdict(source.notes)
        summary["notes"] = [
            self.latency.basis(self.replica),
            *self.layout_notes,
            *self.model.notes,
            *precision_notes(self.model, self.hardware),
            *self._limits(model, memory),
            *self._losses(),
            *_left_out(source.notes),
        ]
        return RunResult(
            records=records,
            requests=request_metrics(records.requests, self.slo),
            summary=summary,
            model=model,
            slo=self.slo,
        )

    def _limits(self, model: IterationModel, memory: MemoryPlan) -> Iterator[str]:
        """What these settings cannot reach: latencies, contexts, batches, hits in a cache."""
        lone_s = _lone_seconds(model)
        limits_s = self.slo.limits_s if self.slo else {}
        for term, least_s in lone_s.items():
            if term in limits_s and limits_s[term] < least_s:
                yield (
                    f"slo.{term}_ms={limits_s[term] * 1e3:g}: out of reach, "
                    f"a single short sequence alone takes {least_s * 1e3:.3g} ms"
                )
        limit = self.engine.max_num_seqs
        for name in ("batch_size", "n_parallel"):
            asked = getattr(self.batching, name, None)
            if isinstance(asked, int) and asked > limit:
                yield (
                    f"batching.{name}={asked}: no more than engine.max_num_seqs={limit} run at once; "
                    f"raise that for batches of {asked}."
                )
        pool = self.caching.pool(self.kv_memory(memory.num_blocks, FutureUses(())))
        if isinstance(self.scheduling, LongestPrefix) and not pool.finds_kv:
            yield (
                f"scheduling=LongestPrefix, caching={type(self.caching).__name__}: nothing of a prompt is "
                "ever found there, so the order is that of arrival; prefix, tiered and radix find prefixes."
            )
        num_tokens = pool.max_tokens_per_seq
        if num_tokens < self.max_model_len:
            yield (
                f"The KV cache holds {num_tokens:,} tokens of one sequence, less than the context of "
                f"{self.max_model_len:,}: longer prompts are rejected, longer answers end there."
            )

    def _losses(self) -> Iterator[str]:
        """What the figures do not show: the answers are not the model's."""
        if self.caching.changes_outputs:
            yield (
                f"caching={type(self.caching).__name__}: drops KV that the model would attend to, so answers "
                "change; no figure here says how much worse they are."
            )


def _lone_seconds(model: IterationModel) -> dict[str, float]:
    """The least TTFT and TPOT; none from a model that only replays and has not seen such an iteration."""
    try:
        ttft_s = float(model.seconds(IterationShape(0, 0, 1, 1, 1, 1, 1)))
        return {"ttft": ttft_s, "tpot": model.decode_seconds(1, 2, 1)[0]}
    except UnknownIterationError:
        return {}


def _left_out(notes: WorkloadNotes) -> Iterator[str]:
    """What the traffic is not: rows left out, requests shortened."""
    for reason, count in notes.skipped.items():
        yield f"{count:,} skipped: {reason}."
    if notes.num_clipped:
        yield f"{notes.num_clipped:,} requests were clipped to the model's context."
    if notes.num_conversations_cut:
        yield f"{notes.num_conversations_cut:,} conversations ended early: the context was full."
