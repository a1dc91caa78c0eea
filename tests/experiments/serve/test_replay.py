"""A session of the server is repeated by `workload=recording`: the same tables, request for request."""

import asyncio
import json

import pandas as pd
import pytest

pytest.importorskip("aiohttp")

import experiments.report.command as report
import experiments.report.explain.command as explain
from sim.report.files import write_table
from sim.workload.recording import FILE
from tests.experiments.serve.conftest import scenario_of, serving

LLAMA = "model=llama3_1_8b"
WORLDS = {
    "one replica": [LLAMA, "caching=prefix"],
    "four replicas": [LLAMA, "replicas=4", "routing=prefix_affinity", "caching=radix"],
    "little memory": [LLAMA, "engine.num_kv_blocks=300", "caching=prefix"],
    "no frontend": [LLAMA, "engine=sglang", "caching=radix"],
    "speculation": [LLAMA, "caching=prefix", "speculation=eagle3", "acceptance=iid"],
    "adapters": [LLAMA, "caching=prefix", "adapters=fixed_slots"],
    "priorities": [LLAMA, "scheduling=priority", "engine.max_num_seqs=4"],
    "disaggregated": [LLAMA, "pools=disaggregated"],
    "crash": [LLAMA, "replicas=2", "failures=crash", "failures.events.0.at_s=3", "recovery=tokens"],
    "refusals": [LLAMA, "admission=queue_bound", "admission.max_outstanding=8"],
}


async def clients(client, *, lora=None, priorities=False):
    """Chats of three turns, several outputs, long prompts, and clients that leave, all at the same time."""

    async def chat(user):
        messages = [{"role": "system", "content": "you are a helpful assistant " * 40}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"user {user} asks question {turn} " * 5})
            body = {"messages": messages, "max_tokens": 60, "priority": user % 2 if priorities else 0}
            status, answer = await client.post(
                "/v1/chat/completions", body | ({"model": lora} if lora else {})
            )
            if status == 200:
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            await asyncio.sleep(0.01 * user)

    async def several():
        for n in (1, 3, 2):
            await client.post(
                "/v1/completions", {"prompt": "the same beginning " * 60, "n": n, "max_tokens": 40}
            )

    async def leaves(num_lines):
        """Leaves after so many lines of a stream; 0: as soon as the request is sent."""
        body = {
            "prompt": f"a story {num_lines} " * 30,
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.client.post("/v1/completions", json=body) as response:
            for _ in range(num_lines):
                await response.content.readline()

    await asyncio.gather(*map(chat, range(6)), several(), *map(leaves, (0, 1, 40)))
    while client.fleet.simulation.num_in_progress:
        await asyncio.sleep(0.01)


async def session(overrides, folder, **options):
    """Serves the clients; returns the records, and writes the recording."""
    async with serving(*overrides, time_scale=4.0) as client:
        if options.get("lora"):
            client.fleet.load_adapter(options["lora"], None, replaces=False)
        await asyncio.wait_for(clients(client, **options), 60)
    records = client.fleet.simulation.close()
    write_table(client.fleet.traffic_table(), folder / FILE)
    return records


OPTIONS = {"adapters": {"lora": "sql"}, "priorities": {"priorities": True}}


@pytest.mark.sampled(slow=4)
@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_replay_has_the_tables_of_the_session(world, tmp_path):
    overrides = WORLDS[world]
    live = asyncio.run(session(overrides, tmp_path, **OPTIONS.get(world, {}))).in_pandas()
    replayed = (
        scenario_of(*overrides, "workload=recording", f"workload.path={tmp_path}").run().in_pandas().records
    )
    assert "finished" in set(live.requests["status"])
    pd.testing.assert_frame_equal(replayed.requests, live.requests, rtol=0, atol=1e-9)
    columns = ["replica", "iteration", "start_s", "duration_s", "decode_seqs", "kv_blocks_used"]
    pd.testing.assert_frame_equal(replayed.iterations[columns], live.iterations[columns], rtol=0, atol=1e-9)
    assert list(replayed.gap_s) == pytest.approx(list(live.gap_s), abs=1e-9)


BACK_ENDS = {
    "simulated": [LLAMA, "caching=prefix", "time_scale=4"],
    "engine": ["backend=engine", "model=random_8m", "engine.num_kv_blocks=200", "engine.max_num_seqs=8"],
}


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_folder_of_a_session_is_explained_drawn_and_replayed(server, back_end, signals, capsys):
    if back_end == "engine":
        pytest.importorskip("torch", reason="the engine needs torch")
    with server(*BACK_ENDS[back_end]) as running:
        body = {"prompt": "a prompt of some length, which several requests share " * 3, "max_tokens": 4}
        running.post("/v1/completions", body | {"n": 2, "ignore_eos": True})
        running.post("/v1/completions", body | {"ignore_eos": True})
        stream = body | {"max_tokens": 150, "ignore_eos": True, "stream": True}
        with running.open("/v1/completions", stream) as response:
            response.readline()
            for _ in range(signals):
                running.process.terminate()
            rest = response.read() if signals == 1 else b""
        assert signals == 2 or rest.endswith(b"data: [DONE]\n\n")
        running.process.communicate(timeout=240)
        assert running.process.returncode == 0
    folder = running.folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["requests"]["arrived"] == 4
    assert summary["requests"]["finished"] in ((4,) if signals == 1 else (3, 4))
    assert {"vllm_bench", "guidellm", "aiperf"} <= set(summary["dialects"])
    requests = pd.read_parquet(folder / "requests.parquet")
    for request_id in requests["request_id"]:
        explain.main([f"run={folder}", f"request={request_id}"])
        assert f"Request {request_id}" in capsys.readouterr().out
    report.main([f"run={folder}"])
    assert (folder / "report.html").stat().st_size > 10_000
    replayed = (
        scenario_of(LLAMA, "caching=prefix", "workload=recording", f"workload.path={folder}")
        .run()
        .in_pandas()
    )
    pd.testing.assert_series_equal(replayed.requests["prompt_tokens"], requests["prompt_tokens"])
    assert list(replayed.requests["output_tokens"][:3]) == [4, 4, 4]
    assert replayed.requests["cached_tokens"].iloc[2] > 0, "the recording keeps what prompts share"


@pytest.mark.slow
def test_a_server_without_requests_and_one_that_is_killed_write_nothing(server):
    with server(LLAMA) as running:
        running.process.terminate()
        output, _ = running.process.communicate(timeout=240)
        assert running.process.returncode == 0
        assert "no request came" in output
        assert not list(running.folder.glob("*"))
    with server(LLAMA) as running:
        running.post("/v1/completions", {"prompt": "hello"})
        running.process.kill()
    assert not list(running.folder.glob("*"))
