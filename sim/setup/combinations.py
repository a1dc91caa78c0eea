"""Settings that cannot be combined: a single table, used by runs, the reference and the fuzzer.

Most of the module is the table. A rule has two features that a run cannot have together, and the reason. The
absence of something is also a feature: schedulers that read predictions exclude `no_prediction`. Each feature
defines how it appears in the settings, an example, and the setting of a run without it; error messages are
built from these. Limits of single settings are declared on their fields; relations of numbers, and checks
that depend on models and devices, are made where the values are computed. Settings of a deployment that would
have no effect, or contradict each other, are also rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from fieldlimits import shown
from hwmodels.device import Device
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import AveragesDrafts, Calibrated, DividesAttention, LatencyLevel, Spec
from hwmodels.model import ModelSpec
from policies.admission import AdmitAll
from policies.batching import Batching, BatchingTraits, DataParallel
from policies.batching.static import Static
from policies.caching.content import FutureUses
from policies.caching.pool import BlockPool, Caching, pool_of
from policies.routing import RoutingTraits, reads_replicas
from policies.scheduling.longest_prefix import LongestPrefix
from policies.speculation import DraftLengthTraits
from policies.user_code import name_of, traits_of
from sim.cluster.failures import Random
from sim.setup.engine_profile import EngineProfile
from sim.workload.modified import answers_of, branching_key

ANY_NUM_BLOCKS = 2**20
"""Number of blocks of the KV pool that is created to find out its kind."""


class Feature(NamedTuple):
    """A feature of a run, of one of its pools, or of a replica."""

    text: Callable[[Any], str]
    """Returns the `key=value` setting that enables it, for a `Scenario`, `PoolSettings` or `Deployment` that
    has it; empty for others.
    """
    example: str
    without: str
    """The setting of a run without it, `key=value`, or what to do."""


class Rule(NamedTuple):
    """Two features that exclude each other. The names are keys of `FEATURES`."""

    one: str
    other: str
    reason: str


def _setting(key: str, off: Any, example: Any) -> Feature:
    """Returns the feature of a plain setting, used unless its value is `off`."""

    def text(of: Any) -> str:
        value = attrgetter(key)(of)
        return "" if value == off else f"{key}={shown(value)}"

    return Feature(text, f"{key}={shown(example)}", f"{key}={shown(off)}")


def _choice(key: str, example: str, without: str, holds: Callable[[Any], Any]) -> Feature:
    """Returns the feature of a policy or another object of a group; holds: whether a run has it."""

    def text(of: Any) -> str:
        return f"{key}={name_of(getattr(of, key))}" if holds(of) else ""

    return Feature(text, f"{key}={example}", f"{key}={without}")


def _missing(key: str, without: str, none: str = "none") -> Feature:
    """Returns the feature that is the absence of an object."""
    return Feature(lambda of: f"{key}={none}" if getattr(of, key) is None else "", f"{key}={none}", without)


def _flag(text: str, without: str, holds: Callable[[Any], Any]) -> Feature:
    """Returns the feature of a setting that always appears in the same form."""
    return Feature(lambda of: text if holds(of) else "", text, without)


def _branches(run: Any) -> str:
    width = answers_of(run.workload).width
    return "" if width == 1 else f"{branching_key(run.workload)}.width={width}"


def _kv_pool(pool: Any) -> Any:
    return pool_of(pool.caching, pool.kv_memory(ANY_NUM_BLOCKS, FutureUses(())))


def _learns(routing: Any) -> bool:
    traits = traits_of(routing, RoutingTraits)
    return any(getattr(traits, name) is not None for name in ("on_first_token", "on_end", "on_predicted"))


def _predicts(routing: Any) -> bool:
    return bool(traits_of(routing, RoutingTraits).needs_predictor)


def _by_adapter(run: Any) -> bool:
    return bool(run.served_adapters) and traits_of(run.routing, RoutingTraits).keeps_together == "adapter"


FEATURES = {
    # Of a replica.
    "adapters": _choice("adapters", "fixed_slots", "none", lambda of: of.adapters is not None),
    "lora": _flag("lora", "lora=null", lambda of: of.lora is not None),
    "offload": _flag(
        "engine.offload",
        "engine.offload.cpu_offload_gb=0 and engine.offload.n_gpu_layers=null",
        lambda of: of.engine.offload.is_used,
    ),
    "plain_latency": _choice(
        "latency", "roofline", "calibrated or spec", lambda of: not isinstance(of.latency, Spec | Calibrated)
    ),
    "speculation": Feature(
        lambda of: f"speculation={of.speculation.method}" if of.speculation is not None else "",
        "speculation=ngram",
        "speculation=none",
    ),
    "speculative_latency": _choice(
        "latency", "speculative", "calibrated", lambda of: isinstance(of.latency, AveragesDrafts)
    ),
    # Of a pool.
    "ends_together": _flag(
        "batching.until_last=true",
        "batching.until_last=false",
        lambda pool: traits_of(pool.batching, BatchingTraits).until_last,
    ),
    "full_batches": _flag(
        "batching.waits_until_full=true",
        "batching=dynamic",
        lambda pool: isinstance(pool.batching, Static) and pool.batching.waits_until_full,
    ),
    "longest_prefix": _choice(
        "scheduling", "longest_prefix", "fcfs", lambda pool: isinstance(pool.scheduling, LongestPrefix)
    ),
    "no_acceptance": _missing("acceptance", "acceptance=iid", "null"),
    "no_block_by_block": _choice(
        "caching",
        "h2o",
        "paged, prefix or radix",
        lambda pool: type(_kv_pool(pool)).growth is not BlockPool.growth,
    ),
    "no_draft_length": _missing("draft_length", "draft_length=fixed", "null"),
    "no_forks": _choice(
        "caching", "contiguous", "paged, prefix or radix", lambda pool: not _kv_pool(pool).can_fork
    ),
    "no_prediction": _missing("prediction", "a predictor, such as prediction=histogram"),
    "no_prefixes": _choice(
        "caching", "paged", "prefix, tiered or radix", lambda pool: not _kv_pool(pool).finds_kv
    ),
    "no_swap_space": _flag(
        "engine.swap_space_gib=0",
        "engine.swap_space_gib to more than 0 GiB",
        lambda pool: not pool.engine.swap_space_gib,
    ),
    "overlapped_host": _flag(
        "engine.host.overlapped=true", "engine.host.overlapped=false", lambda pool: pool.host.overlapped
    ),
    "predicting_caching": _flag(
        "caching.reserve=predicted", "caching.reserve=max_tokens", lambda pool: pool.caching.needs_predictor
    ),
    "predicting_scheduling": _choice(
        "scheduling", "shortest_job_first", "fcfs", lambda pool: pool.scheduling.needs_predictor
    ),
    "role": _setting("role", "mixed", "prefill"),
    "scaling": _choice("scaling", "queue_length", "none", lambda pool: pool.scaling is not None),
    "static_batches": _choice(
        "batching", "static", "chunked", lambda pool: isinstance(pool.batching, Static)
    ),
    "swaps": _setting("scheduling.preemption_mode", "recompute", "swap"),
    "tpot_drafts": _choice(
        "draft_length",
        "slo_aware",
        "fixed",
        lambda pool: traits_of(pool.draft_length, DraftLengthTraits).needs_tpot,
    ),
    # Of a run.
    "admission": _choice("admission", "queue_bound", "none", lambda run: type(run.admission) is not AdmitAll),
    "branches": Feature(_branches, "workload.branching.width=2", "{key}=1"),
    "cooldown": _setting("metrics.cooldown_s", 0, 5),
    "encoders": _setting("encoders.replicas", 0, 1),
    "failures": _flag("failures", "failures=none", lambda run: run.failures.events),
    "random_failures": _flag(
        "failures", "failures=none", lambda run: any(isinstance(one, Random) for one in run.failures.events)
    ),
    "migration": _choice("migration", "llumnix", "none", lambda run: run.migration.interval_s is not None),
    "no_slo": _missing("slo", "an SLO, such as slo=chat"),
    "no_tpot": _flag(
        "slo without a TPOT",
        "an SLO with a TPOT, such as slo=chat, or draft_length.tpot_s",
        lambda run: run.tpot_s is None,
    ),
    "predicting_decode_routing": _choice(
        "decode_routing", "length_aware", "least_outstanding", lambda run: _predicts(run.decode_routing)
    ),
    "predicting_routing": _choice(
        "routing", "length_aware", "least_outstanding", lambda run: _predicts(run.routing)
    ),
    "recovered": _setting("recovery.way", "scratch", "tokens"),
    "recovered_kv": _flag(
        "recovery=kv", "recovery=scratch", lambda run: run.recovery.every_tokens is not None
    ),
    "retries": _setting("retries.max_attempts", 1, 3),
    "routing_by_adapter": _choice(
        "routing", "adapter_affinity", "least_outstanding, or another by load", _by_adapter
    ),
    "routing_by_replicas": _choice(
        "routing",
        "least_outstanding",
        "round_robin, random, weighted, dedicated, or session_affinity with routing.max_load=inf",
        lambda run: reads_replicas(run.routing),
    ),
    "routing_by_signals": _choice(
        "routing",
        "join_shortest_kv",
        "least_outstanding, or another by its own counts",
        lambda run: traits_of(run.routing, RoutingTraits).reads_signals,
    ),
    "routing_learns": _choice(
        "routing",
        "slo_aware",
        "round_robin, or another that reads no replica",
        lambda run: _learns(run.routing),
    ),
    "shards": _setting("sim.shards", None, 2),
    "stop_missed": _setting("sim.stop_missed", False, True),
    "stop_overloaded": _setting("sim.stop_overloaded", False, True),
    "thin": _setting("sim.thin", 1, 2),
    "turns": _setting("turns.sleep_level", None, 1),
    "warmup": _setting("metrics.warmup_s", 0, 5),
}

OF_REPLICA = (
    Rule("lora", "adapters", "the same adapters in every batch exclude adapters that requests name"),
    Rule("adapters", "plain_latency", "the level does not model LoRA adapters"),
    Rule("offload", "plain_latency", "the level does not model weights in host memory"),
    Rule("speculation", "speculative_latency", "this level models drafts itself, as an average"),
)
"""Rules of every deployment, and therefore of every pool."""

OF_POOL = (
    Rule("full_batches", "scaling", "a run that is scaled does not know when no more requests come"),
    Rule(
        "ends_together",
        "overlapped_host",
        "batches that end as a whole are not modelled with asynchronous scheduling, which learns of the last "
        "end a step later",
    ),
    Rule("longest_prefix", "no_prefixes", "this cache finds no prefixes"),
    Rule("ends_together", "speculation", "batches that end as a whole are not modelled with drafts"),
    Rule("speculation", "no_draft_length", "the number of draft tokens must be given"),
    Rule("speculation", "no_acceptance", "the accepted draft tokens must be given"),
    Rule("predicting_scheduling", "no_prediction", "needs predicted output lengths"),
    Rule("predicting_caching", "no_prediction", "needs predicted output lengths"),
    Rule("swaps", "no_swap_space", "swapped KV needs host memory"),
)

OF_RUN = (
    Rule("stop_missed", "no_slo", "needs an SLO"),
    Rule("stop_missed", "warmup", "all requests are counted"),
    Rule("stop_missed", "cooldown", "all requests are counted"),
    Rule("predicting_routing", "no_prediction", "needs predicted output lengths"),
    Rule("predicting_decode_routing", "no_prediction", "needs predicted output lengths"),
    Rule("migration", "shards", "requests move between replicas of different shards"),
    Rule("migration", "thin", "a part of a fleet has fewer replicas to choose from"),
    Rule("migration", "failures", "a crash during a migration is not modelled"),
    Rule("migration", "recovered_kv", "copies of KV of requests that move are not modelled"),
    Rule("migration", "turns", "no two replicas of a model are awake at a time"),
    Rule("recovered", "branches", "a request with several branches cannot continue in another replica"),
    Rule("shards", "routing_by_replicas", "it reads the state of replicas, which shards do not share"),
    Rule("shards", "routing_learns", "it learns from all replicas, which shards do not share"),
    Rule("shards", "admission", "it admits by the load of all replicas"),
    Rule("shards", "retries", "a retry is routed again, when its replica has failed it"),
    Rule("shards", "failures", "the requests of a crashed replica go to others"),
    Rule("shards", "recovered_kv", "KV is copied to other replicas over one network"),
    Rule("shards", "encoders", "all replicas share them"),
    Rule("shards", "turns", "pools take turns on the same GPUs"),
    Rule("shards", "stop_overloaded", "it looks at the requests of all replicas"),
    Rule("shards", "stop_missed", "it looks at the requests of all replicas"),
    Rule("thin", "stop_missed", "the number of requests is not exact"),
    Rule("thin", "encoders", "they are shared by all replicas"),
    Rule("thin", "turns", "models that take turns are shared by all"),
    Rule("thin", "failures", "failures name single replicas and pools"),
    Rule(
        "thin",
        "routing_by_adapter",
        "it gives replicas whole adapters, of which a part of the fleet has all",
    ),
    Rule(
        "thin",
        "routing_by_signals",
        "it picks extremes of all replicas by their signals, which a part of the fleet does not have "
        "(join_shortest_kv: mean TTFT up to 8 % too low)",
    ),
)

OF_RUN_AND_POOL = (
    Rule("no_tpot", "tpot_drafts", "needs a TPOT to keep"),
    Rule("stop_overloaded", "full_batches", "such a run does not know when no more requests come"),
    Rule("stop_missed", "full_batches", "such a run does not know when no more requests come"),
    Rule("random_failures", "full_batches", "random failures hide that no more requests come"),
    Rule("shards", "full_batches", "a shard does not know when no more requests come"),
    Rule("migration", "role", "requests of such pools move once, after their prefill"),
    Rule("migration", "static_batches", "takes no request into a batch that runs"),
    Rule("migration", "speculation", "its draft tokens do not move"),
    Rule("migration", "adapters", "they do not move"),
    Rule(
        "migration",
        "no_block_by_block",
        "gives a sequence its memory other than block by block, or drops a part of it",
    ),
    Rule("branches", "role", "a request with several branches cannot continue in another replica"),
    Rule("branches", "speculation", "an engine that speculates serves one answer per request"),
    Rule("branches", "no_forks", "cannot share KV between branches"),
    Rule("shards", "scaling", "it counts the requests of all replicas"),
    Rule("shards", "role", "KV goes from replica to replica"),
    Rule("thin", "scaling", "a scaled fleet cannot be thinned, as its policy decides by whole replicas"),
    Rule("thin", "role", "the pools share a network that a part of the fleet would have for itself"),
)
"""Rules of a feature of the run and one of any of its pools."""

RULES = (*OF_REPLICA, *OF_POOL, *OF_RUN, *OF_RUN_AND_POOL)


def check_replica(deployment: Any) -> None:
    """Raises ValueError for features of a deployment that exclude each other."""
    _check(OF_REPLICA, deployment, deployment)


def check_pool(pool: Any) -> None:
    """Raises ValueError for features of a pool that exclude each other, apart from those of its replicas."""
    _check(OF_POOL, pool, pool)


def check_run(run: Any) -> None:
    """Raises ValueError for features of a scenario, or of it and its pools, that exclude each other."""
    _check(OF_RUN, run, run)
    for name, pool in run.pools_by_name.items():
        _check(OF_RUN_AND_POOL, run, pool, f"pools.{name}." if name else "")


def _check(rules: tuple[Rule, ...], one_of: Any, other_of: Any, where: str = "") -> None:
    for rule in rules:
        one, other = FEATURES[rule.one], FEATURES[rule.other]
        if (had := one.text(one_of)) and (has := other.text(other_of)):
            advice = f"{_instead(other, has, where)}, or {_instead(one, had, '')}"
            raise ValueError(f"{had}, {where}{has}: {rule.reason}; {advice}")


def _instead(feature: Feature, text: str, where: str) -> str:
    """Returns the advice for a run without a feature, such as: choose migration=none."""
    setting = feature.without.format(key=text.partition("=")[0])
    key, _, value = setting.partition("=")
    is_choice = re.match(r"(?!null|true|false)[a-z][a-z_]*\b", value)
    verb = "choose" if is_choice and "." not in key else "set"
    is_setting = all(part.isidentifier() for part in key.split("."))
    return f"{verb} {where if is_setting else ''}{setting}"


def remedies(message: str) -> Iterator[str]:
    """Yields the `key=value` settings that avoid a refusal, for the rule whose reason is in the message."""
    for rule in RULES:
        if f": {rule.reason}; " in message:
            yield from (FEATURES[name].without for name in (rule.other, rule.one))


ROUTING = "engine.kernels.routing"


def check_ranks(batching: Batching, layout: ParallelLayout, latency: LatencyLevel) -> None:
    """Raises ValueError if a batching policy waits for a wrong number of attention groups.

    With a single group any number is allowed; `delayer_note` describes the effect.
    """
    num_ranks = traits_of(batching, BatchingTraits).num_ranks
    if num_ranks is None:
        return
    groups = num_groups(layout, latency)
    if groups > 1 and num_ranks != groups:
        raise ValueError(
            f"batching.num_ranks={num_ranks}: must be {groups}, the attention groups of a replica "
            f"(attention_data_parallel_size={layout.attention_data_parallel_size}), as prompts wait until "
            "there is one for each"
        )


def check_shares(ranks: DataParallel | None, engine: EngineProfile, batching: Batching) -> None:
    """Raises ValueError unless each rank of data-parallel attention has a share of the limits."""
    limits = {
        "engine.max_num_seqs": engine.max_num_seqs,
        "batching.max_num_batched_tokens": traits_of(batching, BatchingTraits).max_num_batched_tokens,
        "engine.num_kv_blocks": engine.num_kv_blocks,
    }
    for name, limit in limits.items():
        if ranks is not None and limit is not None and limit < ranks.size:
            raise ValueError(
                f"{name}={limit}: must be >= {ranks.size}, one for each rank of data-parallel attention; it "
                "is that of a replica, of which each rank has an equal share"
            )


def ranks_note(ranks: DataParallel, engine: EngineProfile, batching: Batching) -> str:
    """Returns a note on each data-parallel attention rank's share of the limits."""
    shares = [f"{engine.max_num_seqs // ranks.size:,} of max_num_seqs={engine.max_num_seqs:,}"]
    budget = traits_of(batching, BatchingTraits).max_num_batched_tokens
    if budget is not None:
        shares.append(f"{budget // ranks.size:,} of max_num_batched_tokens={budget:,}")
    return (
        f"Each of the {ranks.size} ranks of data-parallel attention has a share of the limits: "
        f"{' and '.join(shares)}."
    )


