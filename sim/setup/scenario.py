"""The settings of a whole simulated run: checks them, runs the simulation and computes its metrics.

The module is long because it is one object: all settings, their checks, and the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Annotated, Any

from fieldlimits import Ge, Le, Positive
from hwmodels.costs import EnergySettings, PowerModel, Tariff
from policies.adapters.serving import Adapter
from policies.batching import BatchingTraits
from policies.caching.content import FutureUses, prompt_segments
from policies.user_code import name_of, traits_of
from sim.cluster.attached import ProcessError, UserProcess
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation, check_fleet
from sim.engine.replica_pool import ReplicaPool
from sim.metrics.definitions import Window, plain_json
from sim.metrics.dialects import MetricsSettings, in_dialects
from sim.metrics.distributions import EXACT, Kept
from sim.metrics.figure import FigureSetting, PoolHardware, own_figures
from sim.metrics.measured import measure
from sim.metrics.result import RunResult
from sim.metrics.summary import RunFigures
from sim.metrics.token_times import known_token_times
from sim.metrics.workload import OwnLatencies, OwnLatency, SectionFigure
from sim.records.run import PoolRecord, RecordChunk, RunRecords
from sim.records.table import AnyTable
from sim.setup.combinations import check_run
from sim.setup.engine_profile import NO_CLIENT, Client, frontend_json, frontend_note
from sim.setup.notes import encoder_notes, expected_errors_json, pool_notes, resharding_notes, workload_notes
from sim.setup.pool import (
    PoolSettings,
    check_kv,
    check_roles,
    check_slo,
    check_turns,
    first_token_at,
    num_reached,
    taking_turns,
    with_idle,
)
from sim.workload.base import Source, Workload, WorkloadNotes, own_latencies, own_sections
from sim.workload.modified import LongerSource, answers_of, branching_key, faster

if TYPE_CHECKING:
    from sim.metrics.result import RunSums


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(PoolSettings, ClusterSettings):
    """Settings of a run, as objects. Raises ValueError for settings that are incompatible.

    Without `pools`, the inherited settings are those of the only pool; else they are the defaults of the
    pools, and a request must fit in each of these.
    """

    workload: Workload
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    """Pools of different replicas behind the router, by name; empty: `replicas` of one kind."""
    client: Client = NO_CLIENT
    """The load generator that measures TTFT."""
    tariff: Tariff | None = None
    """Prices that clients pay, for the bill in the summary; None: no bill."""
    energy: EnergySettings = EnergySettings()
    load: Annotated[Positive, "2 is twice the traffic"] = 1.0
    """Factor on the rate of open-loop arrivals: see `sim.workload.modified`."""
    prompt_scale: Annotated[float, Ge(1e-6), Le(1e6), "2 is twice as long"] = 1.0
    """Factor on the length of prompts: see `sim.workload.modified`."""
    output_scale: Annotated[float, Ge(1e-6), Le(1e6), "2 is twice as long"] = 1.0
    """Factor on the length of outputs."""
    sim: SimSettings = SimSettings()
    metrics: MetricsSettings = MetricsSettings()

    def __post_init__(self) -> None:
        ClusterSettings.__post_init__(self)  # super() does not know classes with slots
        self._check_failures()
        has_roles = any(pool.role != "mixed" for pool in self.pools_by_name.values())
        for key, routing in (("routing", self.routing), ("decode_routing", self.decode_routing)):
            try:
                if has_roles or key == "routing":
                    check_fleet(routing, self.num_replicas)
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from None
        PoolSettings.__post_init__(self)
        check_run(self)
        check_roles(self.pools_by_name, self.network, self.roles)
        self._resolve()
        self._check_migration()
        if self.encoders.replicas:
            self.network.check(next(iter(self.pools_by_name.values())).hardware)
        if self.turns.sleep_level is not None:
            check_turns(self.pools, self.storage.host_memory_gib if self.turns.sleep_level == 1 else inf)
        self._check_recovery()
        self._check_adapters()
        self._check_models()
        self._check_width()
        check_slo(self.slo, self.workload)
        self._check_shards()
        own_figures(self.metrics.own)

    def _resolve(self) -> None:
        """Sets derived settings: the replica of the first token, and the task of the drafts."""
        sender = self.kv_transfer.first_token_at or first_token_at(self.pools_by_name)
        object.__setattr__(self, "kv_transfer", replace(self.kv_transfer, first_token_at=sender))
        task = getattr(self.workload, "task", None)
        if task is None or not any(pool.speculation for pool in self.pools_by_name.values()):
            return
        from sim.speculation.acceptance.iid import for_task  # noqa: PLC0415 (most runs do not speculate)

        object.__setattr__(self, "acceptance", for_task(self.acceptance, task))
        pools = {
            name: replace(pool, acceptance=for_task(pool.acceptance, task))
            for name, pool in self.pools.items()
        }
        object.__setattr__(self, "pools", pools)

    def _check_migration(self) -> None:
        """Raises ValueError if no request could move to another replica, or no link is known for it."""
        if self.migration.interval_s is None:
            return
        if all(pool.replicas == 1 and pool.scaling is None for pool in self.pools_by_name.values()):
            raise ValueError(
                f"migration={name_of(self.migration)}, replicas=1: no pool has another replica to which a "
                "request could move; set replicas >= 2, or choose migration=none"
            )
        for pool in self.pools_by_name.values():
            self.network.check(pool.hardware)

    def _check_shards(self) -> None:
        """Raises ValueError for more shards than replicas."""
        if isinstance(self.sim.shards, int) and self.sim.shards > self.num_replicas:
            left = "" if self.sim.thin == 1 else f" that sim.thin={self.sim.thin} leaves"
            raise ValueError(
                f"sim.shards={self.sim.shards}: must be <= {self.num_replicas}, the number of "
                f"replicas{left}, or auto"
            )

    def _check_width(self) -> None:
        """Raises ValueError for more branches of a request than can decode together."""
        width, key = answers_of(self.workload).width, f"{branching_key(self.workload)}.width"
        for pool in self.pools_by_name.values() if width > 1 else ():
            traits = traits_of(pool.batching, BatchingTraits)
            for name, limit in (
                ("engine.max_num_seqs", pool.engine.max_num_seqs),
                ("max_num_batched_tokens", pool.max_num_batched_tokens),
                ("batching.max_num_scheduled_tokens", traits.max_num_scheduled_tokens),
                ("batching.n_batch", traits.n_batch),
            ):
                if limit is not None and width > limit:
                    raise ValueError(
                        f"{key}={width}, {name}={limit}: all branches decode together; raise {name} or lower "
                        "the width"
                    )

    def _check_failures(self) -> None:
        """Raises ValueError for failures of replicas or pools that do not exist."""
        indices, pools = iter(range(self.num_replicas)), {}
        for name, pool in self.pools_by_name.items():
            pools[name] = [next(indices) for _ in range(pool.replicas)]
        try:
            self.failures.check(self.num_replicas, pools)
        except ValueError as error:
            raise ValueError(f"failures.{error}") from None

    def _check_recovery(self) -> None:
        """Raises ValueError if requests could not continue after a crash as `recovery` requires."""
        key = f"recovery.way={self.recovery.way}"
        if self.recovery.way == "scratch":
            return
        for name, pool in self.pools_by_name.items():
            if pool.role == "prefill" and pool.adapters is not None:
                raise ValueError(
                    f"{key}, pools.{name}.role=prefill: a request with an adapter can continue in mixed "
                    f"replicas only; choose recovery=scratch, or pools.{name}.adapters=none"
                )
        if self.recovery.way == "kv":
            if self.num_replicas == 1 and all(pool.scaling is None for pool in self.pools_by_name.values()):
                raise ValueError(f"{key}, replicas=1: must be >= 2, as KV is copied to another replica")
            try:
                check_kv(self.pools_by_name)
            except ValueError as error:
                raise ValueError(f"{key}: {error}; or choose recovery=tokens") from None
            for pool in self.pools_by_name.values():
                self.network.check(pool.hardware)

    def _check_adapters(self) -> None:
        """Raises ValueError if the adapters that requests name cannot be served."""
        for name, pool in self.pools_by_name.items():
            where = f"pools.{name}." if name else ""
            if pool.adapters is None:
                if self.served_adapters:
                    raise ValueError(
                        f"{where}adapters=none: requests of the workload name {len(self.served_adapters)} "
                        "LoRA adapters; choose a policy, such as adapters=fixed_slots"
                    )
                continue
            fitted = pool.adapters.fitted(adapter.rank for adapter in self.served_adapters)
            object.__setattr__(pool, "adapters", fitted)
            try:
                pool.check_served(self.served_adapters)
            except ValueError as error:
                message = str(error)
                is_of_workload = "base_model=" in message
                group = "workload." if is_of_workload else "adapters."
                group = "" if message.startswith("caching:") else group
                raise ValueError(f"{where}{group}{error}") from None

    def _check_models(self) -> None:
        """Raises ValueError if requests name a model that no pool serves."""
        served = {pool.model.name for pool in self.pools_by_name.values()}
        requested: Mapping[str, float] = getattr(self.workload, "models", {})
        for model in requested:
            if model not in served:
                raise ValueError(
                    f"workload.models.{model}: no pool serves it; served: {', '.join(sorted(served))}; "
                    "add a pool for it to `pools`"
                )
        if len(served) > 1 and not requested:
            raise ValueError(
                f"pools: serve {', '.join(sorted(served))}, but requests of the workload name no model; "
                "choose workload=callers and set the shares in workload.models"
            )

    @property
    def tpot_s(self) -> float | None:
        """Time per output token that the SLO allows, s; None: no limit."""
        return None if self.slo is None else self.slo.limits_s.get("tpot")

    @property
    def served_adapters(self) -> tuple[Adapter, ...]:
        """The adapters named by requests of the workload."""
        served: tuple[Adapter, ...] = getattr(self.workload, "adapters", ())
        return served

    @property
    def pools_by_name(self) -> Mapping[str, PoolSettings]:
        """All pools by name; the only pool of a run without `pools` is called ""."""
        return self.pools or {"": self}

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all pools."""
        return sum(pool.replicas for pool in self.pools_by_name.values())

    def source(self) -> Source:
        """Returns the traffic of the run. Raises ValueError for a trace that cannot be read."""
        longest = min(pool.max_model_len for pool in self.pools_by_name.values())
        source: Source
        if self.prompt_scale == self.output_scale == 1:
            source = self.workload.source(seed=self.seed, max_model_len=longest)
        else:
            source = LongerSource(
                self.workload,
                seed=self.seed,
                max_model_len=longest,
                prompt_scale=self.prompt_scale,
                output_scale=self.output_scale,
            )
        return source if self.load == 1 else faster(source, self.load)

    def future(self) -> FutureUses | None:
        """Returns the future requests, for a cache that is an offline bound; None for all other caches."""
        if not any(pool.caching.needs_future for pool in self.pools_by_name.values()):
            return None
        source = self.source()
        prompts = [tuple(prompt_segments(arrival.request)) for arrival in source.arrivals()]
        if self.num_replicas > 1 or len(prompts) != source.num_requests:
            raise ValueError(
                "caching.eviction=belady: needs all requests in advance, so it works for a trace or an open "
                "loop on replicas=1 only"
            )
        return FutureUses(prompts)

    def replica_pools(self, served: Sequence[Adapter] | None = None) -> list[ReplicaPool]:
        """Returns the pools of one run, from which its replicas are created.

        served: the adapters that an engine serves when it is created; None: those of the workload.
        """
        future = self.future()
        pools = self.pools_by_name.items()
        adapters = self.served_adapters if served is None else served
        made = [self._measured(pool.pool(name, future, adapters, self.tpot_s), pool) for name, pool in pools]
        level = self.turns.sleep_level
        return made if level is None else taking_turns(made, list(self.pools.values()), level)

    def _measured(self, made: ReplicaPool, pool: PoolSettings) -> ReplicaPool:
        """Returns a pool whose requests arrive later by the client's added time."""
        added_s = self.client.added_s(pool.engine.family)
        return replace(made, frontend_s=made.frontend_s + added_s) if added_s else made

    def simulate(
        self,
        source: Source,
        report: Callable[[float, int], None] | None = None,
        attach: Sequence[UserProcess] = (),
    ) -> RunRecords:
        """Runs the simulation without computing metrics; `report`: see `Simulation.run`.

        attach: user processes, see `sim.cluster.attached`.

        If sim.shards is set, the shards run in this process, one after the other.
        """
        if attach and (self.sim.shards is not None or self.sim.thin != 1):
            raise ProcessError(
                f"attach, sim.shards={self.sim.shards}, sim.thin={self.sim.thin}: a process sees the whole "
                "fleet; set sim.shards=null and sim.thin=1"
            )
        num_used = self.num_replicas if attach else num_reached(self, self.pools_by_name, self.sim, source)
        if num_used < self.num_replicas and not self.pools:
            return with_idle(replace(self, replicas=num_used).simulate(source, report), self.num_replicas)
        if self.sim.shards is not None:
            from sim.shards.whole_run import run_all  # noqa: PLC0415 (most runs are not divided)

            return run_all(source, self.source, self.replica_pools(), self, self.sim, report)
        simulation = Simulation(
            source=source,
            pools=self.replica_pools(),
            cluster=self.for_a_run(),
            sim=self.sim,
            attach=attach,
        )
        return simulation.run(report)

    def run(
        self,
        source: Source | None = None,
        report: Callable[[float, int], None] | None = None,
        attach: Sequence[UserProcess] = (),
    ) -> RunResult:
        """Runs the simulation and computes its metrics.

        source: the traffic; None: `source()`. report, attach: see `simulate`.
        """
        source = source or self.source()
        return self.result(self.simulate(source, report, attach), source.notes)

    def result(self, records: RunRecords, traffic: WorkloadNotes) -> RunResult:
        """Computes the metrics of the records of a run. traffic: the notes of its source."""
        setting = self.figure_setting(self.pool_hardware(), records.pools)
        own = OwnLatencies(setting.new_latencies(), setting.own_terms)
        part = measure(records, self.metrics, self.slo, own.completed(RecordChunk.of(records)).own_s)
        figures = RunFigures(setting, part.window)
        figures.add(RecordChunk.of(records), part.table)
        return self._result(records, part.table, traffic, setting, figures.summary(records, part))

    def result_of_sums(self, sums: RunSums, end: RunRecords, traffic: WorkloadNotes) -> RunResult:
        """Returns the result of a run that has streamed its records. end: the records, with empty tables."""
        setting, summary = sums.figures.setting, sums.figures.summary(end)
        return replace(self._result(end, end.requests, traffic, setting, summary), sums=sums)

    def _result(
        self,
        records: RunRecords,
        requests: AnyTable,
        traffic: WorkloadNotes,
        setting: FigureSetting,
        summary: dict[str, Any],
    ) -> RunResult:
        """Returns the result of a run. summary: its metrics, to which settings and notes are added."""
        summary["memory"] = asdict(next(iter(self.pools_by_name.values())).plan_memory())
        self.add_dialects(summary, records)
        self.describe(summary, traffic, setting.pools)
        return RunResult(
            records=records,
            requests=requests,
            summary=summary,
            models=tuple(pool.model for pool in setting.pools),
            slo=self.slo,
        )

    def figure_setting(
        self,
        hardware: Sequence[PoolHardware],
        pool_records: Sequence[PoolRecord],
        kept: Kept = EXACT,
        *,
        plots: bool = False,
    ) -> FigureSetting:
        """Returns the setting of the metrics' accumulators.

        hardware: see `pool_hardware`. pool_records: those of the run. kept, plots: see `FigureSetting`.
        Raises ValueError: see `FigureSetting`.
        """
        in_shards = self.sim.shards is not None and not kept.is_exact
        thinned: Any = self.workload if hasattr(self.workload, "of_the_whole") else None
        return FigureSetting(
            pools=hardware,
            pool_records=pool_records,
            slo=self.slo,
            energy=self.energy,
            tariff=self.tariff,
            metrics=self.metrics,
            new_sections=partial(_own_sections, self.workload, self.seed, in_shards),
            new_latencies=partial(self._new_latencies, in_shards),
            thinned=thinned,
            num_replicas=self.num_replicas,
            plots=plots,
            kept=kept,
            own=own_figures(self.metrics.own),
        )

    def pool_hardware(self) -> list[PoolHardware]:
        """Returns the iteration times, the price and the power of the replicas of each pool."""
        return [
            PoolHardware(
                model=pool.iteration_model(),
                price_usd_per_hour=pool.price_usd_per_hour,
                power=PowerModel.of(pool.hardware),
                num_devices=pool.layout.num_devices,
            )
            for pool in self.pools_by_name.values()
        ]

    def describe(
        self, summary: dict[str, Any], traffic: WorkloadNotes, hardware: Sequence[PoolHardware]
    ) -> None:
        """Adds the settings and the notes of a run to its summary. hardware: see `pool_hardware`."""
        pools = list(self.pools_by_name.values())
        if self.pools:
            summary["pools"] = {name: _described(pool) for name, pool in self.pools.items()}
        if summary["kv_transfer"] is not None:
            summary["kv_transfer"] |= asdict(self.kv_transfer)
        summary["workload"] = asdict(traffic)
        share = summary["waiting"]["held_back_share"]
        notes = (
            note
            for pool, own in zip(pools, hardware, strict=True)
            for note in pool_notes(pool, own.model, self.slo, self.workload, share)
        )
        summary["client"] = self.client.name
        summary["frontend"] = {
            name: frontend_json(pool.engine, self.client) for name, pool in self.pools_by_name.items()
        }
        summary["expected_errors"] = [
            {"pool": name, **expected_errors_json(pool, self.workload, share)}
            for name, pool in self.pools_by_name.items()
        ]
        summary["notes"] = [
            *dict.fromkeys(notes),
            *resharding_notes(self.pools_by_name),
            *dict.fromkeys(frontend_note(pool.engine, self.client) for pool in pools),
            *encoder_notes(self.encoders, pools[0]),
            *workload_notes(traffic),
        ]

    @property
    def own_terms(self) -> tuple[str, ...]:
        """Latencies that the SLO limits and only the workload provides."""
        return () if self.slo is None else self.slo.workload_terms

    def _new_latencies(self, in_shards: bool) -> list[OwnLatency]:
        """Returns the accumulators that compute the `own_terms`. in_shards: see `sim.workload.base`."""
        terms = self.own_terms
        return own_latencies(self.workload, seed=self.seed, in_shards=in_shards, terms=terms) if terms else []

    def add_dialects(self, summary: dict[str, Any], records: RunRecords) -> None:
        """Adds the metrics by other tools' definitions to a summary, according to `metrics.dialect`."""
        if not self.metrics.dialects:
            return
        trimmed = summary["trimmed"]
        window = Window(trimmed["start_s"], trimmed["end_s"])
        times = known_token_times(records.requests, records.iterations, records.own_gaps, records.bursts)
        dialects = in_dialects(self.metrics.dialects, records.requests, times, window, self.slo)
        summary["dialects"] = plain_json(dialects)


def _own_sections(workload: Workload, seed: int, in_shards: bool, kept: Kept) -> list[SectionFigure]:
    return own_sections(workload, seed=seed, in_shards=in_shards, kept=kept)


def _described(pool: PoolSettings) -> dict[str, Any]:
    """Returns the description of a pool for the summary."""
    return {
        "replicas": pool.replicas,
        "model": pool.model.name,
        "hardware": pool.hardware.name,
        "devices_per_replica": pool.layout.num_devices,
        "memory": asdict(pool.plan_memory()),
    }
