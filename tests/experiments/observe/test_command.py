"""`windtunnel observe`: its folder, its exit codes, and the key, which is written nowhere."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("aiohttp", reason="needs the extra observe: pip install 'windtunnel[observe]'")

from experiments.app import cli
from experiments.observe.scripted_server import Script, ScriptedServer


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts scripted servers in a thread, for commands; each call returns the server's address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def begin(script_of: Callable[[dict[str, Any]], Script] = lambda body: Script(), **settings: Any) -> str:
        server = ScriptedServer(script_of, **settings)
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result()
        servers.append(server)
        return server.url

    begin.servers = servers  # type: ignore[attr-defined]
    yield begin

    async def end() -> None:
        for server in servers:
            await server.__aexit__()

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


TRAFFIC = (
    "workload=synthetic",
    "workload/lengths=fixed",
    "workload.lengths.output_tokens.value=5",
    "workload.arrivals.rate_per_s=100",
)


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs `windtunnel observe ...` in a folder of its own: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["windtunnel"])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*arguments: str, num_requests: int = 20) -> tuple[int, str, str]:
        given = ["observe", *TRAFFIC, f"workload.num_requests={num_requests}", *arguments]
        code = cli.main(given)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_the_folder_holds_what_a_simulated_run_leaves(command, serve, tmp_path):
    code, shown, _ = command(f"url={serve()}", "hydra.run.dir=out", "slo.ttft_ms=5000", "slo.tpot_ms=500")
    assert code == 0
    assert "SLO chat attained: 100.0 % of 20 requests met it" in shown
    folder = tmp_path / "out"
    names = {file.name for file in folder.iterdir()}
    assert names == {
        *("config.yaml", "summary.json", "report.html"),
        *("requests.parquet", "chunks.parquet", "events.parquet", "requests.csv.gz"),
    }
    requests = pd.read_parquet(folder / "requests.parquet")
    summary = json.loads((folder / "summary.json").read_text())
    assert requests.attrs["config_digest"] == summary["config_digest"]
    assert len(summary["config_digest"]) == 32
    assert {"ttft_s", "tpot_s", "e2e_s", "slo_met", "status", "prompt_tokens", "due_s"} <= set(requests)
    assert summary["endpoint"]["model"] == "scripted"
    assert summary["itl"]["count"] == 80
    assert "cdn" not in (folder / "report.html").read_text()[:5000]
    assert cli.main(["explain", f"run={folder}", "request=3"]) == 0


def test_the_digest_is_of_the_configuration(command, serve, tmp_path):
    url = serve()
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert command(f"url={url}", f"hydra.run.dir={name}", f"seed={seed}", "report=false")[0] == 0
        digests.append(json.loads((tmp_path / name / "summary.json").read_text())["config_digest"])
    assert digests[0] == digests[1] != digests[2]


def test_a_dead_endpoint_is_reported_by_the_exit_code_and_the_result_is_kept(command, serve, tmp_path):
    calls = iter(range(1000))

    def script(body: dict[str, Any]) -> Script:
        server = serve.servers[0]
        if next(calls) >= 10 and any(len(served.sent_s) == 5 for served in server.served):
            server.die()
        return Script(first_s=0.01, gap_s=0.001)

    code, shown, errors = command(
        f"url={serve(script)}", "hydra.run.dir=out", "give_up_after=5", num_requests=400
    )
    assert code == 3
    assert "requests failed; the result is in out" in errors
    assert "requests failed:" in " ".join(shown.split())
    statuses = pd.read_parquet(tmp_path / "out" / "requests.parquet")["status"].value_counts()
    assert statuses["finished"] >= 1
    assert statuses["aborted"] >= 5


def test_nothing_but_refusals_is_reported_by_the_exit_code(command, serve):
    calls = iter(range(1000))
    url = serve(lambda body: Script() if next(calls) == 0 else Script(status=429, error="slow down"))
    code, shown, _ = command(f"url={url}", "report=false")
    assert code == 3
    assert "20 of 20 requests were rejected: 20 x 429 slow down." in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["url=localhost:8000"], "url=localhost:8000: must be an address such as http://localhost:8000"),
        ([], "url: must be given, for example url=http://localhost:8000"),
        (["url=http://me:secret@host"], "url: must not contain a password"),
        (["url=http://h", "api=chat", "prompts=token_ids"], "messages are text; choose prompts=text or"),
        (
            ["url=http://h", "token_ids=[9,9]"],
            "token_ids=[9,9]: must be two integers >= 0, the second",
        ),
        (
            ["url=http://h", "workload.branching.width=2"],
            "workload.branching.width=2: observe supports one output",
        ),
        (["url=http://h", "until_s=-1"], "until_s=-1: must be a finite number > 0"),
        (["url=http://127.0.0.1:9"], "url=http://127.0.0.1:9: no connection"),
        (["url={url}/wrong"], "/wrong/v1/models returned status 404; OpenAI-compatible servers list"),
        (["url={url}", "served_model_name=script"], "nearest: scripted; allowed: scripted"),
        (["url={url}", "max_model_len=9999"], "max_model_len=9999: must be <= 4096, the server's limit"),
        (
            ["url={locked}"],
            "the server requires an API key (401); export OPENAI_API_KEY=..., or name another",
        ),
        (
            ["url={two}"],
            "served_model_name: must be given, because the server has several models; allowed: a, b",
        ),
        (["url={broken}"], "a request for 4 output tokens returned status 500: no engine"),
        (["url={mute}"], "the server rejects a plain request: none of your questions"),
    ],
)
def test_rejects_what_cannot_be_observed_in_one_line(command, serve, arguments, message):
    urls = {
        "url": serve(),
        "locked": serve(api_key="secret"),
        "two": serve(models=("a", "b")),
        "broken": serve(lambda body: Script(status=500, error="no engine")),
        "mute": serve(lambda body: Script(status=400, error="none of your questions")),
    }
    code, _, errors = command(*(argument.format(**urls) for argument in arguments))
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_the_key_is_sent_and_written_nowhere(command, serve, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "s3cret-key")
    code, _, _ = command(f"url={serve(api_key='s3cret-key')}", "api_key_env=MY_KEY", "hydra.run.dir=out")
    assert code == 0
    assert not any(b"s3cret-key" in file.read_bytes() for file in (tmp_path / "out").iterdir())


def test_help_and_simulate_do_without_the_client_library(command, monkeypatch):
    code = cli.main(["observe", "--help"])
    assert code == 0
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    code, _, errors = command("url=http://h")
    assert code == 2
    assert "pip install 'windtunnel[observe]'" in errors
