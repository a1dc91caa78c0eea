"""TTFT includes the times of the client and of the front end, and the answer says so."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.engine_profile import Client, frontend_note

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
ALONE = (
    "workload=synthetic",
    "workload.num_requests=4",
    "workload/arrivals=constant",
    "workload.arrivals.rate_per_s=0.1",
    "workload/lengths=fixed",
    "workload.lengths.prompt_tokens.value=1000",
    "workload.lengths.output_tokens.value=3",
    "slo=none",
)


def build(*overrides):
    return build_run(SOURCE.compose([*ALONE, *overrides]))


def ttft_s(*overrides):
    scenario, source = build(*overrides)
    return float(scenario.run(source).in_pandas().requests["ttft_s"].mean())


def mean_ttft_s(*overrides):
    scenario, source = build_run(SOURCE.compose([*overrides, "slo=none"]))
    return float(scenario.run(source).in_pandas().requests["ttft_s"].mean())


def test_the_client_of_a_measurement_adds_its_time_for_the_engine_that_shows_it():
    added = [
        ttft_s(f"engine={engine}", "client=inferencex") - ttft_s(f"engine={engine}")
        for engine in ("sglang", "vllm")
    ]
    assert added == pytest.approx([0.174, 0.0])


def test_a_lone_request_waits_for_nothing_but_the_work_of_the_front_end():
    none = ("engine.frontend=null", "engine.frontend_s=0")
    scenario, _ = build()
    assert ttft_s() - ttft_s(*none) == pytest.approx(scenario.engine.idle_frontend_s)


def test_engines_rank_as_in_gpustacks_measurement():
    """Qwen3-8B on an H100, 4 clients, ShareGPT: SGLang 0.5.3 28 ms, TensorRT-LLM 1.2 52, vLLM 0.11 64."""
    request = (
        "model=qwen3_8b",
        "workload=synthetic",
        "workload/arrivals=max_concurrency",
        "workload.arrivals.num_users=4",
        "workload.num_requests=100",
        "workload/lengths=lognormal",
        "workload.lengths.prompt_tokens.mean=232",
        "workload.lengths.prompt_tokens.cv=1.4",
        "workload.lengths.output_tokens.mean=221",
        "workload.lengths.output_tokens.cv=1",
    )
    found = [mean_ttft_s(f"engine={engine}", *request) for engine in ("sglang", "tensorrt_llm", "vllm_sync")]
    assert found == sorted(found)
    assert found[0] < 0.045 < 0.055 < found[2] < 0.07


def test_more_processes_take_a_burst_faster_than_one():
    """500 requests for Qwen3-0.6B on an H100, measured with one process: 95 requests/s."""
    burst = (
        "model=qwen3_0_6b",
        "workload/arrivals=all_at_once",
        "workload.num_requests=500",
        "workload.lengths.prompt_tokens.value=512",
        "workload.lengths.output_tokens.value=128",
    )
    without_rate = [override for override in ALONE if "arrivals" not in override]
    rates = []
    for servers in (1, 4):
        settings = [*without_rate, *burst, f"engine.frontend.servers={servers}"]
        scenario, source = build_run(SOURCE.compose(settings))
        summary = scenario.run(source).summary
        rates.append(500 / summary["simulated_s"])
    assert rates[0] == pytest.approx(95, rel=0.1)
    assert rates[1] > 1.5 * rates[0]


@pytest.mark.parametrize(
    ("overrides", "processes"),
    [
        ((), 1),
        (("engine.frontend.servers=3",), 3),
        (("model=deepseek_r1", "tensor_parallel_size=8", "attention_data_parallel_size=8"), 8),
    ],
)
def test_vllm_has_a_process_for_each_data_parallel_rank_unless_set(overrides, processes):
    scenario, _ = build(*overrides)
    attention = scenario.layout.attention_data_parallel_size
    assert scenario.engine.num_frontend_servers(attention) == processes


def test_the_answer_names_the_client_and_the_ranges():
    scenario, source = build("engine=sglang", "client=inferencex")
    summary = scenario.run(source).summary
    assert summary["client"] == "inferencex"
    assert summary["frontend"][""] == {
        "engine_s": pytest.approx(5.5e-3),
        "engine_range_s": [0.0, 0.012],
        "client_s": 0.174,
        "client_range_s": [0.02, 0.29],
    }
    (note,) = (note for note in summary["notes"] if note.startswith("TTFT includes"))
    assert note == (
        "TTFT includes 5.5 ms (measured: 0 to 12) of SGLang's idle front end (prompt of 1,000 tokens), and "
        "174 ms (measured: 20 to 290) of client=inferencex."
    )


def test_a_client_without_measurements_says_so():
    scenario, _ = build("client=guidellm")
    assert frontend_note(scenario.engine, scenario.client).endswith(
        "and 0 ms (not measured) of client=guidellm."
    )
    scenario, _ = build()
    assert frontend_note(scenario.engine, scenario.client).endswith("and no time of a client (client=none).")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": {"tgi": 1.0}}, "seconds.tgi: must be one of vllm, sglang, tensorrt_llm, others"),
        ({"range_s": {"tgi": None}}, "range_s.tgi: must be one of"),
        ({"seconds": {"vllm": -1.0}}, "seconds.vllm=-1.0: must be a finite number >= 0 s"),
        ({"range_s": {"others": (2.0, 1.0)}}, "must be the least and the largest time"),
    ],
)
def test_clients_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Client(**given)


def test_errors_name_the_key():
    with pytest.raises(ConfigError, match=r"engine\.frontend.*servers=0: must be >= 1"):
        build("engine.frontend.servers=0")
