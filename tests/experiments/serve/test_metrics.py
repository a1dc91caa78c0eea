"""/metrics of a simulated fleet: its counters are the sums of the run's tables."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache
from itertools import islice
from math import inf

import numpy as np
import pytest

pytest.importorskip("aiohttp", reason="needs the extra serve: pip install 'windtunnel[serve]'")
pytest.importorskip("prometheus_client", reason="needs the extra serve: pip install 'windtunnel[serve]'")

from prometheus_client.parser import text_string_to_metric_families

from experiments.serve.simulated.metrics import FleetMetrics
from hwmodels.iterations import COUNTED, IterationShape
from sim.workload.base import WorkloadNotes
from tests.worlds.serving import complete, get, make_job, served

MANY = 1 << 40

WORLDS = {
    "one": ["model=llama3_1_8b", "load=4"],
    "four replicas": ["model=llama3_1_8b", "replicas=4", "load=8", "routing=prefix_affinity"],
    "conversations": ["model=llama3_1_8b", "workload=conversation", "caching=prefix"],
    "small chunks": ["model=llama3_1_8b", "caching=prefix", "batching.max_num_batched_tokens=512"],
    "little memory": ["model=llama3_1_8b", "hardware=l4", "load=3"],
    "swapping": ["model=llama3_1_8b", "hardware=l4", "load=3", "scheduling.preemption_mode=swap"],
    "synchronous": ["model=llama3_1_8b", "engine.host.overlapped=false", "load=4"],
    "disaggregated": ["model=llama3_1_8b", "pools=disaggregated", "load=2"],
    "speculation": ["model=llama3_1_8b", "speculation=eagle3", "acceptance=iid", "load=2"],
    "adapters": ["model=llama3_1_8b", "workload=lora", "adapters=fixed_slots"],
}


class Scrape:
    """The numbers of a text of metrics, summed over engines."""

    def __init__(self, text: str):
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def total(self, name, **labels):
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found)


def run(overrides, num_requests=80, scrape_every=inf):
    """Returns the last scrape of a fleet that has served a workload, and the records of the run."""
    job = make_job(*overrides)
    fleet = job.fleet()
    metrics, simulation = FleetMetrics(fleet), fleet.simulation
    source = job.scenario.source()
    arrivals = [*islice(source.arrivals(), num_requests)]
    for number, arrival in enumerate(arrivals):
        simulation.advance(arrival.at_s, MANY)
        if number % scrape_every == 0:
            Scrape(metrics.serving.text().decode())
        simulation.add(arrival)
    while simulation.next_event_s < inf:
        simulation.advance(simulation.next_event_s, MANY)
    result = job.scenario.result(simulation.close(), WorkloadNotes()).in_pandas()
    return Scrape(metrics.serving.text().decode()), result.records


@cache
def world(name):
    return run(WORLDS[name])


@pytest.mark.sampled(fast=3, slow=7)
@pytest.mark.parametrize("name", WORLDS)
def test_counters_are_the_sums_of_the_tables(name):
    scrape, records = world(name)
    requests = records.requests
    assert len(requests) == 80
    complete = requests[requests.status == "finished"]
    reasons = Counter("length" if reason == "length" else "stop" for reason in complete.reason)
    for reason in ("stop", "length"):
        assert scrape.total("request_success_total", finished_reason=reason) == reasons[reason]
    for metric, column in (
        ("prompt_tokens_total", "prompt_tokens"),
        ("prompt_tokens_cached_total", "cached_tokens"),
        ("generation_tokens_total", "output_tokens"),
        ("num_preemptions_total", "preemptions"),
        ("request_prompt_tokens_sum", "prompt_tokens"),
        ("request_generation_tokens_sum", "output_tokens"),
        ("request_num_preemptions_sum", "preemptions"),
    ):
        assert scrape.total(metric) == requests[column].sum(), metric
    hits = scrape.total("prefix_cache_hits_total")
    if len(records.pools) == 1:
        found = hits + scrape.total("external_prefix_cache_hits_total")
        assert found == requests.cached_tokens.sum()
        assert scrape.total("prefix_cache_queries_total") == requests.prompt_tokens.sum()
    computed = requests.prompt_tokens.sum() - requests.cached_tokens.sum()
    assert scrape.total("iteration_tokens_total_sum") == computed + requests.output_tokens.sum()


@pytest.mark.parametrize("name", WORLDS)
def test_latencies_are_those_of_the_tables(name):
    scrape, records = world(name)
    requests = records.requests
    pool = next(iter(make_job(*WORLDS[name]).scenario.replica_pools()))
    frontend_s = requests.prompt_tokens.map(pool.idle_frontend_s)
    e2e_s = requests.finished_s - requests.arrival_s
    decode_s = requests.last_token_s - requests.first_token_s
    later = requests.output_tokens - 1
    for metric, expected_s in (
        ("time_to_first_token_seconds", requests.first_token_s - requests.arrival_s),
        ("e2e_request_latency_seconds", e2e_s),
        ("request_queue_time_seconds", requests.scheduled_s - requests.arrival_s - frontend_s),
        ("request_prefill_time_seconds", requests.first_token_s - requests.scheduled_s),
        ("request_decode_time_seconds", decode_s),
        ("request_inference_time_seconds", requests.last_token_s - requests.scheduled_s),
        ("request_time_per_output_token_seconds", (decode_s / later).where(later > 0, 0.0)),
    ):
        assert scrape.total(f"{metric}_count") == len(requests), metric
        assert scrape.total(f"{metric}_sum") == pytest.approx(expected_s.sum()), metric
    assert scrape.total("inter_token_latency_seconds_sum") == pytest.approx(decode_s.sum())
    num_gaps = later.sum()
    if records.speculation is not None:
        num_gaps -= records.iterations.kept_tokens.sum()
    assert scrape.total("inter_token_latency_seconds_count") == num_gaps


def test_drafts_are_those_of_the_tables():
    scrape, records = world("speculation")
    iterations, acceptance = records.iterations, records.speculation.acceptance
    assert scrape.total("spec_decode_num_drafts_total") == iterations.draft_passes.sum()
    assert scrape.total("spec_decode_num_draft_tokens_total") == iterations.verified_tokens.sum()
    assert scrape.total("spec_decode_num_accepted_tokens_total") == iterations.accepted_tokens.sum()
    for row in acceptance.itertuples():
        found = scrape.total("spec_decode_num_accepted_tokens_per_pos_total", position=str(row.place - 1))
        assert found == row.accepted


@pytest.mark.parametrize("name", ["one", "speculation", "adapters"])
def test_work_does_not_depend_on_the_scrapes(name):
    often, _ = run(WORLDS[name], scrape_every=1)
    once, _ = world(name)
    for counter in ("estimated_flops_per_gpu_total", "estimated_read_bytes_per_gpu_total"):
        assert often.total(counter) == pytest.approx(once.total(counter))
        assert once.total(counter) > 0


def test_flops_are_those_of_the_hardware_model_and_of_one_gpu():
    overrides = ["model=llama3_1_8b", "load=4", "tensor_parallel_size=2"]
    scrape, records = run(overrides)
    (pool,) = make_job(*overrides).scenario.replica_pools()
    shapes = IterationShape(*(records.iterations[name].to_numpy(np.int64) for name in COUNTED))
    for name, of_all in (("flops", pool.model.flops), ("read_bytes", pool.model.bytes_moved)):
        expected = np.sum(of_all(shapes)) / 2
        assert scrape.total(f"estimated_{name}_per_gpu_total") == pytest.approx(expected)


def test_the_worlds_have_what_they_are_to_test():
    assert world("little memory")[0].total("num_preemptions_total") > 0
    assert world("conversations")[0].total("prefix_cache_hits_total") > 0
    assert world("disaggregated")[0].total("external_prefix_cache_hits_total") > 0
    assert world("speculation")[0].total("spec_decode_num_accepted_tokens_total") > 0


def test_a_crash_takes_nothing_back():
    crash = ["failures=crash", "failures.events.0.at_s=5"]
    scrape, records = run(["model=llama3_1_8b", "replicas=2", "load=6", *crash])
    requests = records.requests
    produced = requests.output_tokens.sum() + requests.lost_tokens.sum()
    assert requests.lost_tokens.sum() > 0
    assert scrape.total("generation_tokens_total") == produced
    assert scrape.total("request_success_total") == 80


def test_a_server_shows_its_metrics():
    async def test(client):
        await asyncio.gather(*(complete(client, "one two three", n=2) for _ in range(5)))
        status, text = await get(client, "/metrics")
        scrape = Scrape(text)
        assert status == 200
        assert scrape.total("request_success_total", finished_reason="length") == 10
        assert scrape.total("generation_tokens_total") == 40
        assert scrape.total("request_params_n_count") == 5
        assert scrape.total("request_params_n_sum") == 10
        assert scrape.total("request_params_max_tokens_sum") == 40
        assert scrape.total("cache_config_info", block_size="16") == 2
        gauge = scrape.families["vllm:kv_cache_usage_perc"]
        assert {sample.labels["engine"] for sample in gauge.samples} == {"0", "1"}
        assert "simulated seconds: 20" in scrape.families["vllm:time_to_first_token_seconds"].documentation

    served(test, "model=llama3_1_8b", "replicas=2")


def test_running_requests_and_their_adapters_are_seen():
    async def test(client):
        _, listed = await get(client, "/v1/models")
        adapter = next(model["id"] for model in listed["data"] if model["parent"])
        tasks = [
            asyncio.create_task(complete(client, model=model, max_tokens=100_000))
            for model in (adapter, listed["data"][0]["id"])
        ]
        while Scrape((await get(client, "/metrics"))[1]).total("num_requests_running") < 2:
            await asyncio.sleep(0.01)
        scrape = Scrape((await get(client, "/metrics"))[1])
        assert scrape.total("lora_requests_info", running_lora_adapters=adapter, waiting_lora_adapters="") > 0
        assert 0 < scrape.total("kv_cache_usage_perc") < 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while scrape.total("request_success_total", finished_reason="abort") < 2:
            await asyncio.sleep(0.01)
            scrape = Scrape((await get(client, "/metrics"))[1])
        assert scrape.total("num_requests_running") == 0

    served(test, "model=llama3_1_8b", "workload=lora", "adapters=fixed_slots")
