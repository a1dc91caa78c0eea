"""Incompatible settings end before the run, with key, value and a remedy; branches save KV."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim import simulate
from sim.report.lines import pressure_lines
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "workload=poisson", "workload.num_requests=20", "engine.num_kv_blocks=400")


def build(*overrides):
    return build_run(SOURCE.compose([*SMALL, *overrides]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sim.until_s=0"], "^sim.until_s=0: must be a finite number > 0 s, or null for no limit$"),
        (["metrics.warmup_s=-1"], r"^metrics.warmup_s=-1: must be a finite number >= 0 s, or auto$"),
        (["metrics.cooldown_s=inf"], r"^metrics.cooldown_s=inf: must be a finite number >= 0 s$"),
        (["replicas=0"], "replicas=0: must be >= 1"),
        (["seed=-1"], "seed=-1: must be >= 0"),
        (["signal_age_s=-1"], "^signal_age_s=-1: must be 0 or a finite number >= 1e-06 s$"),
        (
            ["replicas=3", "routing=weighted", "routing.weights=[1,2]"],
            r"^routing.weights=\[1.0, 2.0\]: must have 3 values, one per replica, found 2; \[\] gives",
        ),
        (
            ["routing=weighted", "routing.weights=[1,-2]"],
            r"^routing.weights\[1\]=-2.0: must be a finite number > 0$",
        ),
        (["routing=power_of_two"], "^routing.num_choices=2: must be <= 1, the number of replicas$"),
        (
            ["batching=decode_only"],
            "batching=decode_only, role=mixed: needs role=decode; .*such as batching=chunked",
        ),
        (
            ["scheduling=s3"],
            "scheduling=s3, prediction=none: needs predicted output lengths",
        ),
        (
            ["caching=contiguous", "caching.reserve=predicted"],
            "caching.reserve=predicted, prediction=none: needs predicted output lengths",
        ),
        (
            ["scheduling.preemption_mode=swap", "engine.swap_space_gib=0"],
            "scheduling.preemption_mode=swap, engine.swap_space_gib=0: swapped KV needs host memory",
        ),
        (
            ["caching=tiered", "caching.host_gib=300", "storage.host_memory_gib=256"],
            "caching.host_gib=300 and engine.swap_space_gib=0: together must be <= .*_memory_gib=256, the",
        ),
        (
            [
                "caching=tiered",
                "caching.host_gib=200",
                "scheduling.preemption_mode=swap",
                "engine.swap_space_gib=57",
                "storage.host_memory_gib=256",
            ],
            "caching.host_gib=200 and engine.swap_space_gib=57: together must be <= .*=256",
        ),
        (
            ["caching=tiered", "caching.disk_gib=5000"],
            "caching.disk_gib=5000: must be <= storage.disk_gib=3500, the disk space per GPU",
        ),
        (
            ["workload.branching.width=4", "engine.max_num_seqs=3"],
            "workload.branching.width=4, engine.max_num_seqs=3: .*raise engine.max_num_seqs or lower",
        ),
        (
            ["workload.branching.width=16", "batching.max_num_batched_tokens=15", "engine.max_num_seqs=64"],
            "workload.branching.width=16, max_num_batched_tokens=15: .*raise max_num_batched_tokens or",
        ),
        (
            ["workload.branching.width=16", "batching.max_num_scheduled_tokens=15", "engine.max_num_seqs=64"],
            "workload.branching.width=16, batching.max_num_scheduled_tokens=15: .*; raise batching.max_num_",
        ),
        (
            ["workload.branching.width=9", "batching=slots", "batching.n_parallel=8", "batching.n_batch=8"],
            "workload.branching.width=9, batching.n_batch=8: .*raise batching.n_batch or",
        ),
        (
            ["workload.branching.width=4", "speculation=eagle3"],
            "workload.branching.width=4, speculation=eagle3: .*one answer per request; choose",
        ),
        (
            ["caching=radix", "caching.eviction=belady", "replicas=2"],
            "caching.eviction=belady: needs all requests in advance, .* on replicas=1",
        ),
        (
            [
                "caching=radix",
                "caching.eviction=belady",
                "workload=closed_loop",
                "workload.arrivals.num_users=4",
            ],
            "caching.eviction=belady: .*works for a trace or an open loop",
        ),
    ],
)
def test_rejects_settings_that_do_not_go_together(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(*overrides)


def test_host_memory_may_be_used_to_the_last_byte():
    settings = ("caching=tiered", "caching.disk_gib=3500", "storage.host_memory_gib=256")
    build(*settings, "caching.host_gib=256")
    with pytest.raises(ConfigError, match=r"caching\.host_gib=256\.1"):
        build(*settings, "caching.host_gib=256.1")


@pytest.mark.parametrize("caching", ["contiguous", "buddy", "streaming_llm", "h2o", "snapkv", "fastgen"])
def test_rejects_branches_in_a_cache_that_cannot_fork(caching):
    """It says which setting, which value, and which caches can."""
    message = r"workload.branching.width=2, caching=\w+: cannot share KV between branches; choose .*radix"
    with pytest.raises(ConfigError, match=message):
        build(f"caching={caching}", "workload.branching.width=2", "engine.max_model_len=2048")


@pytest.mark.parametrize("caching", ["paged", "prefix", "radix", "tiered"])
def test_branches_go_with_every_cache_that_can_fork(caching):
    scenario, source = build(f"caching={caching}", "workload.branching.width=2", "engine.num_kv_blocks=20000")
    assert scenario.run(source).summary["requests"]["finished"] == 20


@pytest.mark.parametrize(
    ("shares", "peak_blocks", "block_iterations"),
    [
        # 40 = 2 full blocks of 16 and 8 tokens. Then 24 tokens a branch: 8 fill the third block, 16 a fourth.
        (True, 2 + 4 * 2, 3 + 8 * (2 + 4) + 16 * (2 + 4 * 2)),
        (False, 4 * 4, 4 * 3 + 8 * 4 * 3 + 16 * 4 * 4),
    ],
)
def test_four_answers_to_a_prompt_share_its_blocks(shares, peak_blocks, block_iterations):
    """A prompt of 40 tokens, four answers of 25 (KV is stored of 24 of them), 25 iterations. Sharing, the
    prompt's has 3 blocks, then each branch has its own behind the 2 full ones; else each has all from the
    first iteration on. At the peak 10 blocks do for 16.
    """
    scenario, source = build(
        "workload/lengths=fixed",
        "workload.lengths.prompt_tokens.value=40",
        "workload.lengths.output_tokens.value=25",
        "workload.num_requests=1",
        "workload.branching.width=4",
        "caching=paged",
        f"caching.shares_branches={str(shares).lower()}",
    )
    result = scenario.run(source)
    assert result.summary["kv"]["peak_use_share"] == peak_blocks / 400
    assert result.records.iterations["kv_blocks_used"].sum() == block_iterations
    assert result.requests["output_tokens"].tolist() == [100]


def notes(*overrides):
    scenario, source = build(*overrides)
    return "\n".join(scenario.run(source).summary["notes"])


@pytest.mark.parametrize(
    ("batching", "name"),
    [("slots", "n_parallel"), ("static", "batch_size"), ("orca", "batch_size"), ("dynamic", "batch_size")],
)
def test_a_batch_larger_than_the_slots_is_refused(batching, name):
    """Twelve may run at once: thirteen are refused, twelve are not."""
    message = f"batching.{name}=13: must be <= engine.max_num_seqs=12, .*; set batching.{name}=12 or "
    settings = [f"batching={batching}", "engine.max_num_seqs=12"]
    with pytest.raises(ConfigError, match=message):
        build(*settings, f"batching.{name}=13")
    build(*settings, f"batching.{name}=12")


@pytest.mark.parametrize("caching", ["paged", "contiguous", "streaming_llm", "snapkv"])
def test_longest_prefix_beside_a_cache_that_finds_no_prefixes_is_refused(caching):
    settings = [f"caching={caching}", "engine.max_model_len=2048", "engine.num_kv_blocks=2000"]
    message = f"scheduling=longest_prefix, caching={caching}: this cache finds no prefixes; choose caching="
    with pytest.raises(ConfigError, match=message):
        build("scheduling=longest_prefix", *settings)
    build("scheduling=fcfs", *settings)


@pytest.mark.parametrize("caching", ["prefix", "tiered", "radix"])
def test_a_cache_that_finds_prefixes_goes_with_longest_prefix(caching):
    scenario, _ = build("scheduling=longest_prefix", f"caching={caching}", "engine.num_kv_blocks=20000")
    (pool,) = scenario.pools_by_name.values()
    assert type(pool.scheduling).__name__ == "LongestPrefix"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["role=prefill"], "role=prefill: needs a pool with role=decode as well; add one to `pools`"),
        (["+pools.p.role=decode"], r"pools\.p\.role=decode: needs a pool with role=prefill"),
        (["role=both"], "role=both: must be one of mixed, prefill, decode"),
        (
            ["pools=disaggregated", "pools.decode.batching=prefill_only"],
            r"pools\.decode\.batching=prefill_only",
        ),
        (
            ["pools=disaggregated", "+pools.decode.model=llama2_7b"],
            r"pools\.decode\.model=.*must be .* as in",
        ),
        (["pools=disaggregated", "caching=h2o"], r"pools\.prefill\.caching=h2o: keeps only a part of the KV"),
        (
            ["pools=disaggregated", "+pools.decode.hardware=a100_80gb_sxm", "roles=balance"],
            r"roles=balance: pools\.prefill and pools\.decode must have the same hardware",
        ),
        (["roles=balance"], "roles=balance: must be fixed, as all pools have role=mixed"),
        (
            ["pools=disaggregated", "hardware=l4", "network=nvlink"],
            r"network\.kind=nvlink: L4 has no such link",
        ),
        (["network=ethernet", "network.bandwidth_bytes_per_s=0"], "bandwidth_bytes_per_s=0"),
        (
            ["routing@decode_routing=length_aware"],
            "decode_routing=length_aware, prediction=none: needs predicted output lengths",
        ),
        (["kv_transfer.transfer=never"], "transfer=never: must be one of layerwise, at_end"),
    ],
)
def test_rejects_roles_that_do_not_go_together(overrides, message):
    with pytest.raises(ConfigError, match=message):
        build(*overrides)


@pytest.mark.parametrize(
    ("overrides", "sender"),
    [
        (("engine=vllm",), "decode"),
        (("engine=sglang",), "decode"),
        (("engine=tensorrt_llm",), "decode"),
        (("engine=vllm", "engine.family=null"), "prefill"),
        (("engine=vllm", "kv_transfer.first_token_at=prefill"), "prefill"),
        (("engine=vllm", "engine.family=null", "kv_transfer.first_token_at=decode"), "decode"),
    ],
)
def test_the_replica_that_sends_the_first_token_is_the_engines_unless_set(overrides, sender):
    engine, *others = overrides
    of_pools = ("pools.prefill.batching=prefill_only", "pools.decode.batching=decode_only")
    scenario, _ = build("pools=disaggregated", engine, *of_pools, *others)
    assert scenario.kv_transfer.first_token_at == sender


def test_a_disaggregated_run_tells_what_its_kv_cost():
    """Each answer but those of one token passes from the first pool to the second."""
    scenario, source = build("pools=disaggregated", "kv_transfer.first_token_at=decode")
    result = scenario.run(source).in_pandas()
    use = result.summary["kv_transfer"]
    moved = result.requests[result.requests.prefill_replica >= 0]
    assert use["requests"] == len(moved) > 0
    assert set(moved.replica) == {1}
    tokens = moved.prompt_tokens.sum()
    assert use["bytes"] == pytest.approx(tokens * scenario.kv_bytes_per_token)
    assert use["first_token_at"] == "decode"
    (line,) = (line for line in pressure_lines(result.summary) if line.startswith("KV transfers"))
    assert line.endswith("the decode replica sends the first token")


def test_a_context_that_does_not_fit_is_refused_in_vllms_words_if_it_was_set():
    """Llama-3.1-8B leaves 3.9 GiB of an L4 for KV; one sequence of 131,072 tokens needs 16 GiB."""
    asked = ("model=llama3_1_8b", "hardware=l4", "workload.num_requests=2")
    scenario, _ = build_run(SOURCE.compose(asked))
    pool = next(iter(scenario.pools_by_name.values()))
    longest = pool.longest_sequence(pool.plan_memory())
    assert 28_000 < longest < 36_000
    message = (
        r"engine.max_model_len=131072: to serve at least one request with the model's max seq len "
        r"\(131072\), 16.00 GiB KV cache is needed, which is larger than the available KV cache memory "
        r"\(\d\.\d\d GiB\). "
        rf"Based on the available memory, the estimated maximum model length is {longest}. "
        r"Try increasing engine.gpu_memory_utilization or decreasing engine.max_model_len$"
    )
    with pytest.raises(ConfigError, match=message):
        build_run(SOURCE.compose([*asked, "engine.max_model_len=131072"]))
    build_run(SOURCE.compose([*asked, f"engine.max_model_len={longest}"]))


def test_adapters_that_ranks_share_are_named():
    ranks = ["attention_data_parallel_size=4", "expert_parallel_size=4", "model=deepseek_v2_lite"]
    words = [*ranks, "hardware=h200_sxm", "workload=lora", "workload.of.num_requests=4"]
    told = [
        any("ranks of data-parallel attention share the adapters" in note for note in run.summary["notes"])
        for run in (
            simulate(*words, "adapters=fixed_slots"),
            simulate(*ranks, "workload=poisson", "workload.num_requests=4"),
        )
    ]
    assert told == [True, False]