def delayer_note(batching: Batching, layout: ParallelLayout, latency: LatencyLevel) -> str:
    """Returns a note if prompts wait for attention groups that the replica does not have, else empty."""
    num_ranks = traits_of(batching, BatchingTraits).num_ranks
    if num_ranks is not None and num_ranks > 1 == num_groups(layout, latency):
        return (
            f"batching.num_ranks={num_ranks}: prompts wait for so many attention groups, and a "
            "replica has one; set attention_data_parallel_size to the same number."
        )
    return ""


def num_groups(layout: ParallelLayout, latency: LatencyLevel) -> int:
    """Returns the number of groups of devices that compute attention for their own sequences."""
    if isinstance(latency, DividesAttention):
        return latency.num_attention_groups(layout)
    return layout.attention_data_parallel_size


def check_experts(
    model: ModelSpec, engine: EngineProfile, layout: ParallelLayout, latency: LatencyLevel
) -> None:
    """Raises ValueError for expert routing settings of a model without experts, or with all on one rank."""
    routing = engine.kernels.routing
    given = {
        "num_redundant_experts": (routing.num_redundant_experts, 0),
        "placement": (routing.placement, "dealt"),
        "loads": (routing.loads, None),
    }
    for name, (value, default) in given.items():
        if value != default and not model.has_experts:
            shown = f"{len(routing.loads)} numbers" if name == "loads" and routing.loads else value
            usual = "null, with kind=zipf" if default is None else default
            raise ValueError(
                f"{ROUTING}.{name}={shown}: {model.name} has no experts; set it to {usual}, or choose a "
                "mixture of experts, such as model=qwen3_30b_a3b"
            )
    if (
        routing.placement != "dealt"
        and layout.expert_parallel_size == 1
        and not isinstance(latency, DividesAttention)
    ):
        raise ValueError(
            f"{ROUTING}.placement={routing.placement}, expert_parallel_size=1: all experts are on one "
            "rank; set expert_parallel_size, or placement=dealt"
        )


def check_chain(hardware: Device, engine: EngineProfile, caching: Caching) -> None:
    """Raises ValueError for features that a chain of chips with the model in SRAM does not support."""
    if hardware.chain is None:
        return
    machine = f"{hardware.name} holds the model in the SRAM of its chips"
    offload = engine.offload
    for name, value, unused in (
        ("cpu_offload_gb", offload.cpu_offload_gb, 0.0),
        ("n_gpu_layers", offload.n_gpu_layers, None),
    ):
        if value != unused:
            raise ValueError(
                f"engine.offload.{name}={value:g}: {machine}, and reads none from a host; set it to "
                f"{'null' if unused is None else 0}"
            )
    kernels = engine.kernels.attention_kernels
    if kernels is not None:
        raise ValueError(
            f"engine.kernels.attention_kernels={kernels}: {machine}, where no GPU kernels run; set it to null"
        )
    if caching.weight_reads is not None:
        raise ValueError(
            f"caching={name_of(caching)}: {machine}, and reading attention weights there is not modelled; "
            "choose caching=streaming_llm, or a GPU"
        )
